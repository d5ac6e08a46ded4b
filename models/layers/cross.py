"""The layers of a decoder that attends to an encoder's frames: each layer of the checkpoint is two here."""

from __future__ import annotations

from functools import partial

from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import LayerSpec, ModelConfig
from ..loop import Heads
from .attention import Attention
from .linear import linear
from .mlp import PlainMLP
from .norm import LayerNorm
from .params import Part, declare, declare_merged, split


class _CrossAttention(nnx.Module):
    """The projections around attention to an encoder's frames: queries are of tokens, keys and values of frames."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        d, n, k, h = cfg.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.parts = (Part("k", "kv_heads", k), Part("v", "kv_heads", k))
        self.q = declare((n, h, d), ("heads", "head_dim", "embed"), dtype, 1)
        self.kv = declare_merged(self.parts, (h, d), ("head_dim", "embed"), cfg.num_shards, dtype, 1)
        self.o = declare((d, n * h), ("embed", "heads"), dtype, 1)
        self.q_bias = declare((n, h), ("heads", "head_dim"), dtype) if spec.qkv_bias else None
        self.k_bias = declare((k, h), ("kv_heads", "head_dim"), dtype) if spec.qkv_bias and spec.k_bias else None
        self.v_bias = declare((k, h), ("kv_heads", "head_dim"), dtype) if spec.qkv_bias else None
        self.o_bias = declare((d,), ("embed",), dtype) if spec.o_bias else None

    def project(self, x_td: Array) -> Heads:
        """Return the queries of tokens."""
        return Heads(linear(x_td, self.q, bias=self.q_bias), None, None)

    def keys_values(self, x_fd: Array) -> tuple[Array, Array]:
        """Return the keys and values [f, k, h] of frames."""
        k_fkh, v_fkh = split(linear(x_fd, self.kv), self.parts)
        if self.k_bias is not None:
            k_fkh = k_fkh + self.k_bias[...][None]
        return k_fkh, v_fkh if self.v_bias is None else v_fkh + self.v_bias[...][None]

    def output(self, attended_tnh: Array, plus_td: Array) -> Array:
        """Return [t, d], added to `plus_td`."""
        return linear(attended_tnh, self.o, plus=plus_td, bias=self.o_bias)


class CrossDecoderLayer(nnx.Module):
    """Self-attention alone, or with `is_cross` cross-attention and MLP; each has a norm before it."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        norm = partial(LayerNorm, cfg.hidden_size, "embed", cfg, dtype)
        self.is_cross = spec.is_cross
        if spec.is_cross:
            self.cross_norm, self.cross = norm(), _CrossAttention(spec, cfg, dtype)
            self.mlp_norm, self.mlp = norm(), PlainMLP(spec, cfg, dtype)
        else:
            self.attn_norm, self.attn = norm(), Attention(spec, cfg, dtype)

    def project(self, x_td: Array) -> Heads:
        """Return the inputs of attention, from the stream [t, d]."""
        if self.is_cross:
            return self.cross.project(self.cross_norm(x_td))
        return self.attn.project(self.attn_norm(x_td))

    def keys_values(self, x_fd: Array) -> tuple[Array, Array]:
        """Return the keys and values of an encoder's frames [f, d], in a layer of cross-attention."""
        return self.cross.keys_values(x_fd)

    def finish(self, x_td: Array, attended_tnh: Array) -> Array:
        """Return the stream after this layer, from the stream before it and attention's output."""
        if not self.is_cross:
            return self.attn.output(attended_tnh, x_td)
        x_td = self.cross.output(attended_tnh, x_td)
        return self.mlp(self.mlp_norm(x_td), x_td)
