"""The projections around attention over latents."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.grouped_matmul import MatmulShape

from ..config import LayerSpec, ModelConfig
from ..loop import IndexerHeads, LatentHeads
from .linear import heads_linear, linear
from .norm import LayerNorm, RMSNorm
from .params import declare

_NORM_EPS = 1e-6
"""The epsilon of an indexer's LayerNorms."""


class LogScaling(nnx.Module):
    """The learned numbers that scale each head's queries by the logarithm of the position."""

    def __init__(self, num_heads: int, axis: str, dtype: DTypeLike) -> None:
        self.scale, self.bias = (declare((num_heads,), (axis,), dtype) for _ in range(2))

    @property
    def numbers(self) -> tuple[Array, Array]:
        """Return the factors of the logarithm, and the numbers that are added to it, [n] each."""
        return self.scale[...], self.bias[...]


class Indexer(nnx.Module):
    """The projections of the indexer of sparse attention; every device has all of its heads.

    As a router, it weighs heads in float32 for every dtype: rounding could change which tokens are chosen.
    """

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        assert spec.indexer is not None
        assert spec.latent is not None
        self.spec, self.rope_dim = spec.indexer, spec.latent.rope_dim
        d, n, h = cfg.hidden_size, spec.indexer.num_heads, spec.indexer.head_dim
        norm = partial(LayerNorm, cfg=replace(cfg, norm_eps=_NORM_EPS, norm_bias=True, norm_offset=0.0), dtype=dtype)
        if spec.indexer.norms_inputs:
            self.input_norm = norm(d, "embed")
        num_inputs = spec.latent.q_rank
        if num_inputs is None or spec.indexer.norms_inputs:
            num_inputs = d
        self.q = declare((n, h, num_inputs), ("latent", "head_dim", "embed"), dtype, 1)
        self.k = declare((h, d), ("head_dim", "embed"), dtype, 1)
        self.k_norm = norm(h, "head_dim")
        self.weight = declare((n, d), ("router", "embed"), jnp.float32)
        self.scaling = LogScaling(n, "latent", dtype) if spec.log_scaling else None

    def project(self, x_td: Array, queries_tq: Array) -> IndexerHeads:
        """Return the indexer's heads, of the stream and of the latents that queries are made of."""
        spec = self.spec
        if spec.norms_inputs:
            queries_tq = self.input_norm(x_td)
        q_tnr, q_tnp = jnp.split(linear(queries_tq, self.q), [self.rope_dim], axis=-1)
        k_tr, k_tp = jnp.split(self.k_norm(linear(x_td, self.k)), [self.rope_dim], axis=-1)
        if spec.interleaved:
            q_tnr, k_tr = _pairs_apart(q_tnr), _pairs_apart(k_tr)
        weights_tn = linear(x_td, self.weight, jnp.float32) * (spec.num_heads * spec.head_dim) ** -0.5
        return IndexerHeads(q_tnr, q_tnp, k_tr, k_tp, weights_tn, self.scaling and self.scaling.numbers)


def _pairs_apart(x: Array) -> Array:
    """Return the last axis with the first numbers of all pairs before the second ones, as `rotate` takes them."""
    return jnp.concatenate((x[..., ::2], x[..., 1::2]), axis=-1)


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
        self.scaling = LogScaling(n, "heads", dtype) if spec.log_scaling else None
        if not spec.borrows_kv:
            self.kv_a = declare((latent.key_dim, d), ("head_dim", "embed"), dtype, 1, rotates=latent.rope_dim > 0)
            self.kv_a_norm = RMSNorm(latent.rank, "latent", inner, dtype)
        self.up_k = declare((n, latent.rank, latent.nope_dim), ("heads", "latent", "head_dim"), dtype)
        self.up_v = declare((n, latent.v_dim, latent.rank), ("heads", "head_dim", "latent"), dtype)
        self.o = declare((d, n * latent.v_dim), ("embed", "heads"), dtype, 1)
        if spec.qkv_bias and not spec.borrows_kv:
            self.kv_a_bias = declare((latent.key_dim,), ("head_dim",), dtype, rotates=True)
        if spec.qkv_bias and latent.q_rank is not None:
            self.q_a_bias = declare((latent.q_rank,), ("latent",), dtype)
        if latent.norms_rotated:
            self.k_rope_norm = RMSNorm(latent.rope_dim, "head_dim", inner, dtype, rotates=True)
        if spec.output_gate:
            self.gate = declare((n, d), ("heads", "embed"), dtype, 1)
        if spec.has_indexer:
            self.indexer = Indexer(spec, cfg, dtype)
        if spec.o_bias:
            self.o_bias = declare((d,), ("embed",), dtype)

    def project(self, x_td: Array) -> LatentHeads:
        """Return absorbed queries and latents, without latents if the layer borrows them, and what the indexer takes.

        The last parts are not yet rotated.
        """
        latent, has_bias = self.latent, self.spec.qkv_bias
        if latent.q_rank is None:
            queries_tq, q_tnh = x_td, linear(x_td, self.q)
        else:
            down_tq = linear(x_td, self.q_a, bias=self.q_a_bias if has_bias else None)
            queries_tq = self._grown(self.q_a_norm(down_tq))
            q_tnh = linear(queries_tq, self.q_b)
        q_tnp, q_tnr = jnp.split(q_tnh, [latent.nope_dim], axis=-1)
        latents_tl, k_tr = (None, None) if self.spec.borrows_kv else self._latents(x_td)
        return LatentHeads(
            heads_linear(q_tnp, self.up_k),
            q_tnr,
            latents_tl,
            k_tr,
            self.indexer.project(x_td, queries_tq) if self.spec.has_indexer else None,
            linear(x_td, self.gate)[..., None] if self.spec.output_gate else None,
            self.scaling and self.scaling.numbers,
        )

    def _latents(self, x_td: Array) -> tuple[Array, Array]:
        """Return tokens' latents, and the part of their keys that is rotated, which is not yet."""
        kv_th = linear(x_td, self.kv_a, bias=self.kv_a_bias if self.spec.qkv_bias else None)
        latents_tl, k_tr = jnp.split(kv_th, [self.latent.rank], axis=-1)
        k_tr = self.k_rope_norm(k_tr) if self.latent.norms_rotated else k_tr
        return self._grown(self.kv_a_norm(latents_tl)), k_tr

    def _grown(self, latents_tl: Array) -> Array:
        """Return latents times the root of the stream's width over theirs, if the layer multiplies them."""
        factor = (self.o.shape[0] / latents_tl.shape[-1]) ** 0.5 if self.latent.grows else 1.0
        return latents_tl if factor == 1.0 else latents_tl * factor

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
