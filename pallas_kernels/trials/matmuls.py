"""Matmuls by made-up weights of dense layers and of experts, and their products in float64.

The rows of the weights of large matmuls repeat after `_PERIOD` outputs, so that the products take a host little time.
The number is prime: no tile begins where another one does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.grouped_matmul import GroupedMatmul, Groups, MatmulShape, capacity
from pallas_kernels.linear import Linear, LinearShape, linear_name
from pallas_kernels.linear.reference import ACTIVATIONS, reference_linear
from pallas_kernels.weights import WeightFormat, dequantize, pack
from pallas_kernels.weights.held import Quantized

from .trial import Call, Outcome, Trial, allowed_error, bucket, describe, largest_error

LAYER = 1
ROWS = (1, 19, 200)
"""The numbers of rows that are multiplied by the weights of a dense layer, and that padding follows."""
COUNTS = {"few": (0, 1, 0, 2, 1, 1, 0, 0), "many": (0, 3, 0, 16, 17, 83, 1, 0)}
"""The rows of experts: none at both ends and inside, one, a slab and a row, and several tiles."""
_PERIOD = 1021
_GARBAGE = 64
"""The factor on rows of padding."""
_MOST_NUMBERS = 2**28
"""Larger weights have one layer only, so that they fit beside nothing else."""


class Weights(NamedTuple):
    """Weights of all layers."""

    held: Array | Quantized
    """Weights [l, *lead, o, i] as a device holds them; of other layers than the one at hand, scales are NaN."""
    layer: int
    numbers_pi: np.ndarray
    """The float64 numbers that the first rows are multiplied as; row j of all experts' outputs is j % p."""


def make_weights(form: WeightFormat | None, shape: Sequence[int], dtype: Any, *, is_packed: bool = False) -> Weights:
    """Return weights of `shape`, [*lead, o, i], in one layer of two."""
    *lead, num_inputs = shape
    num_rows = int(np.prod(lead))
    num_layers = 2 if num_rows * num_inputs <= _MOST_NUMBERS else 1
    order = jnp.arange(num_rows) % _PERIOD
    rng = np.random.default_rng(0)

    def spread(rows: np.ndarray, held_dtype: Any) -> Array:
        """Repeat rows, and put a poisoned layer before them."""
        array = jnp.asarray(rows)[order].reshape(*lead, -1)
        poison = jnp.full_like(array, np.nan if jnp.issubdtype(array.dtype, jnp.floating) else 1)
        return jnp.stack([*[poison] * (num_layers - 1), array]).astype(held_dtype)

    size = min(num_rows, _PERIOD)
    if form is None:
        rows = (rng.standard_normal((size, num_inputs)) / num_inputs**0.5).astype(dtype)
        return Weights(spread(rows, dtype), num_layers - 1, rows.astype(np.float64))
    parts = {name: _make_part(rng, form, name, (size, form.width(name, num_inputs))) for name in form.parts}
    numbers = dequantize(parts, form)
    if form.group is not None:  # these are widened to x's dtype; one scale for each output multiplies the sums
        numbers = numbers.astype(dtype)
    is_packed = is_packed and form.is_packed
    parts |= {"codes": pack(parts["codes"], form.bits)} if is_packed else {}
    held = {name: spread(part, form.device_dtype(name, packed=is_packed)) for name, part in parts.items()}
    return Weights(Quantized(held, form, is_packed), num_layers - 1, numbers.astype(np.float64))


