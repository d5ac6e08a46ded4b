"""Layers shared by the families, as Flax NNX modules that only declare parameters and compute; none holds state.

Constructors run under `nnx.eval_shape`, so they allocate nothing. Weights are stored [in, out].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.paged_attention import Rope

from .config import ModelConfig

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}

# What a layer calls to attend: (q_tnh, k_tkh, v_tkh, kv_pool, rope) -> (out_tnh, kv_pool). It rotates q and k.
Attend = Callable[[Array, Array, Array, Any, Rope | None], tuple[Array, Any]]


class LayerData(NamedTuple):
    """What differs between layers besides weights: ints in an unrolled loop, traced int32 scalars in a scan."""

    layer: Array | int
    window: Array | int
    rope: Array | int


def declare(shape: tuple[int, ...], axes: tuple[str, ...], dtype: DTypeLike) -> nnx.Param[Array]:
    """Declare a parameter with one logical sharding axis per dimension."""
    return nnx.Param(jnp.zeros(shape, dtype), out_sharding=axes)


def contract(subscripts: str, x: Array, weight: nnx.Param[Array], out_dtype: DTypeLike | None = None) -> Array:
    """Multiply by a weight in its own dtype; float32 weights are never rounded on the way."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, x, weight[...], precision=precision, preferred_element_type=out_dtype)


def soft_cap(x: Array, cap: float | None) -> Array:
    """Squash `x` into (-cap, cap); None leaves it."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def run_layers[Carry](
    body: Callable[[Carry, Any, LayerData], Carry],
    layers: Mapping[str, Any] | tuple[Any, ...],
    carry: Carry,
    data: Sequence[LayerData],
) -> Carry:
    """Apply `body` to each layer: a scan over stacked weights, an unrolled loop over a tuple of layers."""
    if isinstance(layers, tuple):
        for layer, layer_data in zip(layers, data, strict=True):
            carry = body(carry, layer, layer_data)
        return carry

    def step(carry: Carry, scanned: tuple[Any, LayerData]) -> tuple[Carry, None]:
        return body(carry, *scanned), None

    stacked_data = jax.tree.map(lambda *values: np.asarray(values, np.int32), *data)
    return jax.lax.scan(step, carry, (layers, stacked_data))[0]


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, size: int, axis: str, cfg: ModelConfig, dtype: DTypeLike) -> None:
        self.scale = declare((size,), (axis,), dtype)
        self.eps = cfg.rms_norm_eps
        self.offset = cfg.norm_offset

    def __call__(self, x: Array) -> Array:
        """Normalise; the shape and dtype stay."""
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32) + self.offset
        return (normed * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


class Embedding(nnx.Module):
    """A [v, d] matrix that embeds tokens, or reads logits off hidden states, or both."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        self.table = declare((cfg.vocab_size, cfg.hidden_size), ("vocab", "embed"), dtype)

    def embed(self, token_ids_t: Array, scale: float) -> Array:
        """Look tokens up, [t, d]; the scale is rounded to the table's dtype first, as HF does."""
        x_td = self.table[...][token_ids_t]
        return x_td if scale == 1.0 else x_td * jnp.asarray(scale, x_td.dtype)

    def logits(self, hidden_sd: Array) -> Array:
        """Return float32 logits [s, v]."""
        return contract("sd,vd->sv", hidden_sd, self.table, jnp.float32)


