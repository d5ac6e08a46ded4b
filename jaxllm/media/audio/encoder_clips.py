"""Make a prompt's sound into the clip that the encoder of an encoder-decoder takes."""

from __future__ import annotations

import hashlib
from typing import Any

from jaxllm.core_messages import Clip
from jaxllm.media.audio.blocks import AudioLimits
from jaxllm.media.audio.decode import decode_audio
from jaxllm.media.audio.log_mel import HOP, RATE, log_mel
from jaxllm.media.errors import MediaError
from jaxllm.media.items import ClipInput, field_of


def read_clip(source: Any, takes: ClipInput, label: str) -> Clip:
    """Return the clip of a sound in a form that `decode_audio` takes; silence fills it up to the encoder's length.

    Raises MediaError, which names `label`, for what cannot be read and for what is longer.
    """
    num_samples = 2 * takes.num_frames * HOP
    try:
        samples = decode_audio(source, RATE, AudioLimits(max_seconds=num_samples / RATE))
        if len(samples) < HOP:
            raise MediaError(f"the audio has less than {HOP / RATE:g} s: send a longer one.")
    except MediaError as error:
        raise MediaError(f"{label}: {error}", parameter=field_of(label)) from None
    # Resampling may round the number of samples up.
    samples = samples[:num_samples]
    mels = log_mel(samples, takes.num_mels, num_samples).tobytes()
    num_heard = max(1, -(-len(samples) // HOP) // 2)
    return Clip(key=hashlib.sha256(mels).digest(), mels=mels, num_frames=takes.num_frames, num_heard=num_heard)
