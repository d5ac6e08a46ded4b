"""The sizes that the TPU kernel is compiled for."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.weights import WeightFormat

from ..shape import MatmulShape

LANES = 128
SUBLANES = 8
ROW_SLAB = 16
"""The rows that are read and written together: a tile of bfloat16, two of float32. Each expert's rows begin with a
slab."""
MATMUL_ROWS = (16, 32, 64, 128, 256)
"""The numbers of rows that a matmul can take."""
VMEM_LIMIT = 56 * 2**20
_TILE_BYTES = 4 * 2**20
_RING_BYTES = 16 * 2**20
"""The bytes of weights in VMEM. On TPU7x HBM delivers 7.4 MB in 2 us."""
_ROWS_BYTES = 32 * 2**20
_WHOLE_BYTES = 9 * 2**20
"""The most bytes of a tile that takes all columns of an expert, because it cannot take a part of them."""
_MOST_BUFFERS = 8
_MOST_SPAN_ROWS = 1024
_MXU_COLUMNS = 256


class Sizes(NamedTuple):
    """How a call is divided."""

    parts: int
    """2 where a column of the result comes from a gate's row of weights and an up's row, otherwise 1."""
    columns: int
    """The columns of the result, and rows of each part of the weights, in a tile."""
    num_tiles: int
    """The number of tiles that cover all columns; the last may reach beyond them."""
    num_buffers: int
    """The number of tiles of weights that the ring holds."""
    span: int
    """The most rows of an expert that stay in VMEM while its weights pass by once."""
    is_transposed: bool
    """True if the weights lie in memory as [l, e, in, out]."""

    @property
    def padded_columns(self) -> int:
        """Return the columns of all tiles."""
        return self.columns * self.num_tiles


def weight_slab(dtype: DTypeLike) -> int:
    """Return the rows of weights that are read together: a tile of the dtype in memory."""
    return 4 * SUBLANES // jnp.dtype(dtype).itemsize


def choose_sizes(
    num_rows: int,
    depth: int,
    columns: int,
    parts: int,
    dtype: DTypeLike,
    weight_dtype: DTypeLike,
    *,
    has_groups: bool = False,
) -> Sizes:
    """Return sizes for x [num_rows, depth] and parts of weights [columns, depth], which fit any generation's VMEM.

    With `has_groups` the weights have scales for groups of inputs.
    """
    # Weights that lie transposed are read transposed, or XLA would copy them. `refusal` excludes the other sizes.
    is_whole = _goes_whole(depth, columns, parts, weight_dtype)
    is_transposed = _lies_transposed(parts * columns, depth) and (columns % LANES == 0 or is_whole)
    padded_depth = round_up(depth, LANES)
    column_bytes = parts * padded_depth * jnp.dtype(weight_dtype).itemsize
    most = max(_MXU_COLUMNS, min(_TILE_BYTES // column_bytes // LANES * LANES, round_up(columns, LANES)))
    if is_transposed or has_groups:  # whole tiles only: a copy takes a fixed number of lanes, or all
        candidates = [x for x in range(LANES, most + 1, LANES) if columns % x == 0] or [columns]
    else:
        candidates = range(max(_MXU_COLUMNS, most // (2 * LANES) * LANES), most + 1, LANES)
    # Columns beyond the last one are computed in vain. Among equals the largest tile has the fewest starts.
    tile = min(candidates, key=lambda x: (round_up(columns, x), -x))
    num_buffers = max(2, min(_MOST_BUFFERS, _RING_BYTES // (tile * column_bytes)))
    span = _MOST_SPAN_ROWS
    widest = max(padded_depth * jnp.dtype(dtype).itemsize, tile * 4)  # the bytes of an input row or of its results
    while 2 * span * widest > _ROWS_BYTES or span // 2 >= max(num_rows, ROW_SLAB):
        span //= 2
    return Sizes(parts, tile, -(-columns // tile), num_buffers, span, is_transposed)


def _lies_transposed(num_outputs: int, num_inputs: int) -> bool:
    """Return whether XLA lays weights [out, in] out with `out` in the lanes, because that takes less padding."""
    return round_up(num_outputs, LANES) * num_inputs < round_up(num_inputs, LANES) * num_outputs


def _goes_whole(depth: int, columns: int, parts: int, weight_dtype: DTypeLike) -> bool:
    """Return whether an expert's transposed weights [in, out] can be one tile, whatever the number of columns."""
    return parts == 1 and depth * round_up(columns, LANES) * jnp.dtype(weight_dtype).itemsize <= _WHOLE_BYTES


def refusal(shape: MatmulShape) -> str | None:
    """Return why the kernel cannot run a matmul, or None if it can."""
    dtype = jnp.dtype(shape.dtype)
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype must be bfloat16 or float32, not {dtype.name}"
    if shape.format is not None and shape.format.group is not None:
        return _refuse_groups(shape, shape.format)
    parts = shape.num_outputs // shape.num_columns
    if _lies_transposed(shape.num_outputs, shape.num_inputs):
        if _goes_whole(shape.num_inputs, shape.num_columns, parts, shape.weight_dtype):
            return None
        slab, what = LANES, f"columns, since weights with {shape.num_inputs} inputs lie transposed"
    else:
        slab, what = weight_slab(shape.weight_dtype), "columns"
    if shape.num_columns % slab:
        return f"the result must have a multiple of {slab} {what}, not {shape.num_columns}"
    return None


def _refuse_groups(shape: MatmulShape, form: WeightFormat) -> str | None:
    """Return why the kernel cannot run a matmul by weights with scales of groups, or None if it can."""
    group, num_groups = form.group, shape.num_inputs // (form.group or 1)
    if form.bits != 8 or form.values == "e5m2" or form.parts != ("codes", "scales"):
        return "weights with scales of groups must be e4m3 or integers of 8 bits, without mins or zeros"
    if form.scale_dtype != "float32":
        return f"scales of groups must be float32, not {form.scale_dtype}"
    if group is None or group % LANES or shape.num_inputs % group:
        return f"groups must be a multiple of {LANES} inputs, and a part of {shape.num_inputs}, not {group}"
    if shape.num_columns % LANES:
        return f"the result must have a multiple of {LANES} columns, not {shape.num_columns}, for scales in whole lanes"
    if not _lies_transposed(shape.num_outputs, num_groups):
        return f"scales of {num_groups} groups do not lie with their outputs in the lanes"
    return None


def round_up(x: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-x // multiple) * multiple
