"""The final rows of images in tiles, of images beside others and of videos.

An image in tiles has lines across all tiles, without the tiles' padding. An image beside others is not split, and a
video's frames have half as many lines and columns.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .settings import Tiling

NEWLINE = -1
"""The place of the learned row that follows each line."""


class Arrangement(NamedTuple):
    """Final rows as sums of the tower's rows, [q, 4] each: four terms in towers that shrink lines."""

    places_qk: np.ndarray
    """The rows of the item, in the order of its tiles, or NEWLINE; int32."""
    weights_qk: np.ndarray
    """The factors on these rows, float32."""


_FIRST = np.array([1, 0, 0, 0], np.float32)
"""The factors of a row that is one place alone."""
_LAST = Arrangement(np.full((1, 4), NEWLINE), _FIRST[None])
"""The learned row."""


def arrange(tiling: Tiling, side: int, size: tuple[int, int]) -> Arrangement:
    """Return the rows of an image of a (height, width) in pixels, whose tiles are `side` rows high and wide.

    First come the rows of the whole image, then the lines of its tiles.
    """
    lines, columns = tiling.layout(size)
    tiles_yx = np.arange(lines * columns * side**2).reshape(lines, columns, side, side) + side**2
    grid_hw = tiles_yx.swapaxes(1, 2).reshape(lines * side, columns * side)
    top, left = _padding(size, grid_hw.shape)
    grid_hw = grid_hw[top : len(grid_hw) - top, left : grid_hw.shape[1] - left]
    height, width = grid_hw.shape
    ratio = math.sqrt(height * width / (tiling.most * side**2)) if tiling.most else 1.0
    if ratio > 1.1:
        height, width = int(height // ratio), int(width // ratio)
    places, weights = _shrink(grid_hw, height, width)
    places = np.concatenate((places, np.full((height, 1, 4), NEWLINE)), axis=1).reshape(-1, 4)
    weights = np.concatenate((weights, np.broadcast_to(_FIRST, (height, 1, 4))), axis=1).reshape(-1, 4)
    return _joined(_unchanged(side**2), Arrangement(places, weights))


def arrange_whole(side: int) -> Arrangement:
    """Return the rows of an image beside others, `side` rows high and wide, and the learned row behind them."""
    return _joined(_unchanged(side**2), _LAST)


def arrange_frames(side: int, num_frames: int) -> Arrangement:
    """Return the rows of a video whose frames are `side` rows high and wide, and the learned row behind them."""
    half = math.ceil(side / 2)
    places, weights = _shrink(np.arange(side**2).reshape(side, side), half, half)
    starts = side**2 * np.arange(num_frames)[:, None, None]
    all_places = (starts + places.reshape(1, -1, 4)).reshape(-1, 4)
    return _joined(Arrangement(all_places, np.tile(weights.reshape(-1, 4), (num_frames, 1))), _LAST)


def _unchanged(num_rows: int) -> Arrangement:
    """Return the first rows as they are."""
    return Arrangement(np.arange(num_rows)[:, None].repeat(4, axis=1), np.broadcast_to(_FIRST, (num_rows, 4)))


def _joined(first: Arrangement, second: Arrangement) -> Arrangement:
    places, weights = (np.concatenate(pair) for pair in zip(first, second, strict=True))
    return Arrangement(places.astype(np.int32), weights.astype(np.float32))


def _shrink(grid_hw: np.ndarray, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a grid of rows at a smaller height and width: places and factors, [height, width, 4] each."""
    rows_h2, row_weights = _taps(len(grid_hw), height)
    columns_w2, column_weights = _taps(grid_hw.shape[1], width)
    places = grid_hw[rows_h2[:, None, :, None], columns_w2[None, :, None, :]].reshape(height, width, 4)
    weights = (row_weights[:, None, :, None] * column_weights[None, :, None, :]).reshape(height, width, 4)
    return places, weights


def _padding(size: tuple[int, int], grid: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows of padding above the image and to its left, which are as many below and to its right."""
    (height, width), (rows, columns) = size, grid
    if width / height > columns / rows:
        return (rows - int(round(height * (columns / width), 7))) // 2, 0
    return 0, (columns - int(round(width * (rows / height), 7))) // 2


def _taps(size: int, shrunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the two places around each of `shrunk` places along an axis of `size`, and their factors, [shrunk, 2].

    Places are the middles of equal parts of the axis. Computed in float32, as in HF.
    """
    scale = np.float32(size / shrunk)
    exact_n = np.maximum((np.arange(shrunk, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5), 0)
    below_n = np.floor(exact_n)
    above_n = exact_n - below_n
    places_n2 = np.minimum(np.stack((below_n, below_n + 1), axis=1), size - 1).astype(np.int64)
    return places_n2, np.stack((1 - above_n, above_n), axis=1)
