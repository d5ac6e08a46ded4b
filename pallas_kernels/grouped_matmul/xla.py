"""The grouped matmul in plain XLA, for platforms and shapes without a kernel of their own.

On a CPU `ragged_dot` would multiply every row by every expert, so a loop multiplies one tile of rows at a time by one
expert's weights. Elsewhere it is `ragged_dot`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.linear.xla import ACTIVATIONS
from pallas_kernels.weights.held import Quantized

from .groups import Groups

_MIN_TILE, _MAX_TILE = 8, 64
_DIMENSIONS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
)
"""The dimensions of x [r, i] times w [e, o, i]: rows r are grouped by expert e."""


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
    options: dict[str, Any] = {"activation": activation, "out_dtype": out_dtype}
    arguments = (x_ri, weight, jnp.asarray(layer, jnp.int32), groups)
    by_tiles, at_once = partial(_multiply_tiles, **options), partial(_multiply_at_once, **options)
    return lax.platform_dependent(*arguments, cpu=by_tiles, default=at_once)


def _multiply_tiles(
    x_ri: Array,
    weight: Array | Quantized,
    layer: Array,
    groups: Groups,
    *,
    activation: str | None,
    out_dtype: DTypeLike,
) -> Array:
    """Multiply one tile after the other, each of one expert's rows."""
    num_rows, num_experts, num_columns = len(x_ri), weight.shape[1], weight.shape[2] // (2 if activation else 1)
    tile = _tile(num_rows, num_experts)
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
        found_to = finish(product_to, scales_o, activation, out_dtype)
        # Rows beyond the group's end are overwritten by the next group's tiles, or belong to no group.
        return lax.dynamic_update_slice_in_dim(out_ro, found_to, row, 0)

    return lax.fori_loop(0, ends_e[-1], body, jnp.zeros((num_rows + tile, num_columns), out_dtype))[:num_rows]


def _tile(num_rows: int, num_experts: int) -> int:
    """Return the number of rows that are multiplied at a time: about as many as an expert has."""
    tile = _MIN_TILE
    while tile < _MAX_TILE and 2 * tile * num_experts <= num_rows:
        tile *= 2
    return tile


def _multiply_at_once(
    x_ri: Array,
    weight: Array | Quantized,
    layer: Array,
    groups: Groups,
    *,
    activation: str | None,
    out_dtype: DTypeLike,
) -> Array:
    """Multiply all groups with one `ragged_dot`, each group together with the padding behind it."""
    starts_e, num_rows = groups.starts_e, len(x_ri)
    sizes_e = jnp.diff(starts_e, append=num_rows)
    multiply = partial(lax.ragged_dot_general, group_sizes=sizes_e, ragged_dot_dimension_numbers=_DIMENSIONS)
    w_eoi, scales_eo = _numbers(weight, lambda part: part[layer])
    product_ro = _dot(multiply, x_ri, w_eoi)
    scales_ro = None
    if scales_eo is not None:
        scales_ro = scales_eo[(jnp.arange(num_rows)[:, None] >= starts_e).sum(axis=1) - 1]
    return finish(product_ro, scales_ro, activation, out_dtype)


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
