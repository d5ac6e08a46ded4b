"""The layers of Mamba, alone or in a hybrid such as Jamba."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import LayerSpec, ModelConfig
from ..mixer_specs import SelectiveSpec
from ..params import MESH_AXES
from ..recurrence import Recur
from .linear import linear
from .norm import unit_norm
from .params import Part, declare, declare_merged


class SelectiveInputs(NamedTuple):
    """The input of a selective scan: a step's projected tokens, and the parameters of the convolution and the scan.

    Its arrays are for all devices, or one device's share.
    """

    projected_tsr: Array
    """Each shard has x, and after it the gate of the output."""
    conv_c1k: Array
    conv_bias_c: Array | None
    mixed_rc: Array
    """The projection of the latents of time steps, of b and of c, which sums over the channels of all devices."""
    step_cl: Array
    """The projection of the latents to time steps."""
    step_bias_c: Array
    log_rate_cn: Array
    skip_c: Array
    scales_r: Array | None
    """The scales of the norms of the latents, of b and of c."""

    @property
    def sharded_axes(self) -> tuple[int | None, ...]:
        """Return the axis along which devices share each array; None for an array that each device has whole."""
        return 1, 0, 0, 1, 0, 0, 0, 0, None

    def run(self, recur: Recur, spec: LayerSpec, cfg: ModelConfig) -> tuple[Array, Recur]:
        """Run a step's tokens through their states; return [t, channels], gated."""
        state, t, dtype = spec.state, len(self.projected_tsr), self.projected_tsr.dtype
        assert isinstance(state, SelectiveSpec)
        x_tc, gate_tc = (x.reshape(t, -1) for x in jnp.split(self.projected_tsr, 2, axis=-1))
        weight_kc = self.conv_c1k.reshape(len(self.conv_c1k), -1).T
        x_tc, recur = recur.convolve(x_tc, weight_kc, bias_c=self.conv_bias_c, activation="silu")
        mixed_tr = _dot(x_tc, self.mixed_rc)
        if cfg.num_shards > 1:
            mixed_tr = jax.lax.psum(mixed_tr, MESH_AXES)
        parts = self._normed(mixed_tr.astype(dtype), state)
        dt_tc = jax.nn.softplus(_dot(parts[0], self.step_cl) + self.step_bias_c)
        out_tc, recur = recur.scan(x_tc, dt_tc, -jnp.exp(self.log_rate_cn), *parts[1:], self.skip_c)
        return (out_tc.astype(jnp.float32) * jax.nn.silu(gate_tc.astype(jnp.float32))).astype(dtype), recur

    def _normed(self, mixed_tr: Array, state: SelectiveSpec) -> list[Array]:
        """Return the latents of time steps, b and c, normed if the layer norms them."""
        ends = [state.dt_rank, state.dt_rank + state.state_dim]
        parts = jnp.split(mixed_tr, ends, axis=-1)
        if state.norm_eps is not None:
            parts = [unit_norm(part, state.norm_eps) for part in parts]
        if self.scales_r is not None:
            parts = [part * scale for part, scale in zip(parts, jnp.split(self.scales_r, ends), strict=True)]
        return parts


def _dot(x_ti: Array, weight_oi: Array) -> Array:
    """Return the product in float32. These weights are small, and are never quantized."""
    precision = jax.lax.Precision.HIGHEST if x_ti.dtype == jnp.float32 else None
    return jnp.einsum("ti,oi->to", x_ti, weight_oi, precision=precision, preferred_element_type=jnp.float32)


class Mamba(nnx.Module):
    """The projections around a selective scan, and its parameters."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        assert isinstance(spec.state, SelectiveSpec)
        state, d, num_shards = spec.state, cfg.hidden_size, cfg.num_shards
        c, n = state.num_channels, state.state_dim
        parts = [Part("x", "channels", c), Part("gate", "channels", c)]
        self.projections = declare_merged(parts, (d,), ("embed",), num_shards, dtype, 1)
        self.conv = declare((c, 1, state.conv_size), ("channels", "tap", "tap"), dtype)
        self.mixed = declare((state.dt_rank + 2 * n, c), ("latent", "channels"), dtype)
        self.step = declare((c, state.dt_rank), ("channels", "latent"), dtype)
        of_channels = partial(declare, (c,), ("channels",))
        self.step_bias, self.skip = of_channels(jnp.float32), of_channels(jnp.float32)
        self.log_rate = declare((c, n), ("channels", "latent"), jnp.float32)
        self.o = declare((d, c), ("embed", "channels"), dtype, 1)
        self.has_bias, self.has_scales = state.bias, state.norm_scales
        self.conv_bias = of_channels(dtype) if state.conv_bias else None
        if state.bias:
            biases = [part._replace(name=f"{part.name}_bias") for part in parts]
            self.projections_bias = declare_merged(biases, (), (), num_shards, dtype)
            self.o_bias = declare((d,), ("embed",), dtype)
        if state.norm_scales:
            self.step_norm = declare((state.dt_rank,), ("latent",), dtype)
            self.b_norm, self.c_norm = (declare((n,), ("latent",), dtype) for _ in range(2))

    def project(self, x_td: Array) -> SelectiveInputs:
        """Return the scan's inputs for a step's tokens."""
        projected_tsr = linear(x_td, self.projections, bias=self.projections_bias if self.has_bias else None)
        norms = (self.step_norm, self.b_norm, self.c_norm) if self.has_scales else ()
        return SelectiveInputs(
            projected_tsr,
            self.conv[...],
            None if self.conv_bias is None else self.conv_bias[...],
            self.mixed[...],
            self.step[...],
            self.step_bias[...],
            self.log_rate[...],
            self.skip[...],
            jnp.concatenate([norm[...] for norm in norms]) if norms else None,
        )

    def output(self, out_tc: Array, plus_td: Array | None = None) -> Array:
        """Return [t, d], added to `plus_td`."""
        return linear(out_tc, self.o, plus=plus_td, bias=self.o_bias if self.has_bias else None)
