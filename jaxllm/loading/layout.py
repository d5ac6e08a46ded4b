"""Write one HF tensor into our layout and dtype, in place. A layout reads like "(n h) d -> d n h"."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

TILE_ROWS, TILE_COLUMNS = 256, 1024
"""The size of a tile that is transposed at once; it measured best among 32 to 512 rows."""

Index = tuple[slice | np.ndarray, ...]
"""The selected part of each axis: a range, or an array of positions."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The axis letters of the HF tensor, with groups flattened, and those of ours."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]

    @property
    def rotation(self) -> int | None:
        """The number of letters by which `theirs` is rotated to give `ours`; None if it is no rotation."""
        count = len(self.theirs)
        turns = (turn for turn in range(max(count, 1)) if self.theirs[turn:] + self.theirs[:turn] == self.ours)
        return next(turns, None)


def parse_layout(text: str) -> Layout:
    """Parse "(n h) d -> d n h". Raises ValueError unless both sides have the same letters, besides `1` on the left."""
    theirs, arrow, ours = text.partition("->")
    letters_of_theirs = (letter for letter in re.sub(r"[()]", " ", theirs).split() if letter != "1")
    layout = Layout(tuple(letters_of_theirs), tuple(ours.split()))
    letters = set(layout.ours)
    if not arrow or letters != set(layout.theirs) or not len(letters) == len(layout.ours) == len(layout.theirs):
        raise ValueError(f"the layout {text!r} does not take the axes of one tensor to another order")
    return layout


def write_tensor(
    tensor: np.ndarray, layout: Layout, sizes: tuple[int, ...], out: np.ndarray, index: Index = ()
) -> None:
    """Write `tensor` into `out`, C-contiguous, in our order and out's dtype; `sizes` are the full sizes of our axes.

    With `index`, one entry per axis of ours, `out` holds only that part.
    """
    by_letter: Mapping[str, int] = dict(zip(layout.ours, sizes, strict=True))
    split = tensor.reshape([by_letter[letter] for letter in layout.theirs])
    if index:
        parts = dict(zip(layout.ours, index, strict=True))
        # One axis after the other: numpy would pair the positions of several axes.
        for axis, letter in enumerate(layout.theirs):
            split = split[(*[slice(None)] * axis, parts[letter])]
    turn = layout.rotation
    if turn is None:
        order = [layout.theirs.index(letter) for letter in layout.ours]
        np.copyto(out, split.transpose(order), casting="unsafe")
    elif turn == 0:
        np.copyto(out, split, casting="unsafe")
    else:
        rows, columns = math.prod(split.shape[:turn]), math.prod(split.shape[turn:])
        _write_transposed(split.reshape(rows, columns), out.reshape(columns, rows))


def _write_transposed(source: np.ndarray, out: np.ndarray) -> None:
    """Write source [r, c] into out [c, r] in tiles: a transpose in one go misses the cache at every number."""
    rows, columns = source.shape
    for row in range(0, rows, TILE_ROWS):
        for column in range(0, columns, TILE_COLUMNS):
            tile = source[row : row + TILE_ROWS, column : column + TILE_COLUMNS]
            # Casting the contiguous tile first makes it fast.
            out[column : column + TILE_COLUMNS, row : row + TILE_ROWS] = tile.astype(out.dtype, copy=False).T