class Attention(nnx.Module):
    """Grouped-query self-attention; where keys and values are kept is the business of `attend`."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        d, n, k, h = cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        self.q = declare((d, n, h), ("embed", "heads", "head_dim"), dtype)
        self.k = declare((d, k, h), ("embed", "kv_heads", "head_dim"), dtype)
        self.v = declare((d, k, h), ("embed", "kv_heads", "head_dim"), dtype)
        self.o = declare((n, h, d), ("heads", "head_dim", "embed"), dtype)
        self.has_qkv_bias, self.has_o_bias, self.has_qk_norm = cfg.qkv_bias, cfg.o_bias, cfg.qk_norm
        if cfg.qkv_bias:
            self.q_bias = declare((n, h), ("heads", "head_dim"), dtype)
            self.k_bias = declare((k, h), ("kv_heads", "head_dim"), dtype)
            self.v_bias = declare((k, h), ("kv_heads", "head_dim"), dtype)
        if cfg.o_bias:
            self.o_bias = declare((d,), ("embed",), dtype)
        if cfg.qk_norm:
            self.q_norm = RMSNorm(h, "head_dim", cfg, dtype)
            self.k_norm = RMSNorm(h, "head_dim", cfg, dtype)

    def __call__(self, x_td: Array, kv_pool: Any, rope: Rope | None, attend: Attend) -> tuple[Array, Any]:
        """Return the layer's attention output [t, d] and the pool with this step's keys and values."""
        q_tnh = contract("td,dnh->tnh", x_td, self.q)
        k_tkh = contract("td,dkh->tkh", x_td, self.k)
        v_tkh = contract("td,dkh->tkh", x_td, self.v)
        if self.has_qkv_bias:
            q_tnh, k_tkh, v_tkh = (
                q_tnh + self.q_bias[...][None],
                k_tkh + self.k_bias[...][None],
                v_tkh + self.v_bias[...][None],
            )
        if self.has_qk_norm:
            q_tnh, k_tkh = self.q_norm(q_tnh), self.k_norm(k_tkh)
        out_tnh, kv_pool = attend(q_tnh, k_tkh, v_tkh, kv_pool, rope)
        out_td = contract("tnh,nhd->td", out_tnh, self.o)
        return (out_td + self.o_bias[...][None] if self.has_o_bias else out_td), kv_pool


class GatedMLP(nnx.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        d, f = cfg.hidden_size, cfg.intermediate_size
        self.gate = declare((d, f), ("embed", "mlp"), dtype)
        self.up = declare((d, f), ("embed", "mlp"), dtype)
        self.down = declare((f, d), ("mlp", "embed"), dtype)
        self.act, self.has_bias = cfg.hidden_act, cfg.mlp_bias
        if cfg.mlp_bias:
            self.gate_bias = declare((f,), ("mlp",), dtype)
            self.up_bias = declare((f,), ("mlp",), dtype)
            self.down_bias = declare((d,), ("embed",), dtype)

    def __call__(self, x_td: Array) -> Array:
        """Return [t, d]."""
        gate_tf, up_tf = contract("td,df->tf", x_td, self.gate), contract("td,df->tf", x_td, self.up)
        if self.has_bias:
            gate_tf, up_tf = gate_tf + self.gate_bias[...][None], up_tf + self.up_bias[...][None]
        out_td = contract("tf,fd->td", ACTIVATIONS[self.act](gate_tf) * up_tf, self.down)
        return out_td + self.down_bias[...][None] if self.has_bias else out_td


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm and added to the stream; Gemma also norms what is added."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        norm = partial(RMSNorm, cfg.hidden_size, "embed", cfg, dtype)
        self.attn_norm, self.attn = norm(), Attention(cfg, dtype)
        self.mlp_norm, self.mlp = norm(), GatedMLP(cfg, dtype)
        self.has_post_norms = cfg.post_norms
        if cfg.post_norms:
            self.post_attn_norm, self.post_mlp_norm = norm(), norm()

    def __call__(self, x_td: Array, kv_pool: Any, rope: Rope | None, attend: Attend) -> tuple[Array, Any]:
        """Return the stream [t, d] after this layer, and the pool."""
        attn_td, kv_pool = self.attn(self.attn_norm(x_td), kv_pool, rope, attend)
        x_td = x_td + (self.post_attn_norm(attn_td) if self.has_post_norms else attn_td)
        mlp_td = self.mlp(self.mlp_norm(x_td))
        return x_td + (self.post_mlp_norm(mlp_td) if self.has_post_norms else mlp_td), kv_pool
