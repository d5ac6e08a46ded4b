"""The projections around attention."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import LayerSpec, ModelConfig
from ..loop import Heads
from .linear import linear
from .norm import HeadsNorm, LayerNormByHead, make_norm, unit_norm
from .params import Part, declare, declare_merged, split


class Attention(nnx.Module):
    """The projections around grouped-query self-attention; `paged_attention` computes attention itself."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        d, n, k, h = cfg.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.spec, self.eps = spec, cfg.norm_eps
        heads = (
            Part("q", "heads", n, rotates=True),
            Part("k", "kv_heads", k, rotates=True),
            Part("v", "kv_heads", k),
        )
        self.heads = heads[: 1 if spec.borrows_kv else 2 if spec.k_is_v or spec.v_dim else 3]
        if spec.output_gate and not spec.gate_by_head:
            self.heads = (*self.heads, Part("gate", "heads", n))
        self.qkv = declare_merged(self.heads, (h, d), ("head_dim", "embed"), cfg.num_shards, dtype, 1)
        if spec.v_dim is not None:
            self.v = declare((k, spec.v_dim, d), ("kv_heads", "head_dim", "embed"), dtype, 1)
        self.o = declare((d, n * (spec.v_dim or h)), ("embed", "heads"), dtype, 1)
        if spec.output_gate and spec.gate_by_head:
            self.gate = declare((n, d), ("heads", "embed"), dtype, 1)
        if spec.qkv_bias:
            self.biased = tuple(part for part in self.heads if spec.k_bias or part.name != "k")
            biases = [part._replace(name=f"{part.name}_bias") for part in self.biased]
            self.qkv_bias = declare_merged(biases, (h,), ("head_dim",), cfg.num_shards, dtype)
        if spec.o_bias:
            self.o_bias = declare((d,), ("embed",), dtype)
        if spec.sinks:
            self.sinks = declare((n,), ("heads",), jnp.float32)
        if spec.qk_norm and spec.qk_norm_all_heads:
            self.q_norm = HeadsNorm(n, h, "heads", cfg, dtype)
            self.k_norm = HeadsNorm(k, h, "kv_heads", cfg, dtype)
        elif spec.qk_norm and spec.qk_norm_by_head:
            apart = spec.qk_norms_apart
            self.q_norm = LayerNormByHead(n, h, "heads", cfg, dtype, is_apart=apart)
            num_stored = k // spec.kv_repeats if apart else k
            self.k_norm = LayerNormByHead(num_stored, h, "kv_heads", cfg, dtype, is_apart=apart)
        elif spec.qk_norm:
            self.q_norm = make_norm(h, "head_dim", cfg, dtype, rotates=True)
            if not spec.borrows_kv:
                self.k_norm = make_norm(h, "head_dim", cfg, dtype, rotates=True)

    def project(self, x_td: Array) -> Heads:
        """Return queries, keys and values, not yet rotated; queries alone if the layer borrows keys and values."""
        has_all_biases = self.spec.qkv_bias and self.spec.k_bias
        parts = split(linear(x_td, self.qkv, bias=self.qkv_bias if has_all_biases else None), self.heads)
        if self.spec.qkv_bias and not has_all_biases:
            biases = dict(zip(self.biased, split(self.qkv_bias[...][None], self.biased), strict=True))
            parts = [x + biases[part] if part in biases else x for part, x in zip(self.heads, parts, strict=True)]
        q_tnh, *keys_values = parts
        gate_tnh = None
        if self.spec.output_gate:
            gate_tnh = linear(x_td, self.gate)[..., None] if self.spec.gate_by_head else keys_values.pop()
        norms_later = self.spec.qk_norm and self.spec.rotated_norm is not None
        norms_here = self.spec.qk_norm and not norms_later
        if norms_here:
            q_tnh = self.q_norm(q_tnh)
        if self.spec.qk_unit_norm is not None:
            q_tnh = unit_norm(q_tnh, self.spec.qk_unit_norm)
        sinks_n = self.sinks[...] if self.spec.sinks else None
        if self.spec.borrows_kv:
            return Heads(q_tnh, None, None, sinks_n, gate_tnh)
        k_tkh = keys_values[0]
        v_tkh = keys_values[-1] if self.spec.v_dim is None else linear(x_td, self.v)
        if norms_here:
            k_tkh = self.k_norm(k_tkh)
        if self.spec.qk_unit_norm is not None:
            k_tkh = unit_norm(k_tkh, self.spec.qk_unit_norm)
        if self.spec.v_norm:
            v_tkh = unit_norm(v_tkh, self.eps)
        if (limit := self.spec.qkv_limit) is not None:
            q_tnh, k_tkh, v_tkh = (jnp.clip(x, -limit, limit) for x in (q_tnh, k_tkh, v_tkh))
        if self.spec.v_scale != 1.0:
            v_tkh = v_tkh * self.spec.v_scale
        scales_2h = (self.q_norm.scale[...], self.k_norm.scale[...]) if norms_later else None
        return Heads(q_tnh, k_tkh, v_tkh, sinks_n, gate_tnh, scales_2h)

    def output(self, attended_tnh: Array, plus_td: Array | None = None) -> Array:
        """Return [t, d], added to `plus_td`."""
        attended_tnh = attended_tnh[..., : self.spec.v_dim or self.spec.head_dim]
        return linear(attended_tnh, self.o, plus=plus_td, bias=self.o_bias if self.spec.o_bias else None)
