"""The grouped matmul by quantized weights: it runs the linear op's kernel, with rows of one expert in each tile."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.linear.gpu import sizes as linear_sizes
from pallas_kernels.linear.gpu.kernel import COLUMNS, Item, Items, divide, multiply_tiles
from pallas_kernels.linear.gpu.operands import as_words, in_kernel_order
from pallas_kernels.paged_attention.gpu.common import num_workers
from pallas_kernels.weights.held import Quantized

from ..groups import Groups
from ..spans import cut
from .sizes import ROW_SLAB, quantized_sizes


def multiply_quantized(
    x_ri: Array,
    weight: Quantized,
    layer: Array | int,
    groups: Groups,
    *,
    interpret: bool,
    num_cores: int | None = None,
    sizes: linear_sizes.Sizes | None = None,
) -> Array:
    """Return the product [r, o] in bfloat16; rows of no group hold anything."""
    form, (_, num_experts, num_outputs, num_inputs) = weight.format, weight.shape
    sizes = sizes or quantized_sizes(x_ri.shape[0], num_experts, num_outputs, num_inputs, form)
    sizes = sizes._replace(workers=num_workers(num_cores, interpret))
    spans = cut(groups, x_ri.shape[0], ROW_SLAB, sizes.rows)
    column_tiles = -(-num_outputs // COLUMNS)

    def locate(refs: tuple[Any, ...], number: Array) -> Item:
        layer_and_total, experts_n, rows_n, counts_n, places_n, siblings_n = refs
        entry = lax.div(number, jnp.int32(column_tiles))  # some span of the expert
        first = entry - places_n[entry]
        column_tile, sibling = divide(number - first * column_tiles, siblings_n[entry])
        span = first + sibling
        matrix = layer_and_total[0] * num_experts + experts_n[span]
        return Item(matrix, column_tile * COLUMNS, rows_n[span], jnp.int32(0), counts_n[span])

    layer_and_total = jnp.stack([jnp.asarray(layer, jnp.int32), spans.total])
    items = Items((layer_and_total, *spans[1:]), lambda refs: refs[0][1] * column_tiles, locate)
    grouped = {name: weight.parts[name].reshape(-1, *weight.parts[name].shape[2:]) for name in form.parts[1:]}
    options = {"out_dtype": jnp.dtype(jnp.bfloat16), "sizes": sizes, "interpret": interpret}
    return multiply_tiles(in_kernel_order(x_ri, form), as_words(weight), grouped, items, form, **options)[0]
