"""Widen a block of weights in VMEM when it comes, and multiply all blocks of rows by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.weights import WeightFormat

from .sizes import LANES, WIDEN_ROWS
from .values import values


def multiply(
    x: Any, y: Any, weights: Any, parts: Mapping[str, Any], grouped: Mapping[str, Any], form: WeightFormat
) -> None:
    """Multiply a block of rows by a block of weights.

    Args:
      x: the rows [rows, in].
      y: the result [rows, out].
      weights: scratch of x's dtype [out, in], which holds the widened weights from the first block of rows on.
      parts: the weights' parts [out, width].
      grouped: float32 scratch of all parts but the codes, whole lanes wide.
      form: the weights' format.
    """

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        for name, ref in grouped.items():
            ref[:, : parts[name].shape[1]] = _to_float(parts[name][...])
        num_outputs, num_inputs = weights.shape

        def widen(chunk: Array, _: None) -> None:
            lanes = pl.ds(pl.multiple_of(chunk * LANES, LANES), LANES)
            for first in range(0, num_outputs, WIDEN_ROWS):
                rows = pl.ds(first, WIDEN_ROWS)
                numbers = _widen(parts["codes"][rows, lanes], grouped, rows, chunk, form)
                weights[rows, lanes] = numbers.astype(weights.dtype)

        lax.fori_loop(0, num_inputs // LANES, widen, None)

    y[...] = lax.dot_general(
        x[...],
        weights[...],
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    ).astype(y.dtype)


def _to_float(x: Array) -> Array:
    """Return float32 numbers; 16 bits of an integer are those of a float16, which a TPU's kernels do not take."""
    if x.dtype == jnp.int16:
        bits = x.astype(jnp.int32)
        magnitude = bits & 0x7FFF
        normal = lax.bitcast_convert_type((magnitude << 13) + (112 << 23), jnp.float32)
        magnitude = jnp.where(magnitude < 1 << 10, magnitude.astype(jnp.float32) * 2.0**-24, normal)
        return jnp.where(bits < 0, -magnitude, magnitude)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jnp.int32).astype(jnp.float32)
    return x.astype(jnp.float32)


def _widen(codes: Array, grouped: Mapping[str, Any], rows: Any, chunk: Array, form: WeightFormat) -> Array:
    """Return the float32 numbers of codes [rows, 128], the chunk's."""
    numbers = values(codes, form, jnp.float32)
    scales = _spread(grouped["scales"], rows, chunk, form.group)
    if "scale_factors" in grouped:
        scales = scales * _spread(grouped["scale_factors"], rows, chunk, form.factor_group)
    numbers = numbers * scales
    if "zeros" in grouped:
        return numbers - _spread(grouped["zeros"], rows, chunk, form.group) * scales
    if "mins" in grouped:
        mins = _spread(grouped["mins"], rows, chunk, form.group)
        if "min_factors" in grouped:
            mins = mins * _spread(grouped["min_factors"], rows, chunk, form.factor_group)
        return numbers - mins
    return numbers


def _spread(ref: Any, rows: Any, chunk: Array, group: int | None) -> Array:
    """Return an entry for each of 128 inputs, of one for each group."""
    assert group is not None
    first = lax.div(chunk * LANES, group) if group >= LANES else chunk * (LANES // group)
    tile = ref[rows, pl.ds(pl.multiple_of(lax.div(first, LANES) * LANES, LANES), LANES)]
    lane = lax.broadcasted_iota(jnp.int32, tile.shape, 1)
    index = lax.rem(first, LANES) + (lane // group if group < LANES else jnp.zeros_like(lane))
    return jnp.take_along_axis(tile, index, axis=1, mode="promise_in_bounds")
