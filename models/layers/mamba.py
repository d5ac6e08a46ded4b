"""The layers of Mamba-2, alone or in hybrids such as Nemotron-H, Granite 4, Bamba and Falcon H1."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import LayerSpec, ModelConfig
from ..mixer_specs import ScanSpec
from ..recurrence import Recur
from .linear import linear
from .norm import unit_norm
from .params import Part, declare, declare_merged


class ScanInputs(NamedTuple):
    """The input of a state space: a step's projected tokens, and the state's own parameters.

    Its arrays are for all devices, or one device's share.
    """

    projected_tsr: Array
    """Each shard has the gate of the output, x, b, c and the time steps, one after the other."""
    conv_sr1k: Array
    """The weights of the convolution of x, b and c, in the same order."""
    conv_bias_sr: Array | None
    log_rate_n: Array
    step_bias_n: Array
    skip_n: Array
    norm_nh: Array | None

    @property
    def sharded_axes(self) -> tuple[int | None, ...]:
        """Return the axis along which devices share each array."""
        return 1, 0, 0, 0, 0, 0, 0

    def run(self, recur: Recur, spec: LayerSpec, cfg: ModelConfig) -> tuple[Array, Recur]:
        """Run a step's tokens through their states; return [t, heads, head_dim], gated and normed."""
        state, num_shards = spec.state, cfg.num_shards
        assert isinstance(state, ScanSpec)
        (t, shards, _), dtype = self.projected_tsr.shape, self.projected_tsr.dtype
        inner, c = state.num_inner // num_shards, state.num_channels // num_shards
        gate_tsi, mixed_tsc, dt_tsn = jnp.split(self.projected_tsr, [inner, inner + c], -1)
        weight_kc = self.conv_sr1k.reshape(shards * c, -1).T
        bias_c = None if self.conv_bias_sr is None else self.conv_bias_sr.reshape(-1)
        convolved_tc, recur = recur.convolve(mixed_tsc.reshape(t, -1), weight_kc, bias_c=bias_c, activation="silu")
        x_tsi, *written = jnp.split(convolved_tc.reshape(t, shards, c), [inner, (inner + c) // 2], -1)
        b_tgs, c_tgs = (each.reshape(t, -1, state.state_dim) for each in written)
        dt_tn = jax.nn.softplus(dt_tsn.reshape(t, -1).astype(jnp.float32) + self.step_bias_n)
        dt_tn, rate_n = jnp.clip(dt_tn, *state.dt_limits), -jnp.exp(self.log_rate_n)
        x_tnh = x_tsi.reshape(t, -1, state.head_dim)
        out_tnh, recur = recur.scan(x_tnh, dt_tn, rate_n, b_tgs, c_tgs, self.skip_n)
        gate_tnh = jax.nn.silu(gate_tsi.reshape(x_tnh.shape).astype(jnp.float32))
        out_tnh, gates_last = out_tnh.astype(jnp.float32), state.norms_before_gate
        out_tnh = out_tnh if gates_last else out_tnh * gate_tnh
        if self.norm_nh is not None:
            normed_tgi = unit_norm(out_tnh.reshape(*b_tgs.shape[:2], -1), cfg.norm_eps)
            out_tnh = normed_tgi.reshape(x_tnh.shape) * self.norm_nh.astype(jnp.float32)
        return (out_tnh * gate_tnh if gates_last else out_tnh).astype(dtype), recur


class Mamba2(nnx.Module):
    """The projections around a state space, the convolution before it, and the gated norm behind it."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        assert isinstance(spec.state, ScanSpec)
        state, d, num_shards = spec.state, cfg.hidden_size, cfg.num_shards
        n, h, written = state.num_heads, state.head_dim, state.num_groups * state.state_dim
        part = partial(Part, axis="channels")
        convolved = (part("x", size=state.num_inner), part("b", size=written), part("c", size=written))
        parts = (part("gate", size=state.num_inner), *convolved, part("dt", size=n))
        self.projections = declare_merged(parts, (d,), ("embed",), num_shards, dtype, 1)
        taps = [part._replace(name=f"{part.name}_conv") for part in convolved]
        self.conv = declare_merged(taps, (1, state.conv_size), ("tap", "tap"), num_shards, dtype)
        self.log_rate, self.step_bias, self.skip = (declare((n,), ("heads",), jnp.float32) for _ in range(3))
        self.norm = declare((n, h), ("heads", "head_dim"), dtype) if state.has_norm else None
        self.o = declare((d, n * h), ("embed", "heads"), dtype, 1)
        self.has_bias, self.has_conv_bias = state.bias, state.conv_bias
        self.factors = None if set(state.factors) == {1.0} else state.factors
        self.sizes = tuple(part.size // num_shards for part in parts)
        if state.conv_bias:
            biases = [part._replace(name=f"{part.name}_conv_bias") for part in convolved]
            self.conv_bias = declare_merged(biases, (), (), num_shards, dtype)
        if state.bias:
            biases = [part._replace(name=f"{part.name}_bias") for part in parts]
            self.projections_bias = declare_merged(biases, (), (), num_shards, dtype)
            self.o_bias = declare((d,), ("embed",), dtype)

    def project(self, x_td: Array) -> ScanInputs:
        """Return the state's inputs for a step's tokens."""
        projected_tsr = linear(x_td, self.projections, bias=self.projections_bias if self.has_bias else None)
        if self.factors is not None:
            factors_r = jnp.asarray(np.repeat(self.factors, self.sizes), jnp.float32)
            projected_tsr = (projected_tsr * factors_r).astype(x_td.dtype)
        conv_bias_sr = self.conv_bias[...] if self.has_conv_bias else None
        of_heads = self.log_rate[...], self.step_bias[...], self.skip[...]
        norm_nh = None if self.norm is None else self.norm[...]
        return ScanInputs(projected_tsr, self.conv[...], conv_bias_sr, *of_heads, norm_nh)

    def output(self, out_tnh: Array, plus_td: Array | None = None) -> Array:
        """Return [t, d], added to `plus_td`."""
        return linear(out_tnh, self.o, plus=plus_td, bias=self.o_bias if self.has_bias else None)
