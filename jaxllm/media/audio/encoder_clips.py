"""Make a prompt's sound into what the encoder of an encoder-decoder takes."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from jaxllm.core_messages import Clip
from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.audio.log_mel import HOP, RATE, log_mel
from jaxllm.media.items import ClipInput, refusal
from jaxllm.params.checks import shown


def read_clip(source: Any, takes: ClipInput, label: str) -> Clip:
    """Return the clip of an (array, rate): float samples [n] or [n, channels] between -1 and 1.

    Silence fills it up to the length that the encoder takes. Raises VLLMValidationError, which names `label`, for
    anything else and for what is longer.
    """
    if not (isinstance(source, tuple | list) and len(source) == 2):
        raise refusal(label, f"must be a tuple (samples, rate), got {type(source).__name__}", type(source).__name__)
    samples, rate = _mono(source[0], label), source[1]
    if rate != RATE:
        raise refusal(label, f"has a rate of {shown(rate)}; resample it to {RATE}", rate)
    most = 2 * takes.num_frames * HOP
    if not HOP <= len(samples) <= most:
        message = f"has {len(samples)} samples; the encoder takes {HOP} to {most}, {most / RATE:g} seconds"
        raise refusal(label, message, len(samples))
    mels = log_mel(samples, takes.num_mels, most)
    return Clip(key=hashlib.sha256(mels.tobytes()).digest(), mels=mels.tobytes(), num_frames=takes.num_frames)


def _mono(samples: Any, label: str) -> np.ndarray:
    """Return samples as float32 [n], the mean of their channels."""
    try:
        array = np.asarray(samples, np.float32)
    except (TypeError, ValueError) as error:
        raise refusal(label, f"has samples of type {type(samples).__name__}, not numbers", None) from error
    if array.ndim == 2:
        array = array.mean(axis=1)
    if array.ndim != 1 or not np.isfinite(array).all():
        raise VLLMValidationError(
            f"{label}: samples are an array [n] or [n, channels] of finite numbers, got the shape {array.shape}.",
            parameter="multi_modal_data",
        )
    return array
