"""A sound of any length, as clips that a model takes one by one."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from jaxllm.media.audio.blocks import AudioLimits
from jaxllm.media.audio.clips import split_clips
from jaxllm.media.audio.decode import decode_audio
from jaxllm.media.audio.log_mel import HOP, RATE
from jaxllm.media.errors import MediaError
from jaxllm.media.items import ClipInput

_FULL_SCALE = 1 << 15
_OVERLAP = 1 / 30
"""The part of a clip, at its end, in which it may be cut: a second of 30."""


class Sound:
    """The clips of a sound in order. Those that are not forgotten take two bytes a sample: as in OpenAI's code they
    have 16 bits, which is exact for files that have 16 too, at the model's rate.
    """

    def __init__(self, samples: np.ndarray, clip_seconds: float) -> None:
        """Cut samples, float32 [n], 16,000 a second, into clips of at most `clip_seconds`, at quiet places."""
        overlap = clip_seconds * _OVERLAP
        clips = split_clips(samples, RATE, clip_seconds=clip_seconds, overlap_seconds=overlap)
        sizes = [len(clip) / RATE for clip in clips]
        self.seconds = len(samples) / RATE
        self.starts = [0.0, *accumulate(sizes)][:-1]
        """The time at which each clip begins, in seconds."""
        self.lengths = sizes
        """The seconds of each clip."""
        self._peak = max(1.0, *(float(np.abs(clip).max()) for clip in clips))
        self._clips: list[np.ndarray | None] = [self._packed(clip) for clip in clips]

    def __len__(self) -> int:
        """Return the number of clips, at least 1."""
        return len(self._clips)

    def clip(self, index: int) -> tuple[np.ndarray, int]:
        """Return a clip's samples, float32 [n], and their number a second."""
        packed = self._clips[index]
        assert packed is not None
        return packed.astype(np.float32) * np.float32(self._peak / _FULL_SCALE), RATE

    def forget(self, index: int) -> None:
        """Forget a clip's samples."""
        self._clips[index] = None

    def _packed(self, clip: np.ndarray) -> np.ndarray:
        scaled = np.rint(clip * np.float32(_FULL_SCALE / self._peak))
        return np.clip(scaled, -_FULL_SCALE, _FULL_SCALE - 1).astype(np.int16)


def read_sound(data: bytes, takes: ClipInput, limits: AudioLimits) -> Sound:
    """Decode the bytes of a file to a sound in clips that an encoder takes.

    Raises MediaError, which names "file", for what cannot be read, has less than 10 ms or exceeds a limit; and
    VLLMValidationError if a library for its format is missing.
    """
    try:
        samples = decode_audio(data, RATE, limits)
        if len(samples) < HOP:
            raise MediaError(f"the audio has less than {HOP / RATE:g} s: send a longer one.")
    except MediaError as error:
        raise MediaError(f"file: {error}", parameter="file") from None
    return Sound(samples, 2 * takes.num_frames * HOP / RATE)
