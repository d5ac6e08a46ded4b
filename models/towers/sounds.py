"""The clips of sounds that a tower hears, one at a time, as its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .settings import FRAME_SAMPLES, Grid, SoundSettings

if TYPE_CHECKING:
    from .layout import PatchBatch


def split_samples(num_samples: int, num_frames: int) -> list[int]:
    """Return the numbers of samples of a sound's clips, each of `num_frames` but for the last."""
    longest = num_frames * FRAME_SAMPLES
    return [min(longest, num_samples - start) for start in range(0, num_samples, longest)]


def count_clip_rows(settings: SoundSettings, grids: Sequence[Grid], size: tuple[int, int]) -> int:
    """Return the number of rows of a sound, whose `size` is 1 and its samples; ValueError for grids of other clips.

    The grid of a clip has the frames that its rows depend on, and more up to those of the whole clip.
    """
    clips = split_samples(size[1], settings.num_frames)
    if len(clips) != len(grids):
        raise ValueError(f"{size[1]} samples have {len(clips)} clips, not {len(grids)}")
    for grid, num_samples in zip(grids, clips, strict=True):
        _check(settings, grid, num_samples)
    return sum(map(settings.count_rows, clips))


def write_clip(settings: SoundSettings, batch: PatchBatch, frames_nc: np.ndarray, size: tuple[int, int]) -> PatchBatch:
    """Return a batch of padding with the frames of a clip in it; ValueError if these are too few or too many."""
    number, num_rows = len(frames_nc), settings.count_rows(size[1])
    _check(settings, Grid(1, 1, number), size[1])
    heard = number if settings.hears_silence else settings.count_heard(size[1])
    batch.patches_pc[:number] = frames_nc
    batch.coordinates_p2[:number, 1] = np.arange(number)
    if batch.places_pk.shape[1]:
        batch.places_pk[:number, 0], batch.weights_pk[:number] = np.arange(number), 1
    # What follows is of use to the convolutions alone.
    assert isinstance(batch.ends_ap, np.ndarray)
    batch.ends_ap[:, :heard] = heard
    batch.rows_rg[:num_rows] = np.arange(num_rows * settings.group).reshape(num_rows, -1)
    return batch._replace(num_slots=np.int32(number), num_rows=np.int32(num_rows))


def _check(settings: SoundSettings, grid: Grid, num_samples: int) -> None:
    """Raise ValueError unless a clip has the frames that its rows depend on: the convolutions look at one more."""
    if settings.hears_silence:
        least = settings.num_frames
    else:
        least = min(settings.num_frames, settings.count_heard(num_samples) + 1)
    if (grid.t, grid.h) != (1, 1) or not least <= grid.w <= settings.num_frames:
        raise ValueError(f"a clip of {num_samples} samples has {least} to {settings.num_frames} frames, not {grid}")
