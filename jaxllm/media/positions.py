"""The three positions of each token of models with M-RoPE: in time, in height and in width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxllm.media.expand import Span
from jaxllm.media.shapes import Grid, ItemShape


@dataclass(frozen=True, slots=True)
class RopePositions:
    """The positions of a prompt's tokens, and what to add to the number of a later token to get its position."""

    positions: np.ndarray
    """int64 [3, n]: time, height, width."""
    delta: int
    """Token number i after the prompt has the position i + delta, in all three."""


def rope_positions(
    num_tokens: int,
    spans: Sequence[Span],
    shapes: Sequence[ItemShape],
    *,
    merge_size: int,
    steps_per_second: float | None = None,
) -> RopePositions:
    """Return the positions of a prompt of `num_tokens` tokens with images and videos at `spans`.

    Text counts on by one in all three. The rows of an item lie in its grid, the three positions of a row counted from
    the token before; the text after it goes on behind the longer of its height and width. `merge_size` squared patches
    make a row. `steps_per_second`, the config's `tokens_per_second`, spaces the steps in time of a video (Qwen2.5-VL);
    without it they are one apart. A video in several spans (Qwen3-VL, GLM-4.5V) has one step in time in each.
    """
    positions = np.empty((3, num_tokens), np.int64)
    end, following = 0, 0
    for span in spans:
        following = _fill_text(positions, end, span.offset, following)
        shape = shapes[span.item]
        grid = _rows(shape.grids[0], merge_size, span.num_rows)
        interval = 1.0
        if steps_per_second is not None and shape.modality == "video":
            interval = steps_per_second * shape.seconds_per_step
        end = span.offset + span.num_rows
        positions[:, span.offset : end] = following + _grid_positions(grid, interval)
        following += max(grid[1:])
    _fill_text(positions, end, num_tokens, following)
    return RopePositions(positions, int(positions.max(initial=-1)) + 1 - num_tokens)


def _fill_text(positions: np.ndarray, start: int, end: int, following: int) -> int:
    """Write the positions of text from `start` to `end`, which begin at `following`; return the next one."""
    positions[:, start:end] = np.arange(following, following + end - start)
    return following + end - start


def _rows(grid: Grid, merge_size: int, num_rows: int) -> Grid:
    """Return a grid of rows of the model for a grid of patches, with only the steps in time that `num_rows` fill."""
    height, width = grid[1] // merge_size, grid[2] // merge_size
    return num_rows // (height * width), height, width


def _grid_positions(grid: Grid, interval: float) -> np.ndarray:
    """Return the positions within a grid, int64 [3, rows], its steps in time `interval` apart and rounded down."""
    positions = np.indices(grid, np.int64).reshape(3, -1)
    positions[0] = positions[0].astype(np.float32) * np.float32(interval)
    return positions
