"""The sizes that the Hopper kernel is compiled for."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.paged_attention.gpu.common import MMA_ROWS, SMEM_BYTES, SMEM_RESERVED, WORKERS
from pallas_kernels.weights import WeightFormat

from ..shape import LinearShape

WORD_BYTES = 4
_TILE_BYTES = 32
"""The number that the bytes of a row of codes must be a multiple of: the narrowest tile of shared memory."""
DEPTH = 16
"""The number of words of codes of a row that are multiplied together: as many as the inputs of a wgmma."""
_ROW_TILES = (8, 16, 32, 64, 128)
"""The numbers of rows of x that a tile can have."""
_MOST_SCALED_ROWS = 64
ROW_SLAB = 16
"""The rows of a piece in which a group's results are stored."""
CONSUMERS = 2
WIDENED_ROWS = 512
"""The number of rows from which on a matrix is widened in device memory first.

On an H200, at 14,336 x 4,096, that takes about 48 us (78 us for one row in plain XLA, less 30 for a bfloat16 matrix),
and cuBLAS then multiplies at 800 TFLOP/s: 123 us for 512 rows. The kernel takes 35 us or more for each 128 rows.
"""
LARGE_GROUP = 64
"""The numbers of a group from which on sums are scaled and not numbers."""
_MOST_STAGES = 16
_KERNEL_PIECES = 6
"""The pieces that come from memory in the time of a small kernel, about 2 us."""
_LEAST_PIECES = 8
"""The fewest pieces for which a sum is divided into parts."""
_GROUPED_DTYPES = ("float16", "bfloat16", "float32", "uint8", "int8")


class Sizes(NamedTuple):
    """How a call is divided."""

    rows: int
    """The rows of x of a tile."""
    parts: int
    """The number of parts into which a sum's inputs are divided; each part is summed separately, then they are added in
    order."""
    is_whole: bool
    """True if a tile computes all parts of its sums. Otherwise it computes one, and XLA adds them up."""
    stages: int
    """The number of pieces that the ring holds."""
    workers: int = WORKERS
    """The number of thread blocks."""


def codes_per_word(form: WeightFormat) -> int:
    """Return the number of codes that share a word of 32 bits."""
    return 8 if form.bits == 4 else 4


def piece(form: WeightFormat) -> int:
    """Return the number of inputs that are multiplied at a time."""
    return DEPTH * codes_per_word(form)


def scales_sums(form: WeightFormat) -> bool:
    """Return whether the sums of groups are scaled."""
    return form.factor_group is not None or (form.group is not None and form.group >= LARGE_GROUP)


def depth_of_rows(form: WeightFormat) -> int:
    """Return the numbers of a row of x that a piece is multiplied by: its inputs, and 16 for mins."""
    return piece(form) + DEPTH * form.has_mins


def choose_sizes(num_rows: int, num_outputs: int, num_inputs: int, form: WeightFormat) -> Sizes:
    """Return sizes that keep all multiprocessors busy and fill their shared memory.

    The number of parts of a sum depends on the weight alone, so a row's bits do not depend on other rows.
    """
    # Sums that are scaled need more registers.
    row_tiles = [x for x in _ROW_TILES if x <= _MOST_SCALED_ROWS or not scales_sums(form)]
    rows = next((x for x in row_tiles if num_rows <= x), row_tiles[-1])
    column_tiles = -(-num_outputs // (CONSUMERS * MMA_ROWS))
    num_pieces = -(-num_inputs // piece(form))
    choices = range(1, max(1, num_pieces // _LEAST_PIECES) + 1)
    parts = min(choices, key=lambda parts: _divided_time(column_tiles, num_pieces, parts, _ROW_TILES[0]))
    parts = -(-num_pieces // -(-num_pieces // parts))  # none is empty
    tiles = column_tiles * -(-num_rows // rows)
    whole_time = _divided_time(tiles, num_pieces, 1, rows)
    is_whole = parts == 1 or whole_time <= _divided_time(tiles, num_pieces, parts, rows)
    out = CONSUMERS * MMA_ROWS * rows * 4
    stage = CONSUMERS * MMA_ROWS * DEPTH * WORD_BYTES + rows * depth_of_rows(form) * 2
    return Sizes(rows, parts, is_whole, min(_MOST_STAGES, (SMEM_BYTES - SMEM_RESERVED - out) // stage))


def _divided_time(tiles: int, num_pieces: int, parts: int, rows: int) -> float:
    """Return about how long tiles take if their sums are divided into parts, in times of a piece's codes.

    Parts are written and read in float32, and added up in a kernel of their own.
    """
    rounds, pieces = -(-tiles * parts // WORKERS), -(-num_pieces // parts)
    if parts == 1:
        return rounds * pieces
    return rounds * (pieces + 2 * rows * 4 / (DEPTH * WORD_BYTES)) + _KERNEL_PIECES


def refusal(shape: LinearShape) -> str | None:
    """Return why the kernel cannot run a matmul, or None if it can."""
    form, num_inputs, num_outputs = shape.format, shape.num_inputs, shape.num_outputs
    if form is None:
        return "weights of x's dtype need no widening"
    if jnp.dtype(shape.dtype) != jnp.bfloat16:
        return f"rows must be bfloat16, not {jnp.dtype(shape.dtype).name}"
    if form.values in ("nf4", "e5m2"):
        return f"there is no widening of {form.values} codes"
    unknown = {form.dtype(part).name for part in form.parts[1:]}.difference(_GROUPED_DTYPES)
    if unknown:
        return f"scales and the like must be {', '.join(_GROUPED_DTYPES)}, not {', '.join(sorted(unknown))}"
    reason = _refuse_parts(form)
    if reason is not None:
        return reason
    depth, least = piece(form), _TILE_BYTES // WORD_BYTES * codes_per_word(form)
    if num_inputs % least or num_outputs % MMA_ROWS:
        return f"inputs must be a multiple of {least} and outputs of {MMA_ROWS}, not {num_inputs} and {num_outputs}"
    group = form.group or num_inputs
    factor_group = form.factor_group or group
    if any(depth % each and each % depth for each in (group, factor_group)):
        return f"groups of {group} and {factor_group} numbers are no multiple and no part of {depth}"
    return None


def _refuse_parts(form: WeightFormat) -> str | None:
    """Return why codes cannot be widened with the format's scales, zeros and mins, or None if they can."""
    least = piece(form) // 4
    is_large = form.factor_group is None and scales_sums(form)
    if form.group is not None and form.group < least:
        return f"groups have {least} numbers at least, not {form.group}"
    if form.zero_dtype not in (None, "int8" if form.bits == 8 else "uint8"):
        return f"zeros of {form.bits} bits are not {form.zero_dtype}"
    if form.has_mins and (is_large or form.scale_dtype == "float32"):
        return f"there are no mins of {form.scale_dtype} for groups of {form.group}"
    if form.values == "e2m1" and not is_large and form.scale_dtype != "bfloat16":
        return f"there is no widening of e2m1 codes with scales of {form.scale_dtype}"
    return None
