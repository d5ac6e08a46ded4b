"""The grouped matmul in plain XLA, for platforms and shapes without a kernel of their own.

`ragged_dot` would multiply every row by every expert on a CPU and on a GPU. So on a CPU a loop multiplies one tile of
rows at a time by one expert's weights. On a GPU a few rows are sums of products, in one kernel that reads and widens
the weights of each row's expert; more rows go in tiles, and one batched matmul takes as many tiles as there is room for
their experts' weights, side by side. Elsewhere it is `ragged_dot`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.linear.xla import ACTIVATIONS
from pallas_kernels.weights.held import Quantized

from .groups import Groups
from .spans import cut

_MIN_TILE, _MAX_TILE = 8, 64
SUMMED_ROWS = 128
"""The most rows that a GPU multiplies as sums of products; with more, several rows share an expert's weights."""
_MIN_GPU_TILE, _MAX_GPU_TILE = 16, 128
_GATHERED_BYTES = 256 << 20
"""The most bytes of the experts' weights of the tiles that a GPU multiplies at once."""
_DIMENSIONS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
)
"""The dimensions of x [r, i] times w [e, o, i]: rows r are grouped by expert e."""


class Result(NamedTuple):
    """What is made of the sums of products, as `GroupedMatmul` takes it."""

    activation: str | None
    dtype: DTypeLike

    def num_columns(self, num_outputs: int) -> int:
        """Return the number of columns of the result."""
        return num_outputs // 2 if self.activation else num_outputs


def xla_grouped_matmul(
    x_ri: Array,
    weight: Array | Quantized,
    layer: Array | int,
    groups: Groups,
    *,
    activation: str | None = None,
    out_dtype: DTypeLike,
    interpret: bool = False,
) -> Array:
    """See `GroupedMatmul`; there is nothing to interpret."""
    del interpret
    arguments, result = (x_ri, weight, jnp.asarray(layer, jnp.int32), groups), Result(activation, out_dtype)
    by_tiles, at_once = partial(_multiply_tiles, result=result), partial(_multiply_at_once, result=result)
    on_gpu = partial(multiply_rows if len(x_ri) <= SUMMED_ROWS else multiply_batches, result=result)
    return lax.platform_dependent(*arguments, cpu=by_tiles, cuda=on_gpu, default=at_once)


