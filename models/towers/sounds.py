"""The clips of the sounds that a tower hears, and their rows."""

from __future__ import annotations

from collections.abc import Sequence

from .settings import FRAME_SAMPLES, Grid, SoundSettings


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
        check_clip(settings, grid, num_samples)
    return sum(map(settings.count_rows, clips))


def check_clip(settings: SoundSettings, grid: Grid, num_samples: int) -> None:
    """Raise ValueError unless a clip has the frames that its rows depend on: the convolutions look at one more."""
    if settings.hears_silence:
        least = settings.num_frames
    else:
        least = min(settings.num_frames, settings.count_heard(num_samples) + 1)
    if (grid.t, grid.h) != (1, 1) or not least <= grid.w <= settings.num_frames:
        raise ValueError(f"a clip of {num_samples} samples has {least} to {settings.num_frames} frames, not {grid}")
