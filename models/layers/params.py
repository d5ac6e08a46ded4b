"""Declare parameters: arrays with a name per axis. A merged array holds several parameters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike


def declare(
    shape: tuple[int, ...], axes: tuple[str, ...], dtype: DTypeLike, num_inputs: int = 0, *, rotates: bool = False
) -> nnx.Param[Array]:
    """Declare a parameter with one logical sharding axis per dimension; matmuls sum over its last `num_inputs`.

    `num_inputs` is 0 for a parameter that is added, multiplies elementwise, or multiplies each head by its own matrix;
    it
    is never quantized. `rotates` says that RoPE rotates its outputs, so that the dimensions of its heads are read in
    the order of the RoPE table.
    """
    return nnx.Param(jnp.zeros(shape, dtype), out_sharding=axes, num_inputs=num_inputs, rotates=rotates)


class Part(NamedTuple):
    """One parameter of a merged array: its name, the name and size of its first axis, whether RoPE rotates its outputs,
    and the number of its heads, if that is not the axis's size."""

    name: str
    axis: str
    size: int
    rotates: bool = False
    num_heads: int | None = None


def declare_merged(
    parts: Sequence[Part],
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    num_shards: int,
    dtype: DTypeLike,
    num_inputs: int = 0,
    *,
    num_experts: int | None = None,
) -> nnx.Param[Array]:
    """Declare parameters [part.size, *shape] as one merged array [num_shards, rows, *shape].

    A shard holds an equal share of each, one after the other. Thus matrices with the same input are one matmul. With
    `num_experts` the array is [num_experts, num_shards, rows, *shape].
    """
    rows = sum(part.size for part in parts) // num_shards
    experts = () if num_experts is None else (num_experts,)
    array = jnp.zeros((*experts, num_shards, rows, *shape), dtype)
    axes = (*("experts" for _ in experts), "shards", "rows", *axes)
    return nnx.Param(array, out_sharding=axes, parts=tuple(parts), num_shards=num_shards, num_inputs=num_inputs)


def split(merged: Array, parts: Sequence[Part]) -> list[Array]:
    """Return each part of [t, num_shards, rows, ...] as [t, size, ...]."""
    t, num_shards, _, *rest = merged.shape
    *ends, _ = itertools.accumulate(part.size // num_shards for part in parts)
    pieces = jnp.split(merged, ends, axis=2)
    return [piece.reshape(t, part.size, *rest) for piece, part in zip(pieces, parts, strict=True)]
