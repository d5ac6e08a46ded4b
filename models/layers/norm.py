"""Norms over the last axis, computed in float32."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.layer_norm import layer_norm
from pallas_kernels.rms_norm import can_norm, rms_norm

from ..config import ModelConfig
from ..weights import held_by
from .params import declare


def unit_norm(x: Array, eps: float) -> Array:
    """Divide the last axis by its root mean square, in float32; the shape and dtype stay."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Norm by mean and variance over the last axis, with a bias or without, computed in float32."""

    def __init__(self, size: int, axis: str, cfg: ModelConfig, dtype: DTypeLike, *, rotates: bool = False) -> None:
        self.scale = declare((size,), (axis,), dtype, rotates=rotates)
        self.bias = declare((size,), (axis,), dtype, rotates=rotates) if cfg.norm_bias else None
        self.eps = cfg.norm_eps
        self.offset = cfg.norm_offset

    def __call__(self, x: Array) -> Array:
        """Normalise; the shape and dtype stay."""
        held = held_by(self.scale)
        size = x.shape[-1]
        if held.ops.has_cpu_norms and can_norm(size, x.dtype) and not self.offset:
            x_rd, num_rows = x.reshape(-1, size), held.num_rows * math.prod(x.shape[1:-1])
            bias_ld = None if self.bias is None else held_by(self.bias).stack.reshape(-1, size)
            stack_ld = held.stack.reshape(-1, size)
            normed = layer_norm(x_rd, stack_ld, bias_ld, held.layer, eps=self.eps, num_rows=num_rows)
            return normed.reshape(x.shape)
        x32 = x.astype(jnp.float32)
        centered = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        normed = centered * jax.lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + self.eps)
        shape = (1,) * (x.ndim - 1) + (-1,)
        # HF adds the offset in the dtype of the weights.
        scale = self.scale[...] + self.offset if self.offset else self.scale[...]
        scaled = normed * scale.astype(jnp.float32).reshape(shape)
        if self.bias is not None:
            scaled = scaled + self.bias[...].astype(jnp.float32).reshape(shape)
        return scaled.astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, size: int, axis: str, cfg: ModelConfig, dtype: DTypeLike, *, rotates: bool = False) -> None:
        self.scale = declare((size,), (axis,), dtype, rotates=rotates)
        self.eps = cfg.norm_eps
        self.offset = cfg.norm_offset

    def __call__(self, x: Array) -> Array:
        """Normalise; the shape and dtype stay."""
        held = held_by(self.scale)
        size = x.shape[-1]
        if held.ops.has_cpu_norms and can_norm(size, x.dtype):
            x_rd, num_rows = x.reshape(-1, size), held.num_rows * math.prod(x.shape[1:-1])
            stack_ld = held.stack.reshape(-1, size)
            normed = rms_norm(x_rd, stack_ld, held.layer, eps=self.eps, offset=self.offset, num_rows=num_rows)
            return normed.reshape(x.shape)
        normed = unit_norm(x.astype(jnp.float32), self.eps)
        scale = self.scale[...].astype(jnp.float32) + self.offset
        return (normed * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def make_norm(
    size: int, axis: str, cfg: ModelConfig, dtype: DTypeLike, *, rotates: bool = False
) -> LayerNorm | RMSNorm:
    """Return a norm of the kind that the model has."""
    return (LayerNorm if cfg.layer_norms else RMSNorm)(size, axis, cfg, dtype, rotates=rotates)


class HeadsNorm(RMSNorm):
    """Root-mean-square norm over all heads of a token together."""

    def __init__(self, num_heads: int, head_dim: int, axis: str, cfg: ModelConfig, dtype: DTypeLike) -> None:
        super().__init__(head_dim, "head_dim", cfg, dtype)
        self.scale = declare((num_heads, head_dim), (axis, "head_dim"), dtype, rotates=True)

    def __call__(self, x: Array) -> Array:
        """Normalise [t, heads, head_dim]; kv heads that all repeat equally often do not change the mean."""
        return super().__call__(x.reshape(x.shape[0], -1)).reshape(x.shape)


class LayerNormByHead(nnx.Module):
    """LayerNorm of single heads without a bias; each head has scales of its own.

    With `is_apart` the checkpoint has a tensor for each head, as it may have for each expert, and so the heads of one
    layer are an axis of experts. Each device has the scales of all heads.
    """

    def __init__(
        self, num_heads: int, head_dim: int, axis: str, cfg: ModelConfig, dtype: DTypeLike, *, is_apart: bool = False
    ) -> None:
        self.scale = declare((num_heads, head_dim), ("experts" if is_apart else axis, "head_dim"), dtype, rotates=True)
        self.eps = cfg.norm_eps

    def __call__(self, x: Array) -> Array:
        """Normalise [t, heads, head_dim]; the shape and dtype stay."""
        x32, scale_nh = x.astype(jnp.float32), self.scale[...].astype(jnp.float32)
        centered = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        # Heads may be repeated where there are more devices.
        scale_nh = jnp.repeat(scale_nh, x.shape[1] // len(scale_nh), axis=0)
        return (unit_norm(centered, self.eps) * scale_nh[None]).astype(x.dtype)
