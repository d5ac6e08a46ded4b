"""Cut a long sound into clips at quiet places."""

from __future__ import annotations

import numpy as np

_WINDOW = 1600
"""The samples whose loudness is compared, as in vLLM: a tenth of a second."""
_CLIP_SECONDS, _OVERLAP_SECONDS = 30, 1
"""The longest clip, and the part of it, at its end, in which it may be cut: as in vLLM."""


def split_clips(
    samples: np.ndarray, rate: int, *, clip_seconds: float = _CLIP_SECONDS, overlap_seconds: float = _OVERLAP_SECONDS
) -> list[np.ndarray]:
    """Return views of a sound, float32 [n], that are all of it in order, each at most `clip_seconds` long.

    A clip that is not the last ends in its last `overlap_seconds`, where the quietest window there begins.
    """
    longest, overlap = int(clip_seconds * rate), int(overlap_seconds * rate)
    clips = []
    while len(samples) > longest:
        end = longest - overlap + _quietest(samples[longest - overlap : longest])
        clips.append(samples[:end])
        samples = samples[end:]
    return [*clips, samples]


def _quietest(samples: np.ndarray) -> int:
    """Return where the quietest whole window begins; 0 if there is none. The last one does not count, as in vLLM."""
    num_windows = (len(samples) - 1) // _WINDOW
    if num_windows <= 0:
        return 0
    windows_nw = samples[: num_windows * _WINDOW].reshape(num_windows, _WINDOW).astype(np.float64)
    return int(np.argmin(np.square(windows_nw).sum(axis=1))) * _WINDOW
