"""What is known of an image, a video or a sound without its numbers: which patches it has and how they lie."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Grid = tuple[int, int, int]
"""Numbers of patches in time, in height and in width."""
Modality = Literal["image", "video", "audio"]


@dataclass(frozen=True, slots=True)
class ItemShape:
    """The shape of one processed image, video or sound. A sound's patches are the columns of its features."""

    modality: Modality
    grids: tuple[Grid, ...]
    """The patches of each tile, in the order of the patches: most models have a single tile, the whole item."""
    size: tuple[int, int]
    """Height and width of the original in pixels; of a sound, 1 and the number of its samples."""
    layout: tuple[int, int] = (0, 0)
    """Rows and columns that the tiles form, (0, 0) for an image that is not split. The tile that shows the whole image
    is not counted."""
    timestamps: tuple[float, ...] = ()
    """For a video: the second at which each step in time of its grid begins."""
    seconds_per_step: float = 1.0
    """For a video: the seconds between two steps in time of its grid."""
    duration: float = 0.0
    """For a video: its length in seconds."""
    num_rows: int | None = None
    """The number of rows of an item that comes encoded, if nothing else is known; else None."""

    @property
    def num_patches(self) -> int:
        """Return the number of patches of all tiles together."""
        return sum(math.prod(grid) for grid in self.grids)
