"""The projections around attention over latents."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.grouped_matmul import MatmulShape

from ..config import LayerSpec, ModelConfig
from ..loop import LatentHeads
from .linear import heads_linear, linear
from .norm import RMSNorm
from .params import declare


class LatentAttention(nnx.Module):
    """The absorbed projections around multi-head latent attention; `latent_attention` attends over the latents.

    A head's keys without rotation are `up_k` times the latents, and its values `up_v` times them. The scores are the
    same if queries are multiplied by `up_k` instead of keys, and the output is the same if the sums
    of latents are multiplied by `up_v`.
    """

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        assert spec.latent is not None
        d, n, latent = cfg.hidden_size, spec.num_heads, spec.latent
        self.spec, self.latent = spec, latent
        # The norms between two matrices have another epsilon.
        inner = replace(cfg, norm_eps=latent.norm_eps)
        q_dim = latent.nope_dim + latent.rope_dim
        if latent.q_rank is None:
            self.q = declare((n, q_dim, d), ("heads", "head_dim", "embed"), dtype, 1, rotates=True)
        else:
            self.q_a = declare((latent.q_rank, d), ("latent", "embed"), dtype, 1)
            self.q_a_norm = RMSNorm(latent.q_rank, "latent", inner, dtype)
            self.q_b = declare((n, q_dim, latent.q_rank), ("heads", "head_dim", "latent"), dtype, 1, rotates=True)
        self.kv_a = declare((latent.key_dim, d), ("head_dim", "embed"), dtype, 1, rotates=True)
        self.kv_a_norm = RMSNorm(latent.rank, "latent", inner, dtype)
        self.up_k = declare((n, latent.rank, latent.nope_dim), ("heads", "latent", "head_dim"), dtype)
        self.up_v = declare((n, latent.v_dim, latent.rank), ("heads", "head_dim", "latent"), dtype)
        self.o = declare((d, n * latent.v_dim), ("embed", "heads"), dtype, 1)
        if spec.output_gate:
            self.gate = declare((n, d), ("heads", "embed"), dtype, 1)
        if spec.qkv_bias:
            self.kv_a_bias = declare((latent.key_dim,), ("head_dim",), dtype, rotates=True)
            if latent.q_rank is not None:
                self.q_a_bias = declare((latent.q_rank,), ("latent",), dtype)
        if spec.o_bias:
            self.o_bias = declare((d,), ("embed",), dtype)

    def project(self, x_td: Array) -> LatentHeads:
        """Return absorbed queries and latents; their last parts are not yet rotated."""
        latent, has_bias = self.latent, self.spec.qkv_bias
        kv_th = linear(x_td, self.kv_a, bias=self.kv_a_bias if has_bias else None)
        latents_tl, k_tr = jnp.split(kv_th, [latent.rank], axis=-1)
        if latent.q_rank is None:
            q_tnh = linear(x_td, self.q)
        else:
            down_tq = linear(x_td, self.q_a, bias=self.q_a_bias if has_bias else None)
            q_tnh = linear(self.q_a_norm(down_tq), self.q_b)
        q_tnp, q_tnr = jnp.split(q_tnh, [latent.nope_dim], axis=-1)
        gate_tnh = linear(x_td, self.gate)[..., None] if self.spec.output_gate else None
        return LatentHeads(heads_linear(q_tnp, self.up_k), q_tnr, self.kv_a_norm(latents_tl), k_tr, gate_tnh)

    def output(self, attended_tnl: Array, plus_td: Array | None = None) -> Array:
        """Return [t, d], added to `plus_td`."""
        values_tnv = heads_linear(attended_tnl, self.up_v)
        return linear(values_tnv, self.o, plus=plus_td, bias=self.o_bias if self.spec.o_bias else None)


def head_matmuls(spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> list[MatmulShape]:
    """Return one device's matmuls by heads' own matrices in a layer; none without latents."""
    if spec.latent is None:
        return []
    num_heads, dtype, latent = spec.num_heads // cfg.num_shards, jnp.dtype(dtype), spec.latent
    return [
        MatmulShape(num_heads, latent.rank, latent.nope_dim, dtype, None, dtype, None),
        MatmulShape(num_heads, latent.v_dim, latent.rank, dtype, None, dtype, None),
    ]