def _multiply_tiles(x_ri: Array, weight: Array | Quantized, layer: Array, groups: Groups, result: Result) -> Array:
    """Multiply one tile after the other, each of one expert's rows."""
    num_rows, num_experts, num_columns = len(x_ri), weight.shape[1], result.num_columns(weight.shape[2])
    tile = _tile(num_rows, num_experts, _MIN_TILE, _MAX_TILE)
    ends_e = jnp.cumsum(-(-groups.counts_e // tile))
    firsts_e = groups.starts_e - (ends_e + groups.counts_e // -tile) * tile
    # The last tile may reach beyond the rows.
    x_ri = jnp.pad(x_ri, ((0, tile), (0, 0)))

    def body(i: Array, out_ro: Array) -> Array:
        expert = (ends_e <= i).sum()
        row = firsts_e[expert] + i * tile
        x_ti = lax.dynamic_slice_in_dim(x_ri, row, tile)
        w_oi, scales_o = _numbers(weight, lambda part: part[layer, expert])
        product_to = _dot(partial(jnp.einsum, "ti,oi->to"), x_ti, w_oi)
        found_to = finish(product_to, scales_o, *result)
        # Rows beyond the group's end are overwritten by the next group's tiles, or belong to no group.
        return lax.dynamic_update_slice_in_dim(out_ro, found_to, row, 0)

    return lax.fori_loop(0, ends_e[-1], body, jnp.zeros((num_rows + tile, num_columns), result.dtype))[:num_rows]


def _tile(num_rows: int, num_experts: int, least: int, most: int) -> int:
    """Return the number of rows that are multiplied at a time: about as many as an expert has."""
    tile = least
    while tile < most and 2 * tile * num_experts <= num_rows:
        tile *= 2
    return tile


def multiply_rows(x_ri: Array, weight: Array | Quantized, layer: Array, groups: Groups, result: Result) -> Array:
    """Multiply each row by the weights of its expert, as a sum of float32 products for each result."""
    experts_r = _experts_of_rows(groups, len(x_ri))
    w_roi, scales_ro = _numbers(weight, lambda part: part[layer, experts_r])
    product_ro = jnp.sum(w_roi.astype(jnp.float32) * x_ri.astype(jnp.float32)[:, None], axis=2)
    return finish(product_ro, scales_ro, *result)


def multiply_batches(
    x_ri: Array,
    weight: Array | Quantized,
    layer: Array,
    groups: Groups,
    result: Result,
    *,
    most_bytes: int = _GATHERED_BYTES,
) -> Array:
    """Multiply tiles of one expert's rows each, as many at once as have weights of `most_bytes` bytes."""
    num_rows, num_experts, (num_outputs, num_inputs) = len(x_ri), weight.shape[1], weight.shape[2:]
    tile = _tile(num_rows, num_experts, _MIN_GPU_TILE, _MAX_GPU_TILE)
    spans = cut(groups, num_rows, 1, tile)
    num_tiles = len(spans.rows_n)
    at_once = max(1, min(num_tiles, most_bytes // (num_outputs * num_inputs * x_ri.dtype.itemsize)))
    # The last batch may reach beyond the tiles.
    padded = ((0, -num_tiles % at_once),)
    tiles = [jnp.pad(x_n, padded) for x_n in (spans.experts_n, spans.rows_n, spans.counts_n)]

    def body(batch: Array, out_ro: Array) -> Array:
        first = batch * at_once
        experts_n, starts_n, counts_n = (lax.dynamic_slice_in_dim(x_n, first, at_once) for x_n in tiles)
        counts_n = jnp.where(first + jnp.arange(at_once) < spans.total, counts_n, 0)
        places_t = jnp.arange(tile)
        is_row_nt = places_t[None] < counts_n[:, None]
        # Rows that a tile lacks are beyond the last one, each with another number.
        beyond_nt = num_rows + lax.iota(jnp.int32, at_once * tile).reshape(at_once, tile)
        rows_nt = jnp.where(is_row_nt, starts_n[:, None] + places_t[None], beyond_nt)
        x_nti = x_ri.at[rows_nt].get(mode="fill", fill_value=0)
        w_noi, scales_no = _numbers(weight, lambda part: part[layer, experts_n])
        product_nto = _dot(partial(jnp.einsum, "nti,noi->nto"), x_nti, w_noi)
        if scales_no is not None:
            product_nto = product_nto * scales_no[:, None]
        result_ro = finish(product_nto.reshape(at_once * tile, -1), None, *result)
        return out_ro.at[rows_nt.reshape(-1)].set(result_ro, mode="drop", unique_indices=True)

    nothing = jnp.zeros((num_rows, result.num_columns(num_outputs)), result.dtype)
    return lax.fori_loop(0, (spans.total + at_once - 1) // at_once, body, nothing)


def _experts_of_rows(groups: Groups, num_rows: int) -> Array:
    """Return the expert of each row, or of the group before it for rows that belong to none."""
    return (jnp.arange(num_rows)[:, None] >= groups.starts_e[None]).sum(axis=1) - 1


def _multiply_at_once(x_ri: Array, weight: Array | Quantized, layer: Array, groups: Groups, result: Result) -> Array:
    """Multiply all groups with one `ragged_dot`, each group together with the padding behind it."""
    starts_e, num_rows = groups.starts_e, len(x_ri)
    sizes_e = jnp.diff(starts_e, append=num_rows)
    multiply = partial(lax.ragged_dot_general, group_sizes=sizes_e, ragged_dot_dimension_numbers=_DIMENSIONS)
    w_eoi, scales_eo = _numbers(weight, lambda part: part[layer])
    product_ro = _dot(multiply, x_ri, w_eoi)
    scales_ro = None
    if scales_eo is not None:
        scales_ro = scales_eo[_experts_of_rows(groups, num_rows)]
    return finish(product_ro, scales_ro, *result)


def _numbers(weight: Array | Quantized, take: Callable[[Array], Array]) -> tuple[Array, Array | None]:
    """Return the selected weights, widened, and the scales of sums if sums are scaled."""
    if not isinstance(weight, Quantized):
        return take(weight), None
    held = weight.map(take)
    return held.numbers(), held.scales[..., 0] if held.format.scales_rows else None


def _dot(multiply: Callable[..., Array], x: Array, w: Array) -> Array:
    """Multiply in x's dtype, to which weights are rounded, and return float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return multiply(x, w.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)


def finish(product: Array, scales: Array | None, activation: str | None, out_dtype: DTypeLike) -> Array:
    """Scale and activate the float32 sums, and round them last."""
    product = product if scales is None else product * scales
    if activation:
        gate, up = jnp.split(product, 2, axis=1)
        product = ACTIVATIONS[activation](gate) * up
    return product.astype(out_dtype)
