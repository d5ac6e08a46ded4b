"""The clips of the sounds that a tower hears, and their rows."""

from __future__ import annotations

from collections.abc import Sequence

from .settings import COLUMN_SAMPLES, Grid, SoundSettings


def split_samples(settings: SoundSettings, num_samples: int) -> list[int]:
    """Return the numbers of samples of a sound's clips, which are whole but for the last."""
    if settings.chunks is not None:  # what gives no column needs no clip
        num_samples -= num_samples % COLUMN_SAMPLES
    longest = settings.clip_samples
    return [min(longest, num_samples - start) for start in range(0, num_samples, longest)]


def count_clip_rows(settings: SoundSettings, grids: Sequence[Grid], size: tuple[int, int]) -> int:
    """Return the number of rows of a sound, whose `size` is 1 and its samples; ValueError for grids of other clips.

    The grid of a clip has the frames that its rows depend on, and more up to those of the whole clip.
    """
    clips = split_samples(settings, size[1])
    if len(clips) != len(grids):
        raise ValueError(f"{size[1]} samples have {len(clips)} clips, not {len(grids)}")
    for grid, num_samples in zip(grids, clips, strict=True):
        check_clip(settings, grid, num_samples)
    return sum(map(settings.count_rows, clips))


def check_clip(settings: SoundSettings, grid: Grid, num_samples: int) -> None:
    """Raise ValueError unless a clip has the frames that its rows depend on.

    Of the silence after the sound the convolutions look at one more.
    """
    if settings.hears_silence:
        least = settings.num_frames
    else:
        least = min(settings.num_frames, settings.count_heard(num_samples) + (not settings.ends_in_zeros))
    if (grid.t, grid.h) != (1, 1) or not least <= grid.w <= settings.num_frames:
        raise ValueError(f"a clip of {num_samples} samples has {least} to {settings.num_frames} frames, not {grid}")
