"""The sizes that the kernel for GPUs from Ampere on is compiled for."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.weights import WeightFormat

from ..gpu.sizes import DEPTH, WORD_BYTES, depth_of_rows, piece
from ..gpu.sizes import refusal as packed_refusal
from ..gpu.widen import TILES, Widening
from ..shape import LinearShape

OPERAND_ROWS = 64
"""The outputs of an operand, 16 for each warp."""
_ROW_TILES = (8, 16, 32, 64)
"""The numbers of rows of x that a tile can have."""
_BLOCKS = 256
"""The thread blocks that work is divided for, the same on all GPUs: two on each of 128 multiprocessors."""
_LEAST_PIECES, _FIRST_PIECES = 8, 2
"""The fewest pieces of a part of a sum, and those in whose time it fills its ring and is written and read."""
_STAGE_BYTES = 48 * 1024
"""The shared memory of a thread block that has more than the fewest stages: half of what the smallest of these GPUs has
for each multiprocessor. With the fewest, wide tiles of 64 rows with mins take more."""
_STAGES = (2, 4)
"""The fewest and the most pieces that the ring holds."""


class Sizes(NamedTuple):
    """How a call is divided."""

    rows: int
    """The rows of x of a tile."""
    outputs: int
    """The outputs of a tile, 64 or 128."""
    parts: int
    """The number of parts into which a sum's inputs are divided; each part is summed separately, then they are added in
    order."""
    is_whole: bool
    """True if a tile computes all parts of its sums. Otherwise it computes one, and XLA adds them up."""
    stages: int
    """The number of pieces that the ring holds."""


def choose_sizes(num_rows: int, num_outputs: int, num_inputs: int, form: WeightFormat) -> Sizes:
    """Return sizes that keep the multiprocessors busy.

    The number of parts of a sum depends on the weight alone, so a row's bits do not depend on other rows. Rows and
    outputs of tiles change no bits.
    """
    rows = next((x for x in _ROW_TILES if num_rows <= x), _ROW_TILES[-1])
    row_tiles, tiles = -(-num_rows // rows), num_outputs // OPERAND_ROWS
    num_pieces = -(-num_inputs // piece(form))
    choices = range(1, max(1, num_pieces // _LEAST_PIECES) + 1)
    parts = min(choices, key=lambda parts: -(-tiles * parts // _BLOCKS) * (-(-num_pieces // parts) + _FIRST_PIECES))
    parts = -(-num_pieces // -(-num_pieces // parts))  # none is empty
    is_whole = parts == 1 or tiles * row_tiles >= _BLOCKS
    blocks = tiles * row_tiles * (1 if is_whole else parts)
    is_wide = num_outputs % (2 * OPERAND_ROWS) == 0 and blocks >= 2 * _BLOCKS
    outputs = (2 if is_wide else 1) * OPERAND_ROWS
    least, most = _STAGES
    stage = outputs * DEPTH * WORD_BYTES + rows * depth_of_rows(form) * 2
    return Sizes(rows, outputs, parts, is_whole, min(most, max(least, _STAGE_BYTES // stage)))


def words_side_by_side(form: WeightFormat) -> int:
    """Return the words of a row that a thread has side by side.

    An operand has all words of a piece's half if its halves are two groups, so that sums of a group can be scaled.
    Otherwise a thread has a fourth of a piece, in one group.
    """
    return 2 if form.group is not None and piece(form) == 2 * form.group else TILES


def refusal(shape: LinearShape) -> str | None:
    """Return why the kernel cannot run a matmul, or None if it can."""
    reason, form = packed_refusal(shape), shape.format
    if reason is not None or form is None:
        return reason
    if shape.num_inputs < piece(form):
        return f"inputs must be {piece(form)} at least, not {shape.num_inputs}"
    widening, depth = Widening(form), piece(form)
    if "scales" in widening.number_parts and form.scale_dtype == "float32" and depth == TILES * (form.group or depth):
        return f"there is no widening with float32 scales of groups of {form.group}"
    if form.factor_group is not None and form.factor_group < depth:
        return f"factors must be those of {depth} numbers at least, not {form.factor_group}"
    return None
