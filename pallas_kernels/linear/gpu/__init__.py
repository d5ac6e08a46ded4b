"""Matmuls by quantized weights on Hopper GPUs, in one Mosaic GPU kernel on the codes of all layers.

Codes become bfloat16 in registers, so nothing is widened in device memory. A row's sum runs over its inputs in the same
order whatever the other rows are. From `WIDENED_ROWS` rows on XLA widens a matrix in device memory and multiplies by it
instead.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.paged_attention.gpu.common import TILED_ROWS, num_workers
from pallas_kernels.weights.held import Quantized

from ..xla import finish, xla_linear
from .kernel import COLUMNS, Item, Items, divide, is_by_row, multiply_tiles
from .operands import as_words, in_kernel_order
from .sizes import WIDENED_ROWS, Sizes, choose_sizes
from .sums import add_parts

__all__ = ["gpu_linear"]


def gpu_linear(
    x_ti: Array,
    weight: Quantized,
    layer: Array | int,
    *,
    out_dtype: DTypeLike,
    num_rows: Array | int | None = None,
    activation: str | None = None,
    is_gated: bool = True,
    plus_to: Array | None = None,
    bias_o: Array | None = None,
    interpret: bool = False,
    num_cores: int | None = None,
    sizes: Sizes | None = None,
) -> Array:
    """See `Linear`; all rows are multiplied.

    `interpret` runs the kernel on a CPU, in an interpreter that looks for races. `num_cores` is the number of the GPU's
    multiprocessors. `sizes` is for tests; by default they follow from the shapes.
    """
    (t, i), o = x_ti.shape, weight.shape[1]
    added = {"activation": activation, "is_gated": is_gated, "plus_to": plus_to, "bias_o": bias_o}
    if sizes is None and t >= WIDENED_ROWS:
        return xla_linear(x_ti, weight, layer, out_dtype=out_dtype, **added)
    del num_rows
    sizes = sizes or choose_sizes(t, o, i, weight.format)
    sizes = sizes._replace(workers=num_workers(num_cores, interpret))
    product_to = _multiply(x_ti, weight, layer, jnp.dtype(out_dtype), sizes, interpret=interpret)
    return finish(product_to, **added)


def _multiply(
    x_ti: Array, weight: Quantized, layer: Array | int, out_dtype: jnp.dtype, sizes: Sizes, *, interpret: bool
) -> Array:
    form, (t, _), o = weight.format, x_ti.shape, weight.shape[1]
    dtype = out_dtype if sizes.is_whole else jnp.dtype(jnp.float32)
    padded = jnp.pad(x_ti, ((0, -t % (TILED_ROWS if is_by_row(dtype) else sizes.rows)), (0, 0)))
    row_tiles, column_tiles = -(-t // sizes.rows), -(-o // COLUMNS)
    parts = 1 if sizes.is_whole else sizes.parts

    def locate(refs: tuple[Any, ...], number: Array) -> Item:
        rest, row_tile = divide(number, row_tiles)
        column_tile, part = divide(rest, parts)
        return Item(refs[0][0], column_tile * COLUMNS, row_tile * sizes.rows, part)

    layer_of = jnp.asarray(layer, jnp.int32).reshape(1)
    items = Items((layer_of,), lambda _: row_tiles * column_tiles * parts, locate)
    grouped = {name: weight.parts[name] for name in form.parts[1:]}
    options = {"out_dtype": dtype, "sizes": sizes, "interpret": interpret}
    y = multiply_tiles(in_kernel_order(padded, form), as_words(weight), grouped, items, form, **options)
    return add_parts(y, t, weight, layer, out_dtype, by_row=is_by_row(dtype), is_whole=sizes.is_whole)
