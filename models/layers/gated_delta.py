"""The gated delta nets: that of Qwen3-Next and its successors, and that of Kimi Linear and Ling 3.0."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import LayerSpec, ModelConfig
from ..mixer_specs import DeltaSpec
from ..recurrence import Recur
from .linear import ACTIVATIONS, linear
from .norm import unit_norm
from .params import Part, declare, declare_merged


class DeltaInputs(NamedTuple):
    """The input of a gated delta net's state: a step's projected tokens, and the state's own parameters.

    Its arrays are for all devices, or one device's share.
    """

    projected_tsr: Array
    """Each shard has q, k, v, the gate of the output, beta and decay, one after the other."""
    conv_sr1k: Array
    """The weights of the convolution of q, k and v, in the same order."""
    log_decay_v: Array
    decay_bias_v: Array
    norm_h: Array

    @property
    def sharded_axes(self) -> tuple[int | None, ...]:
        """Return the axis along which devices share each array; None for an array that each device has whole."""
        return 1, 0, 0, 0, None

    def run(self, recur: Recur, spec: LayerSpec, cfg: ModelConfig) -> tuple[Array, Recur]:
        """Run a step's tokens through their states; return [t, value heads, value_dim], gated and normed."""
        state, num_shards = spec.state, cfg.num_shards
        assert isinstance(state, DeltaSpec)
        (t, _, _), dtype = self.projected_tsr.shape, self.projected_tsr.dtype
        c = state.num_channels // num_shards
        values, heads = state.num_value_heads * state.value_dim // num_shards, state.num_value_heads // num_shards
        mixed_tsc, gate_tsc, beta_tsv, decay_tsv = jnp.split(
            self.projected_tsr, [c, c + values, c + values + heads], -1
        )
        q_tkh, k_tkh, v_tvh, recur = _convolve(recur, mixed_tsc, self.conv_sr1k, spec, num_shards)
        beta_tv = jax.nn.sigmoid(beta_tsv.reshape(t, -1).astype(jnp.float32))
        step_tv = jax.nn.softplus(decay_tsv.reshape(t, -1).astype(jnp.float32) + self.decay_bias_v)
        log_decay_tv1 = (-jnp.exp(self.log_decay_v) * step_tv)[..., None]
        out_tvh, recur = recur.scan(q_tkh, k_tkh, v_tvh, log_decay_tv1, beta_tv)
        gate_tvh = jax.nn.silu(gate_tsc.reshape(t, -1, state.value_dim).astype(jnp.float32))
        return (_normed(out_tvh, self.norm_h, cfg) * gate_tvh).astype(dtype), recur


class GatedDeltaNet(nnx.Module):
    """The projections around the gated delta rule, the convolution before it, and the gated norm behind it."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        assert isinstance(spec.state, DeltaSpec)
        state, d, num_shards = spec.state, cfg.hidden_size, cfg.num_shards
        n, values = state.num_value_heads, state.num_value_heads * state.value_dim
        part = partial(Part, axis="channels", num_heads=state.num_key_heads)
        gates = (part("gate", size=values), part("beta", size=n), part("decay", size=n))
        self.projections = declare_merged((*_convolved_parts(state), *gates), (d,), ("embed",), num_shards, dtype, 1)
        self.conv = _declare_taps(state, num_shards, dtype)
        self.log_decay = declare((n,), ("heads",), jnp.float32)
        self.decay_bias = declare((n,), ("heads",), jnp.float32)
        self.norm = declare((state.value_dim,), ("head_dim",), dtype)
        self.o = declare((d, n * state.value_dim), ("embed", "heads"), dtype, 1)

    def project(self, x_td: Array) -> DeltaInputs:
        """Return the state's inputs for a step's tokens."""
        arrays = self.conv[...], self.log_decay[...], self.decay_bias[...], self.norm[...]
        return DeltaInputs(linear(x_td, self.projections), *arrays)

    def output(self, out_tvh: Array, plus_td: Array | None = None) -> Array:
        """Return [t, d], added to `plus_td`."""
        return linear(out_tvh, self.o, plus=plus_td)


class KimiDeltaInputs(NamedTuple):
    """The input of the state of Kimi's delta attention: a step's projected tokens, and the state's own parameters.

    Its arrays are for all devices, or one device's share.
    """

    projected_tsr: Array
    """Each shard has q, k and v, one after the other."""
    beta_tv: Array
    decay_tvk: Array
    gate_tvh: Array
    conv_sr1k: Array
    log_decay_v: Array
    decay_bias_vk: Array
    norm_h: Array

    @property
    def sharded_axes(self) -> tuple[int | None, ...]:
        """Return the axis along which devices share each array; None for an array that each device has whole."""
        return 1, 1, 1, 1, 0, 0, 0, None

    def run(self, recur: Recur, spec: LayerSpec, cfg: ModelConfig) -> tuple[Array, Recur]:
        """Run a step's tokens through their states; return [t, value heads, value_dim], normed and gated."""
        state = spec.state
        assert isinstance(state, DeltaSpec)
        q_tkh, k_tkh, v_tvh, recur = _convolve(recur, self.projected_tsr, self.conv_sr1k, spec, cfg.num_shards)
        beta_tv = jax.nn.sigmoid(self.beta_tv.astype(jnp.float32))
        decay_tvk, rate_v1 = self.decay_tvk.astype(jnp.float32) + self.decay_bias_vk, jnp.exp(self.log_decay_v)[:, None]
        if state.least_log_decay is None:
            log_decay_tvk = -rate_v1 * jax.nn.softplus(decay_tvk)
        else:
            log_decay_tvk = state.least_log_decay * jax.nn.sigmoid(rate_v1 * decay_tvk)
        out_tvh, recur = recur.scan(q_tkh, k_tkh, v_tvh, log_decay_tvk, beta_tv)
        gate_tvh = jax.nn.sigmoid(self.gate_tvh.astype(jnp.float32))
        return (_normed(out_tvh, self.norm_h, cfg) * gate_tvh).astype(out_tvh.dtype), recur


