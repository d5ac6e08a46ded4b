"""The gated delta net of Qwen3-Next and its successors."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import LayerSpec, ModelConfig
from ..recurrence import Recur
from ..state_specs import DeltaSpec
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
        (t, shards, _), dtype = self.projected_tsr.shape, self.projected_tsr.dtype
        keys = state.num_key_heads * state.key_dim // num_shards
        values, heads = state.num_value_heads * state.value_dim // num_shards, state.num_value_heads // num_shards
        c = 2 * keys + values
        mixed_tsc, gate_tsc, beta_tsv, decay_tsv = jnp.split(
            self.projected_tsr, [c, c + values, c + values + heads], -1
        )
        weight_kc = self.conv_sr1k.reshape(shards * c, -1).T
        fused = spec.hidden_act if spec.hidden_act == "silu" else None
        convolved_tc, recur = recur.convolve(mixed_tsc.reshape(t, -1), weight_kc, activation=fused)
        if fused is None:
            convolved_tc = ACTIVATIONS[spec.hidden_act](convolved_tc)
        parts = jnp.split(convolved_tc.reshape(t, shards, c), [keys, 2 * keys], -1)
        q_tkh, k_tkh = (x.reshape(t, -1, state.key_dim) for x in parts[:2])
        v_tvh = parts[2].reshape(t, -1, state.value_dim)
        beta_tv = jax.nn.sigmoid(beta_tsv.reshape(t, -1).astype(jnp.float32))
        step_tv = jax.nn.softplus(decay_tsv.reshape(t, -1).astype(jnp.float32) + self.decay_bias_v)
        log_decay_tv1 = (-jnp.exp(self.log_decay_v) * step_tv)[..., None]
        out_tvh, recur = recur.scan(q_tkh, k_tkh, v_tvh, log_decay_tv1, beta_tv)
        normed_tvh = unit_norm(out_tvh.astype(jnp.float32), cfg.norm_eps) * self.norm_h.astype(jnp.float32)
        gate_tvh = gate_tsc.reshape(t, -1, state.value_dim).astype(jnp.float32)
        return (normed_tvh * jax.nn.silu(gate_tvh)).astype(dtype), recur


class GatedDeltaNet(nnx.Module):
    """The projections around the gated delta rule, the convolution before it, and the gated norm behind it."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        assert isinstance(spec.state, DeltaSpec)
        state, d, num_shards = spec.state, cfg.hidden_size, cfg.num_shards
        n, keys = state.num_value_heads, state.num_key_heads * state.key_dim
        values = n * state.value_dim
        part = partial(Part, axis="channels", num_heads=state.num_key_heads)
        convolved = (part("q", size=keys), part("k", size=keys), part("v", size=values))
        gates = (part("gate", size=values), part("beta", size=n), part("decay", size=n))
        self.projections = declare_merged((*convolved, *gates), (d,), ("embed",), num_shards, dtype, 1)
        taps = [part._replace(name=f"{part.name}_conv") for part in convolved]
        self.conv = declare_merged(taps, (1, state.conv_size), ("tap", "tap"), num_shards, dtype)
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
