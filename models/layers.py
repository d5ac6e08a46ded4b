"""Layers shared by the families, as Flax NNX modules that only declare parameters and compute; none holds state.

Constructors run under `nnx.eval_shape`, so they allocate nothing. Weights are stored [out, in], as HF stores them.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels import linear as native
from pallas_kernels.rms_norm import can_norm, rms_norm

from .config import ModelConfig
from .quantization import Quantized

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}

type Heads = tuple[Array, Array, Array]
"""The queries, keys and values of a step's tokens: q_tnh, k_tkh, v_tkh."""


class LayerData(NamedTuple):
    """The settings of one layer besides weights: ints, and while a step is traced int32 scalars."""

    layer: Array | int
    window: Array | int
    rope: Array | int


class LayerLoop(enum.Enum):
    """The way in which a step goes through the layers. All ways compute the same."""

    SCAN = "scan"
    """One body over weights stacked along a leading axis: the quickest to compile."""
    UNROLL = "unroll"
    """A body per layer, without a loop: what a GPU runs as one CUDA graph."""
    SWITCH = "switch"
    """One body, whose matmuls are picked by the layer's number. XLA:CPU would copy a layer's weights out of a stack in
    each step. Attention, which is most of what there is to compile, is still compiled once."""
    IN_PLACE = "in place"
    """SCAN, but the CPU's own matmul takes a layer's weights as they lie in the stack."""

    @property
    def stacked(self) -> bool:
        """Say whether weights have a leading axis of layers."""
        return self in (LayerLoop.SCAN, LayerLoop.IN_PLACE)


class LayerOf:
    """The array of one layer in a stack of all layers'. Only what indexes it cuts it out.

    It is wanted for the first `num_rows` of a step's tokens; what becomes of the others does not matter.
    """

    def __init__(self, stack: Array, layer: Array | int, num_rows: Array | int) -> None:
        self.stack, self.layer, self.num_rows = stack, layer, num_rows
        self.shape, self.ndim = stack.shape[1:], stack.ndim - 1

    def __getitem__(self, index: Any) -> Array:
        """Index a copy of the array."""
        return jax.lax.dynamic_index_in_dim(self.stack, self.layer, keepdims=False)[index]


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


def run_layers(
    loop: LayerLoop,
    layers: Any,
    data: Sequence[LayerData],
    x_td: Array,
    kv_pool: Any,
    *,
    num_tokens: Array,
    project: Callable[[Any, Array], Heads],
    attend: Callable[[Heads, Any, LayerData], tuple[Array, Any]],
    finish: Callable[[Any, Array, Array], Array],
) -> tuple[Array, Any]:
    """Take the stream through `project`, `attend` and `finish` of each layer; return it, and the pool.

    `layers` are the layers' weights, a tuple if they are not stacked. Rows from `num_tokens` on are padding.
    """
    stacked_data = jax.tree.map(lambda *values: np.asarray(values, np.int32), *data)

    def run(params: Any, x_td: Array, kv_pool: Any, layer_data: LayerData) -> tuple[Array, Any]:
        attended_tnh, kv_pool = attend(project(params, x_td), kv_pool, layer_data)
        return finish(params, x_td, attended_tnh), kv_pool

    def scan_step(carry: tuple[Array, Any], scanned: tuple[Any, LayerData]) -> tuple[tuple[Array, Any], None]:
        params, layer_data = scanned
        return run(params, *carry, layer_data), None

    def in_place_step(carry: tuple[Array, Any], layer_data: LayerData) -> tuple[tuple[Array, Any], None]:
        params = jax.tree.map(lambda stack: LayerOf(stack, layer_data.layer, num_tokens), layers)
        return run(params, *carry, layer_data), None

    # All layers have the same shapes, so each part is traced and lowered once.
    project_once, attend_once, finish_once = jax.jit(project), jax.jit(attend), jax.jit(finish)

    def switch_step(carry: tuple[Array, Any], layer_data: LayerData) -> tuple[tuple[Array, Any], None]:
        x_td, kv_pool = carry
        heads = jax.lax.switch(layer_data.layer, [partial(project_once, params) for params in layers], x_td)
        attended_tnh, kv_pool = attend(heads, kv_pool, layer_data)
        finishes = [partial(finish_once, params) for params in layers]
        return (jax.lax.switch(layer_data.layer, finishes, x_td, attended_tnh), kv_pool), None

    match loop:
        case LayerLoop.SCAN:
            return jax.lax.scan(scan_step, (x_td, kv_pool), (layers, stacked_data))[0]
        case LayerLoop.IN_PLACE:
            return jax.lax.scan(in_place_step, (x_td, kv_pool), stacked_data)[0]
        case LayerLoop.SWITCH:
            return jax.lax.scan(switch_step, (x_td, kv_pool), stacked_data)[0]
        case LayerLoop.UNROLL:
            for params, *scalars in zip(layers, *stacked_data, strict=True):
                attended_tnh, kv_pool = attend_once(project_once(params, x_td), kv_pool, LayerData(*scalars))
                x_td = finish_once(params, x_td, attended_tnh)
            return x_td, kv_pool


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

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        d, n, k, h = cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        self.heads = (Part("q", "heads", n), Part("k", "kv_heads", k), Part("v", "kv_heads", k))
        self.qkv = declare_merged(self.heads, (h, d), ("head_dim", "embed"), cfg.num_shards, dtype, 1)
        self.o = declare((d, n, h), ("embed", "heads", "head_dim"), dtype, 2)
        self.has_qkv_bias, self.has_o_bias, self.has_qk_norm = cfg.qkv_bias, cfg.o_bias, cfg.qk_norm
        if cfg.qkv_bias:
            biases = [part._replace(name=f"{part.name}_bias") for part in self.heads]
            self.qkv_bias = declare_merged(biases, (h,), ("head_dim",), cfg.num_shards, dtype)
        if cfg.o_bias:
            self.o_bias = declare((d,), ("embed",), dtype)
        if cfg.qk_norm:
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

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        d, f = cfg.hidden_size, cfg.intermediate_size
        self.parts = (Part("gate", "mlp", f), Part("up", "mlp", f))
        self.gate_up = declare_merged(self.parts, (d,), ("embed",), cfg.num_shards, dtype, 1)
        self.down = declare((d, f), ("embed", "mlp"), dtype, 1)
        self.act, self.has_bias = cfg.hidden_act, cfg.mlp_bias
        if cfg.mlp_bias:
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

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        norm = partial(RMSNorm, cfg.hidden_size, "embed", cfg, dtype)
        self.attn_norm, self.attn = norm(), Attention(cfg, dtype)
        self.mlp_norm, self.mlp = norm(), GatedMLP(cfg, dtype)
        self.has_post_norms = cfg.post_norms
        if cfg.post_norms:
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
