"""Make samples of a sound into the features that a model's audio tower takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.audio.blocks import AudioLimits
from jaxllm.media.audio.gemma4 import KIND as GEMMA4
from jaxllm.media.audio.gemma4 import Gemma4AudioProcessor
from jaxllm.media.audio.log_mel import HOP, RATE, log_mel
from jaxllm.media.processors import ProcessedImage
from jaxllm.media.rules import FRAME_SAMPLES, Clips
from jaxllm.media.shapes import ItemShape

_NUM_MELS = {"WhisperFeatureExtractor": 80, "Qwen3ASRFeatureExtractor": 128}
"""The bands of the feature extractors that make Whisper's features, where their settings do not say."""
_FIXED = {"sampling_rate": RATE, "hop_length": HOP, "n_fft": 400, "padding_value": 0.0, "dither": 0.0}
"""The settings of HF's feature extractor that have one value here."""


type AudioProcessor = WhisperProcessor | Gemma4AudioProcessor


def make_audio_processor(settings: Mapping[str, Any], clips: Clips) -> AudioProcessor:
    """Return the feature extractor that `settings`, a preprocessor_config.json, describes.

    `clips` are those of the model's rule. Raises VLLMValidationError for one that is not supported.
    """
    is_gemma4 = settings.get("feature_extractor_type") == GEMMA4
    return Gemma4AudioProcessor(settings) if is_gemma4 else WhisperProcessor(settings, clips)


class WhisperProcessor:
    """Whisper's feature extractor, of one checkpoint. It keeps no state between calls, so that threads may share it."""

    def __init__(self, settings: Mapping[str, Any], clips: Clips) -> None:
        """Make the feature extractor that `settings`, a preprocessor_config.json, describes.

        Raises VLLMValidationError for one that is not Whisper's.
        """
        name = settings.get("feature_extractor_type")
        wrong = next(
            (f"{key} {settings[key]}" for key, value in _FIXED.items() if settings.get(key, value) != value), ""
        )
        if name not in _NUM_MELS or wrong:
            message = (
                f"the checkpoint's feature_extractor_type is {name!r}{f' with {wrong}' if wrong else ''}, and only "
            )
            raise VLLMValidationError(f"{message}Whisper's and Gemma 4's are supported.", parameter="model", value=name)
        self._num_mels: int = settings.get("feature_size", _NUM_MELS[name])
        seconds: int = settings.get("chunk_length", 30)
        self._clip, self._clips = clips.columns * HOP or seconds * RATE, clips
        self._least: int = settings.get("min_length", clips.least_samples)
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
        look at it. A clip that ends in zeros has no such frame.
        """
        num_samples = max(num_samples, self._least)
        if self._clips.end_in_zeros:
            clips = self._clip_columns(self._count_columns(num_samples))
            widths = [sum(-(-columns // self._step) for columns in blocks) for blocks in clips]
        else:
            longest = self._clip // FRAME_SAMPLES
            frames, rest = divmod(num_samples, self._clip)
            widths = [longest] * frames
            if rest:
                is_whole = self._clips.are_whole
                widths.append(longest if is_whole else min(longest, math.ceil(rest / FRAME_SAMPLES) + 1))
        return ItemShape("audio", tuple((1, 1, width) for width in widths), (1, num_samples))

    def process(self, samples: np.ndarray) -> ProcessedImage:
        """Return the features of a sound's samples, float32 [n], the columns [num_mels] of each frame in turn.

        Silence follows the samples up to whole clips, or zeros the columns up to whole frames.
        """
        shape, step = self.shape(len(samples)), self._clip if self._clips.are_apart else len(samples)
        if self._clips.end_in_zeros:
            return ProcessedImage.of(self._frames(samples), shape)
        parts = (samples[start : start + step] for start in range(0, len(samples), step))
        columns = [log_mel(part, self._num_mels, -(-len(part) // self._clip) * self._clip).T for part in parts]
        return ProcessedImage.of(np.concatenate(columns)[: 2 * shape.num_patches], shape)

    @property
    def _step(self) -> int:
        """Return the columns of a frame."""
        return 8 if self._clips.chunk else 2

    def _count_columns(self, num_samples: int) -> int:
        """Return the columns of a sound that ends in zeros."""
        return num_samples // HOP if self._clips.chunk else -(-num_samples // HOP)

    def _clip_columns(self, num_columns: int) -> list[list[int]]:
        """Return the columns of each part of each clip: what becomes whole frames."""
        longest = self._clip // HOP
        clips = (min(longest, num_columns - start) for start in range(0, num_columns, longest))
        part = self._clips.chunk or longest
        return [[min(part, clip - start) for start in range(0, clip, part)] for clip in clips]

    def _frames(self, samples: np.ndarray) -> np.ndarray:
        """Return the frames of a sound that ends in zeros, [frames, columns * num_mels]."""
        samples = np.pad(samples, (0, max(0, self._least - len(samples))))
        num_columns = self._count_columns(len(samples))
        columns_tm = log_mel(samples, self._num_mels, max(len(samples), num_columns * HOP)).T
        frames, start = [], 0
        for number in (number for clip in self._clip_columns(num_columns) for number in clip):
            part_tm = np.pad(columns_tm[start : start + number], ((0, -number % self._step), (0, 0)))
            frames.append(part_tm.reshape(-1, self._step * self._num_mels))
            start += number
        return np.concatenate(frames)
