"""Layers shared by the families, as Flax NNX modules that only declare parameters and compute; none holds state.

Constructors run under `nnx.eval_shape`, so they allocate nothing. Weights are stored [out, in], as HF stores them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels import linear as native
from pallas_kernels.rms_norm import can_norm, rms_norm

from .config import LayerSpec, ModelConfig
from .loop import Heads, LayerOf
from .quantization import Quantized

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}


def declare(shape: tuple[int, ...], axes: tuple[str, ...], dtype: DTypeLike, num_inputs: int = 0) -> nnx.Param[Array]:
    """Declare a parameter with one logical sharding axis per dimension; matmuls sum over its last `num_inputs`.

    `num_inputs` is 0 for a parameter that is added, or multiplies number by number: such are never quantized.
    """
    return nnx.Param(jnp.zeros(shape, dtype), out_sharding=axes, num_inputs=num_inputs)


class Part(NamedTuple):
    """A parameter that is held in one array with others: its name, and the name and size of its first axis."""

    name: str
    axis: str
    size: int


def declare_merged(
    parts: Sequence[Part],
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    num_shards: int,
    dtype: DTypeLike,
    num_inputs: int = 0,
) -> nnx.Param[Array]:
    """Declare parameters of `shape` besides their first axes as one array [num_shards, rows, *shape].

    A shard holds an equal share of each, one after the other. Matrices of one input are one matmul so.
    """
    rows = sum(part.size for part in parts) // num_shards
    array = jnp.zeros((num_shards, rows, *shape), dtype)
    axes = ("shards", "rows", *axes)
    return nnx.Param(array, out_sharding=axes, parts=tuple(parts), num_shards=num_shards, num_inputs=num_inputs)


def split(merged: Array, parts: Sequence[Part]) -> list[Array]:
    """Return what [t, num_shards, rows, ...] holds of each part, [t, size, ...]."""
    t, num_shards, _, *rest = merged.shape
    *ends, _ = itertools.accumulate(part.size // num_shards for part in parts)
    pieces = jnp.split(merged, ends, axis=2)
    return [piece.reshape(t, part.size, *rest) for piece, part in zip(pieces, parts, strict=True)]


def linear(x: Array, weight: nnx.Param[Array], out_dtype: DTypeLike | None = None, plus: Array | None = None) -> Array:
    """Multiply x [t, *in] by a weight [*out, *in], in x's dtype, to [t, *out]; float32 is never rounded on the way.

    `plus`, of the result's shape and dtype, is added to it.
    As one matrix times another: with more dimensions XLA:CPU would copy the weight into another order in each step.
    """
    x_ti, out_dtype = x.reshape(x.shape[0], -1), out_dtype or x.dtype
    out_shape = weight.shape[: weight.ndim - x.ndim + 1]
    n, k = math.prod(out_shape), x_ti.shape[1]
    if native_linear := find_native_linear(weight, n, k, x.dtype):
        plus_to = None if plus is None else plus.reshape(x.shape[0], -1)
        return native_linear(x_ti, out_dtype=out_dtype, plus_tn=plus_to).reshape(x.shape[0], *out_shape)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    multiply = partial(jnp.einsum, "ti,oi->to", x_ti, precision=precision)
    held = weight.get_raw_value()
    if isinstance(held, Quantized):
        weight_oi = held.values[...].reshape(n, k).astype(x.dtype)
        out_to = multiply(weight_oi, preferred_element_type=jnp.float32) * held.scales[...].reshape(1, n)
        out_to = out_to.astype(out_dtype)
    else:
        out_to = multiply(weight[...].reshape(n, k), preferred_element_type=out_dtype)
    out = out_to.reshape(x.shape[0], *out_shape)
    return out if plus is None else plus + out


def gated_linear(x_td: Array, gate_up: nnx.Param[Array], parts: Sequence[Part], act: str) -> Array:
    """Return act(gate(x)) * up(x), [t, f], of a weight [num_shards, rows, d] that holds both `parts`."""
    num_shards, rows, d = gate_up.shape
    if num_shards == 1 and (native_linear := find_native_linear(gate_up, rows, d, x_td.dtype, act)):
        return native_linear(x_td, out_dtype=x_td.dtype, activation=act)
    gate_tf, up_tf = split(linear(x_td, gate_up), parts)
    return ACTIVATIONS[act](gate_tf) * up_tf


def find_native_linear(
    weight: nnx.Param[Array], n: int, k: int, dtype: DTypeLike, activation: str | None = None
) -> Callable[..., Array] | None:
    """Return the CPU's own `linear` by a weight taken as [n, k], None if it does not take the weight."""
    held = weight.get_raw_value()
    values, scales = held if isinstance(held, Quantized) else (held, None)
    if not (isinstance(values, LayerOf) and native.can_multiply((n, k), dtype, activation)):
        return None
    return partial(
        native.linear,
        w_lnk=values.stack.reshape(-1, n, k),
        layer=values.layer,
        scales_ln=None if scales is None else scales.stack.reshape(-1, n),
        num_rows=values.num_rows,
    )


