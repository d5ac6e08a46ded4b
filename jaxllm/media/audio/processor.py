"""Make samples of a sound into the features that a model's audio tower takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.audio.blocks import AudioLimits
from jaxllm.media.audio.log_mel import HOP, RATE, log_mel
from jaxllm.media.processors import ProcessedImage
from jaxllm.media.shapes import ItemShape

_KIND = "WhisperFeatureExtractor"
_FIXED = {"sampling_rate": RATE, "hop_length": HOP, "n_fft": 400, "padding_value": 0.0, "dither": 0.0}
"""The settings of HF's feature extractor that have one value here."""


class AudioProcessor:
    """The feature extractor of one checkpoint. It keeps no state between calls, so that threads may share it."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
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
        self._num_samples = seconds * RATE
        self.rate = RATE
        """The samples a second that it takes."""
        self.limits = AudioLimits(max_seconds=seconds)
        """HF cuts off what is longer; here it is refused."""

    @property
    def work_bytes(self) -> int:
        """Return about how many bytes it takes to decode and process a sound, at most."""
        return 4 * (3 * self._num_samples + 2 * self._num_mels * self._num_samples // HOP)

    def shape(self, num_samples: int) -> ItemShape:
        """Return the shape of a sound with a number of samples: silence follows them up to the longest sound."""
        return ItemShape("audio", ((1, 1, self._num_samples // HOP),), (1, num_samples))

    def process(self, samples: np.ndarray) -> ProcessedImage:
        """Return the features of a sound's samples, float32 [n], a row [num_mels] for each column."""
        features_mt = log_mel(samples, self._num_mels, self._num_samples)
        return ProcessedImage.of(features_mt.T, self.shape(len(samples)))
