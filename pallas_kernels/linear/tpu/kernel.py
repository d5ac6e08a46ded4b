"""Multiply many rows: a block of weights is widened in VMEM when it comes, and all blocks of rows multiply it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels.weights import WeightFormat
from pallas_kernels.weights.held import Quantized

from .options import pallas_options
from .sizes import LANES, WIDEN_ROWS, Sizes
from .values import unit, values


def multiply_many(
    x_ti: Array, weight: Quantized, layer: Array | int, *, out_dtype: DTypeLike, sizes: Sizes, interpret: bool
) -> Array:
    """Return the product [t, o] of rows and a layer's weights, each rounded to x's dtype."""
    form, (t, i), o = weight.format, x_ti.shape, weight.shape[1]
    held = weight.map(lambda part: lax.dynamic_index_in_dim(part, layer, keepdims=False))
    scales_og, mins_og = held.scales_and_mins()
    grouped = [
        jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES))) for x in (unit(form) * scales_og, mins_og) if x is not None
    ]

    def body(_: Any, x: Any, codes: Any, *refs: Any) -> None:
        *spread, y, weights = refs
        pl.when(pl.program_id(1) == 0)(lambda: _widen(codes, spread, weights, form))
        y[...] = lax.dot_general(
            x[...],
            weights[...],
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        ).astype(y.dtype)

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(o, sizes.outputs), pl.cdiv(t, sizes.rows)),
            in_specs=[
                pl.BlockSpec((sizes.rows, i), lambda _column, row, _: (row, 0)),
                pl.BlockSpec((None, sizes.outputs, i), lambda column, _, layer_ref: (layer_ref[0], column, 0)),
                *(pl.BlockSpec((sizes.outputs, x.shape[1]), lambda column, _row, _: (column, 0)) for x in grouped),
            ],
            out_specs=pl.BlockSpec((sizes.rows, sizes.outputs), lambda column, row, _: (row, column)),
            scratch_shapes=[pltpu.VMEM((sizes.outputs, i), x_ti.dtype)],
        ),
        out_shape=jax.ShapeDtypeStruct((t, o), out_dtype),
        name="quantized_linear",
        **pallas_options(interpret),
    )(jnp.asarray(layer, jnp.int32).reshape(1), x_ti, weight.codes, *grouped)


def _widen(codes: Any, grouped: Sequence[Any], weights: Any, form: WeightFormat) -> None:
    """Write the numbers [out, in] of codes with scales, and mins if the format has them, [out, groups]."""
    num_outputs, num_inputs = weights.shape

    def widen(chunk: Array, _: None) -> None:
        lanes = pl.ds(pl.multiple_of(chunk * LANES, LANES), LANES)
        for first in range(0, num_outputs, WIDEN_ROWS):
            rows = pl.ds(first, WIDEN_ROWS)
            numbers = values(codes[rows, lanes], form, jnp.float32)
            scales, *mins = (_spread(ref, rows, chunk, form.group) for ref in grouped)
            numbers = (numbers - form.offset) * scales
            weights[rows, lanes] = (numbers - mins[0] if mins else numbers).astype(weights.dtype)

    lax.fori_loop(0, num_inputs // LANES, widen, None)


def _spread(ref: Any, rows: Any, chunk: Array, group: int | None) -> Array:
    """Repeat each group's entry for its inputs, over a chunk of 128 inputs."""
    assert group is not None
    first = lax.div(chunk * LANES, group) if group >= LANES else chunk * (LANES // group)
    tile = ref[rows, pl.ds(pl.multiple_of(lax.div(first, LANES) * LANES, LANES), LANES)]
    lane = lax.broadcasted_iota(jnp.int32, tile.shape, 1)
    index = lax.rem(first, LANES) + (lax.div(lane, group) if group < LANES else jnp.zeros_like(lane))
    return jnp.take_along_axis(tile, index, axis=1, mode="promise_in_bounds")
