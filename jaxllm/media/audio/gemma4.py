"""Make samples of a sound into the features that Gemma 4's audio tower takes, as HF's Gemma4AudioFeatureExtractor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.audio.blocks import AudioLimits
from jaxllm.media.audio.log_mel import HOP, RATE
from jaxllm.media.processors import ProcessedImage
from jaxllm.media.shapes import ItemShape

KIND = "Gemma4AudioFeatureExtractor"
_FIXED: Mapping[str, Any] = {
    "sampling_rate": RATE,
    "frame_length_ms": 20.0,
    "frame_length": 320,
    "hop_length_ms": 10.0,
    "hop_length": HOP,
    "fft_overdrive": False,
    "fft_length": 512,
    "min_frequency": 0.0,
    "max_frequency": 8000.0,
    "preemphasis": 0.0,
    "dither": 0.0,
    "input_scale_factor": 1.0,
    "mel_floor": 0.001,
    "padding_value": 0.0,
    "per_bin_mean": None,
    "per_bin_stddev": None,
}
"""The settings of HF's feature extractor that have one value here."""
_WINDOW, _SPECTRUM, _FLOOR = 320, 512, 1e-3
_SECONDS = 30
"""The length of the longest sound. HF cuts off what is longer; here it is refused."""
_COLUMNS = 4
"""The columns of features that are one patch."""
_BLOCK = 128
"""The columns that are made at once: they stay in a core's cache."""


class Gemma4AudioProcessor:
    """The feature extractor of one checkpoint. It keeps no state between calls, so that threads may share it."""

    rate = RATE
    """The samples a second that it takes."""
    most_samples = _SECONDS * RATE
    """The samples of the longest sound."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Make the feature extractor that `settings`, a preprocessor_config.json, describes.

        Raises VLLMValidationError for settings that are not Gemma 4's.
        """
        for name, value in _FIXED.items():
            if settings.get(name, value) != value:
                message = f"the checkpoint's {KIND} has {name} {settings[name]}, and only {value} is supported."
                raise VLLMValidationError(message, parameter="model", value=name)
        self._num_mels: int = settings.get("feature_size", 128)
        self.limits = AudioLimits(max_seconds=_SECONDS)

    @property
    def work_bytes(self) -> int:
        """Return about how many bytes it takes to decode and process a sound, at most."""
        return 4 * (3 * self.most_samples + 2 * self._num_mels * self.most_samples // HOP)

    def shape(self, num_samples: int) -> ItemShape:
        """Return the shape of a sound with a number of samples: one clip, with a patch for each row of the tower."""
        num_columns = max(0, num_samples - 1) // HOP
        return ItemShape("audio", ((1, 1, math.ceil(num_columns / _COLUMNS)),), (1, num_samples))

    def process(self, samples: np.ndarray) -> ProcessedImage:
        """Return the features of a sound's samples, float32 [n], four rows [num_mels] for each patch.

        Zeros follow the sound's columns up to whole patches.
        """
        shape = self.shape(len(samples))
        columns_tm = np.zeros((_COLUMNS * shape.num_patches, self._num_mels), np.float32)
        features_tm = log_mel(samples, self._num_mels)
        columns_tm[: len(features_tm)] = features_tm
        return ProcessedImage.of(columns_tm, shape)


def log_mel(samples: np.ndarray, num_mels: int) -> np.ndarray:
    """Return the features of a sound, float32 [columns, num_mels]: the logarithm of its loudness in mel bands.

    `samples` are float32 [n], 16,000 a second. Column i is of the 320 samples around the sample 160 * i, before the
    first one zeros, and there is one if they and the next sample are all of the sound.
    """
    num_columns = max(0, len(samples) - 1) // HOP
    padded = np.pad(samples, (_WINDOW // 2, 0))
    frames_tw = sliding_window_view(padded, _WINDOW)[::HOP][:num_columns]
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_WINDOW) / _WINDOW)).astype(np.float32)
    features_tm = np.empty((num_columns, num_mels), np.float32)
    for start in range(0, num_columns, _BLOCK):
        spectrum_tf = np.abs(np.fft.rfft(frames_tw[start : start + _BLOCK] * window, n=_SPECTRUM))
        features_tm[start : start + _BLOCK] = np.log(spectrum_tf @ _mel_filters(num_mels) + _FLOOR)
    return features_tm


@lru_cache(maxsize=8)
def _mel_filters(num_mels: int) -> np.ndarray:
    """Return the weights of frequencies in each mel band [f, m]: triangles of height 1, as in HTK.

    The lowest bands are so narrow that some have no frequency, as in HF.
    """
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + RATE / 2 / 700), num_mels + 2) / 2595) - 1)
    away_fe = edges - np.linspace(0, RATE / 2, _SPECTRUM // 2 + 1)[:, None]
    widths = np.diff(edges)
    return np.maximum(0, np.minimum(-away_fe[:, :-2] / widths[:-1], away_fe[:, 2:] / widths[1:]))