def _make_part(rng: np.random.Generator, form: WeightFormat, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name == "order":
        return np.tile(rng.permutation(shape[-1]), (*shape[:-1], 1)).astype(form.dtype(name))
    if name == "codes":
        if form.is_packed:
            return rng.integers(0, 2**form.bits, shape, np.uint8)
        codes = rng.integers(0, 256, shape, np.uint8).view(form.code_dtype)
        is_number = form.values == "integer" or np.isfinite(codes.astype(np.float32))
        return np.where(is_number, codes, np.zeros((), codes.dtype))
    dtype = form.dtype(name)
    if dtype.kind in "iu":
        return rng.integers(0, 16, shape).astype(dtype)
    return (rng.uniform(0.5, 2, shape) / 16).astype(dtype)


def linear_trials(op: Linear, shape: LinearShape, *, is_packed: bool = False) -> Iterator[Trial]:
    """Yield the trials of a dense layer's matmul; `is_packed` means that codes of fewer than 8 bits share bytes."""
    for count in ROWS:
        make = partial(_make_linear, op, shape, count, is_packed=is_packed)
        yield Trial(linear_name(shape.format), op.implementation, describe(shape), f"{count} rows", make)


def _make_linear(op: Linear, shape: LinearShape, num_rows: int, *, is_packed: bool) -> Call:
    dtype = jnp.dtype(shape.dtype)
    weights = make_weights(shape.format, (shape.num_outputs, shape.num_inputs), dtype, is_packed=is_packed)
    x = np.random.default_rng(1).standard_normal((bucket(num_rows), shape.num_inputs)).astype(dtype)
    x[num_rows:] *= _GARBAGE

    def function(x: Any, weight: Any, layer: Any, num_rows: Any) -> Any:
        settings: dict[str, Any] = {"activation": shape.activation, "is_gated": shape.is_gated}
        return op(x, weight, layer, num_rows=num_rows, out_dtype=shape.out_dtype, **settings)

    def compare(result: Any) -> Outcome:
        sums = reference_linear(x[:num_rows], weights.numbers_pi)[:, np.arange(shape.num_outputs) % _PERIOD]
        want = _activated(sums, shape.activation, is_gated=shape.is_gated)
        out = np.asarray(result)
        missed = () if not np.isnan(out.astype(np.float32)).any() else ("padding is NaN",)
        return Outcome(largest_error(out[:num_rows], want), allowed_error(shape.dtype), missed)

    arguments = jnp.asarray(x), weights.held, jnp.int32(weights.layer), jnp.int32(num_rows)
    return Call(function, arguments, compare)


def grouped_trials(op: GroupedMatmul, shape: MatmulShape, *, is_packed: bool = False) -> Iterator[Trial]:
    """Yield the trials of a matmul by experts; `is_packed` as for `linear_trials`."""
    for name, counts in COUNTS.items():
        make = partial(_make_grouped, op, shape, counts, is_packed=is_packed)
        yield Trial("grouped_matmul", op.implementation, describe(shape), f"{name} rows", make)


def _make_grouped(op: GroupedMatmul, shape: MatmulShape, counts: Sequence[int], *, is_packed: bool) -> Call:
    dtype, rng = jnp.dtype(shape.dtype), np.random.default_rng(2)
    size = shape.num_experts, shape.num_outputs, shape.num_inputs
    weights = make_weights(shape.format, size, dtype, is_packed=is_packed)
    counts_e = np.zeros(shape.num_experts, np.int32)
    experts = np.sort(rng.permutation(shape.num_experts)[: len(counts)])
    counts_e[experts] = counts[: len(experts)]
    padded_e = -(-counts_e // op.row_alignment) * op.row_alignment
    starts_e = (np.cumsum(padded_e) - padded_e).astype(np.int32)
    spans = list(zip(starts_e, counts_e, strict=True))
    rows = np.concatenate([np.arange(start, start + count) for start, count in spans])
    x = np.full(
        (capacity(bucket(int(counts_e.sum())), len(counts_e), op.row_alignment), shape.num_inputs), np.nan, np.float32
    )
    x[rows] = rng.standard_normal((len(rows), shape.num_inputs))
    x = x.astype(dtype)

    def function(x: Any, weight: Any, layer: Any, groups: Groups) -> Any:
        return op(x, weight, layer, groups, activation=shape.activation, out_dtype=shape.out_dtype)

    def compare(result: Any) -> Outcome:
        sums = reference_linear(x[rows], weights.numbers_pi)
        experts_r = np.repeat(np.arange(len(counts_e)), counts_e)
        columns = (experts_r[:, None] * shape.num_outputs + np.arange(shape.num_outputs)) % _PERIOD
        want = _activated(np.take_along_axis(sums, columns, axis=1), shape.activation, is_gated=True)
        return Outcome(largest_error(np.asarray(result)[rows], want), allowed_error(shape.dtype))

    groups = Groups(jnp.asarray(starts_e), jnp.asarray(counts_e))
    return Call(function, (jnp.asarray(x), weights.held, jnp.int32(weights.layer), groups), compare)


def _activated(sums: np.ndarray, activation: str | None, *, is_gated: bool) -> np.ndarray:
    if activation is None:
        return sums
    if not is_gated:
        return ACTIVATIONS[activation](sums)
    gates, gated = np.split(sums, 2, axis=1)
    return ACTIVATIONS[activation](gates) * gated
