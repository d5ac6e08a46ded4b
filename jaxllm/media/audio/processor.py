"""Make samples of a sound into the features that a model's audio tower takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.audio.blocks import AudioLimits
from jaxllm.media.audio.log_mel import HOP, RATE, log_mel
from jaxllm.media.processors import ProcessedImage
from jaxllm.media.rules import FRAME_SAMPLES, Clips
from jaxllm.media.shapes import ItemShape

_KIND = "WhisperFeatureExtractor"
_FIXED = {"sampling_rate": RATE, "hop_length": HOP, "n_fft": 400, "padding_value": 0.0, "dither": 0.0}
"""The settings of HF's feature extractor that have one value here."""


class AudioProcessor:
    """The feature extractor of one checkpoint. It keeps no state between calls, so that threads may share it."""

    def __init__(self, settings: Mapping[str, Any], clips: Clips) -> None:
        """Make the feature extractor that `settings`, a preprocessor_config.json, describes.

        Raises VLLMValidationError for one that is not Whisper's.
        """
        name = settings.get("feature_extractor_type")
        wrong = next(
            (f"{key} {settings[key]}" for key, value in _FIXED.items() if settings.get(key, value) != value), ""
        )
        if name != _KIND or wrong:
            message = (
                f"the checkpoint's feature_extractor_type is {name!r}{f' with {wrong}' if wrong else ''}, and only "
            )
            raise VLLMValidationError(f"{message}Whisper's is supported.", parameter="model", value=name)
        self._num_mels: int = settings.get("feature_size", 80)
        seconds: int = settings.get("chunk_length", 30)
        self._clip, self._clips = seconds * RATE, clips
        self.rate = RATE
        """The samples a second that it takes."""
        self.limits = AudioLimits() if clips.are_several else AudioLimits(max_seconds=seconds)
        """HF cuts off what is longer than a model's only clip; here it is refused."""
        assert self.limits.max_seconds is not None
        self.most_samples = int(self.limits.max_seconds * RATE)
        """The samples of the longest sound."""

    @property
    def work_bytes(self) -> int:
        """Return about how many bytes it takes to decode and process a sound, at most."""
        num_samples = math.ceil(self.most_samples / self._clip) * self._clip
        return 4 * (3 * num_samples + 2 * self._num_mels * num_samples // HOP)

    def shape(self, num_samples: int) -> ItemShape:
        """Return the shape of a sound with a number of samples: the frames of each clip, which are two columns.

        There is one frame more than the sound reaches, unless the clip ends there, because the tower's convolutions
        look at it.
        """
        longest = self._clip // FRAME_SAMPLES
        frames, rest = divmod(num_samples, self._clip)
        widths = [longest] * frames
        if rest:
            widths.append(longest if self._clips.are_whole else min(longest, math.ceil(rest / FRAME_SAMPLES) + 1))
        return ItemShape("audio", tuple((1, 1, width) for width in widths), (1, num_samples))

    def process(self, samples: np.ndarray) -> ProcessedImage:
        """Return the features of a sound's samples, float32 [n], two rows [num_mels] for each frame.

        Silence follows the samples up to whole clips.
        """
        shape, step = self.shape(len(samples)), self._clip if self._clips.are_apart else len(samples)
        parts = (samples[start : start + step] for start in range(0, len(samples), step))
        columns = [log_mel(part, self._num_mels, -(-len(part) // self._clip) * self._clip).T for part in parts]
        return ProcessedImage.of(np.concatenate(columns)[: 2 * shape.num_patches], shape)