def soft_cap(x: Array, cap: float | None) -> Array:
    """Squash `x` into (-cap, cap); None leaves it."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, size: int, axis: str, cfg: ModelConfig, dtype: DTypeLike) -> None:
        self.scale = declare((size,), (axis,), dtype)
        self.eps = cfg.rms_norm_eps
        self.offset = cfg.norm_offset

    def __call__(self, x: Array) -> Array:
        """Normalise; the shape and dtype stay."""
        held, size = self.scale.get_raw_value(), x.shape[-1]
        if isinstance(held, LayerOf) and can_norm(size, x.dtype):
            x_rd, num_rows = x.reshape(-1, size), held.num_rows * math.prod(x.shape[1:-1])
            normed = rms_norm(x_rd, held.stack, held.layer, eps=self.eps, offset=self.offset, num_rows=num_rows)
            return normed.reshape(x.shape)
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32) + self.offset
        return (normed * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


class Embedding(nnx.Module):
    """A [v, d] matrix that embeds tokens, or reads logits off hidden states, or both."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        self.table = declare((cfg.vocab_size, cfg.hidden_size), ("vocab", "embed"), dtype, 1)
        self.dtype = dtype

    def embed(self, token_ids_t: Array, scale: float) -> Array:
        """Look tokens up, [t, d]; the scale is rounded to the model's dtype first, as HF does."""
        held = self.table.get_raw_value()
        if isinstance(held, Quantized):
            x_td = (held.values[token_ids_t].astype(jnp.float32) * held.scales[token_ids_t][:, None]).astype(self.dtype)
        else:
            x_td = held[token_ids_t]
        return x_td if scale == 1.0 else x_td * jnp.asarray(scale, x_td.dtype)

    def logits(self, hidden_sd: Array) -> Array:
        """Return float32 logits [s, v]."""
        return linear(hidden_sd, self.table, jnp.float32)


class Attention(nnx.Module):
    """The projections around grouped-query self-attention; attending itself is the business of `paged_attention`."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        d, n, k, h = cfg.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.heads = (Part("q", "heads", n), Part("k", "kv_heads", k), Part("v", "kv_heads", k))
        self.qkv = declare_merged(self.heads, (h, d), ("head_dim", "embed"), cfg.num_shards, dtype, 1)
        self.o = declare((d, n, h), ("embed", "heads", "head_dim"), dtype, 2)
        self.has_qkv_bias, self.has_o_bias, self.has_qk_norm = spec.qkv_bias, spec.o_bias, spec.qk_norm
        if spec.qkv_bias:
            biases = [part._replace(name=f"{part.name}_bias") for part in self.heads]
            self.qkv_bias = declare_merged(biases, (h,), ("head_dim",), cfg.num_shards, dtype)
        if spec.o_bias:
            self.o_bias = declare((d,), ("embed",), dtype)
        if spec.qk_norm:
            self.q_norm = RMSNorm(h, "head_dim", cfg, dtype)
            self.k_norm = RMSNorm(h, "head_dim", cfg, dtype)

    def project(self, x_td: Array) -> Heads:
        """Return queries, keys and values, not yet rotated."""
        qkv = linear(x_td, self.qkv)
        if self.has_qkv_bias:
            qkv = qkv + self.qkv_bias[...][None]
        q_tnh, k_tkh, v_tkh = split(qkv, self.heads)
        if self.has_qk_norm:
            q_tnh, k_tkh = self.q_norm(q_tnh), self.k_norm(k_tkh)
        return q_tnh, k_tkh, v_tkh

    def output(self, attended_tnh: Array, plus_td: Array | None = None) -> Array:
        """Return [t, d], added to `plus_td`."""
        out_td = linear(attended_tnh, self.o, plus=plus_td)
        return out_td + self.o_bias[...][None] if self.has_o_bias else out_td


class GatedMLP(nnx.Module):
    """The MLP down(act(gate(x)) * up(x))."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        d, f = cfg.hidden_size, spec.intermediate_size
        self.parts = (Part("gate", "mlp", f), Part("up", "mlp", f))
        self.gate_up = declare_merged(self.parts, (d,), ("embed",), cfg.num_shards, dtype, 1)
        self.down = declare((d, f), ("embed", "mlp"), dtype, 1)
        self.act, self.has_bias = spec.hidden_act, spec.mlp_bias
        if spec.mlp_bias:
            biases = [part._replace(name=f"{part.name}_bias") for part in self.parts]
            self.gate_up_bias = declare_merged(biases, (), (), cfg.num_shards, dtype)
            self.down_bias = declare((d,), ("embed",), dtype)

    def __call__(self, x_td: Array, plus_td: Array | None = None) -> Array:
        """Return [t, d], added to `plus_td`."""
        if not self.has_bias:
            return linear(gated_linear(x_td, self.gate_up, self.parts, self.act), self.down, plus=plus_td)
        gate_tf, up_tf = split(linear(x_td, self.gate_up) + self.gate_up_bias[...][None], self.parts)
        return linear(ACTIVATIONS[self.act](gate_tf) * up_tf, self.down, plus=plus_td) + self.down_bias[...][None]


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm and added to the stream; Gemma also norms what is added."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        norm = partial(RMSNorm, cfg.hidden_size, "embed", cfg, dtype)
        self.attn_norm, self.attn = norm(), Attention(spec, cfg, dtype)
        self.mlp_norm, self.mlp = norm(), GatedMLP(spec, cfg, dtype)
        self.has_post_norms = spec.post_norms
        if spec.post_norms:
            self.post_attn_norm, self.post_mlp_norm = norm(), norm()

    def project(self, x_td: Array) -> Heads:
        """Return what attention takes, from the stream [t, d]."""
        return self.attn.project(self.attn_norm(x_td))

    def finish(self, x_td: Array, attended_tnh: Array) -> Array:
        """Return the stream after this layer, from what it was before and from what attention gives."""
        if self.has_post_norms:
            x_td = x_td + self.post_attn_norm(self.attn.output(attended_tnh))
            return x_td + self.post_mlp_norm(self.mlp(self.mlp_norm(x_td)))
        x_td = self.attn.output(attended_tnh, x_td)
        return self.mlp(self.mlp_norm(x_td), x_td)
