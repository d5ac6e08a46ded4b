"""The short convolution of LFM2."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import LayerSpec, ModelConfig
from ..mixer_specs import ConvSpec
from ..recurrence import Recur
from .linear import linear
from .params import Part, declare, declare_merged


class ConvInputs(NamedTuple):
    """The input of a short convolution's state: a step's projected tokens, and the convolution's weights.

    Its arrays are for all devices, or one device's share.
    """

    projected_tsr: Array
    """Each shard has the gate before the convolution, the gate after it, and the input that is convolved."""
    conv_c1k: Array
    bias_c: Array | None

    @property
    def sharded_axes(self) -> tuple[int | None, ...]:
        """Return the axis along which devices share each array."""
        return 1, 0, 0

    def run(self, recur: Recur, spec: LayerSpec, cfg: ModelConfig) -> tuple[Array, Recur]:
        """Run a step's tokens through their states; return [t, channels]."""
        del spec, cfg
        t = len(self.projected_tsr)
        gate_in_tc, gate_out_tc, x_tc = (x.reshape(t, -1) for x in jnp.split(self.projected_tsr, 3, axis=-1))
        weight_kc = self.conv_c1k.reshape(len(self.conv_c1k), -1).T
        out_tc, recur = recur.convolve(gate_in_tc * x_tc, weight_kc, bias_c=self.bias_c)
        return gate_out_tc * out_tc, recur


class ShortConv(nnx.Module):
    """The projections around a convolution over the last few tokens."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        assert isinstance(spec.state, ConvSpec)
        state, d, num_shards = spec.state, cfg.hidden_size, cfg.num_shards
        c, self.has_bias = state.num_channels, state.bias
        parts = [Part(name, "channels", c) for name in ("gate_in", "gate_out", "x")]
        self.projections = declare_merged(parts, (d,), ("embed",), num_shards, dtype, 1)
        self.conv = declare((c, 1, state.conv_size), ("channels", "tap", "tap"), dtype)
        self.o = declare((d, c), ("embed", "channels"), dtype, 1)
        if state.bias:
            biases = [part._replace(name=f"{part.name}_bias") for part in parts]
            self.projections_bias = declare_merged(biases, (), (), num_shards, dtype)
            self.conv_bias = declare((c,), ("channels",), dtype)
            self.o_bias = declare((d,), ("embed",), dtype)

    def project(self, x_td: Array) -> ConvInputs:
        """Return the state's inputs for a step's tokens."""
        projected_tsr = linear(x_td, self.projections, bias=self.projections_bias if self.has_bias else None)
        return ConvInputs(projected_tsr, self.conv[...], self.conv_bias[...] if self.has_bias else None)

    def output(self, out_tc: Array, plus_td: Array | None = None) -> Array:
        """Return [t, d], added to `plus_td`."""
        return linear(out_tc, self.o, plus=plus_td, bias=self.o_bias if self.has_bias else None)