class KimiDelta(nnx.Module):
    """The projections around the delta rule with decays of keys; those of decays and gates may have a lower rank.

    Then every device computes the few numbers between their two matrices whole. Beta has a matrix apart: its few rows
    beside q, k and v would make a device's share no multiple of the 8 rows of a TPU's tile.
    """

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        assert isinstance(spec.state, DeltaSpec)
        state, d, num_shards, rank = spec.state, cfg.hidden_size, cfg.num_shards, spec.state.gate_rank
        n, keys, values = state.num_value_heads, state.key_dim, state.value_dim
        self.projections = declare_merged(_convolved_parts(state), (d,), ("embed",), num_shards, dtype, 1)
        self.beta = declare((n, d), ("heads", "embed"), dtype, 1)
        self.is_divided = rank is not None
        if rank is None:
            self.decay = declare((n, keys, d), ("heads", "head_dim", "embed"), dtype, 1)
            self.gate = declare((n, values, d), ("heads", "head_dim", "embed"), dtype, 1)
        else:
            self.decay_a = declare((rank, d), ("latent", "embed"), dtype, 1)
            self.decay_b = declare((n, keys, rank), ("heads", "head_dim", "latent"), dtype, 1)
            self.gate_a = declare((rank, d), ("latent", "embed"), dtype, 1)
            self.gate_b = declare((n, values, rank), ("heads", "head_dim", "latent"), dtype, 1)
        self.conv = _declare_taps(state, num_shards, dtype)
        self.log_decay = declare((n,), ("heads",), jnp.float32)
        self.decay_bias = declare((n, keys), ("heads", "head_dim"), jnp.float32)
        self.norm = declare((values,), ("head_dim",), dtype)
        self.o = declare((d, n * values), ("embed", "heads"), dtype, 1)

    def project(self, x_td: Array) -> KimiDeltaInputs:
        """Return the state's inputs for a step's tokens."""
        if self.is_divided:
            decay_tvk = linear(linear(x_td, self.decay_a), self.decay_b)
            gate_tvh = linear(linear(x_td, self.gate_a), self.gate_b)
        else:
            decay_tvk, gate_tvh = linear(x_td, self.decay), linear(x_td, self.gate)
        arrays = self.conv[...], self.log_decay[...], self.decay_bias[...], self.norm[...]
        projected_tsr, beta_tv = linear(x_td, self.projections), linear(x_td, self.beta)
        return KimiDeltaInputs(projected_tsr, beta_tv, decay_tvk, gate_tvh, *arrays)

    def output(self, out_tvh: Array, plus_td: Array | None = None) -> Array:
        """Return [t, d], added to `plus_td`."""
        return linear(out_tvh, self.o, plus=plus_td)


def _convolved_parts(state: DeltaSpec) -> tuple[Part, ...]:
    """Return the parts of the projections that are convolved, in the order of the convolution's channels."""
    keys, values = state.num_key_heads * state.key_dim, state.num_value_heads * state.value_dim
    sizes = {"q": keys, "k": keys, "v": values}
    return tuple(Part(name, "channels", size, num_heads=state.num_key_heads) for name, size in sizes.items())


def _declare_taps(state: DeltaSpec, num_shards: int, dtype: DTypeLike) -> nnx.Param[Array]:
    """Declare the weights of the convolution of q, k and v."""
    taps = [part._replace(name=f"{part.name}_conv") for part in _convolved_parts(state)]
    return declare_merged(taps, (1, state.conv_size), ("tap", "tap"), num_shards, dtype)


def _convolve(
    recur: Recur, mixed_tsc: Array, conv_sr1k: Array, spec: LayerSpec, num_shards: int
) -> tuple[Array, Array, Array, Recur]:
    """Return q, k and v of a step's tokens after their convolution, and `recur` with the new pools."""
    state, (t, shards, c) = spec.state, mixed_tsc.shape
    assert isinstance(state, DeltaSpec)
    weight_kc = conv_sr1k.reshape(shards * c, -1).T
    fused = spec.hidden_act if spec.hidden_act == "silu" else None
    convolved_tc, recur = recur.convolve(mixed_tsc.reshape(t, -1), weight_kc, activation=fused)
    if fused is None:
        convolved_tc = ACTIVATIONS[spec.hidden_act](convolved_tc)
    keys = state.num_key_heads * state.key_dim // num_shards
    q, k, v = jnp.split(convolved_tc.reshape(t, shards, c), [keys, 2 * keys], -1)
    q_tkh, k_tkh = (x.reshape(t, -1, state.key_dim) for x in (q, k))
    return q_tkh, k_tkh, v.reshape(t, -1, state.value_dim), recur


def _normed(out_tvh: Array, norm_h: Array, cfg: ModelConfig) -> Array:
    return unit_norm(out_tvh.astype(jnp.float32), cfg.norm_eps) * norm_h.astype(jnp.float32)
