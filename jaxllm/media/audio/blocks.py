"""What the readers of audio files share: they give samples in blocks, within limits, and refuse what is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from jaxllm.media.errors import MediaError

_MAX_BYTES = 256 << 20
"""The most bytes of an item's mono samples."""
_MAX_VALUES = 1 << 29
"""The most samples of all channels of an item."""
_MAX_SECONDS = 600.0
"""The longest sound, unless a caller cuts it into clips."""

BLOCK = 16_384
"""The samples of each channel that are decoded at once."""
MAX_CHANNELS = 8

type Blocks = Iterator[tuple[int, np.ndarray]]
"""The samples a second of a sound, the same each time, and some samples of all channels, float32 [n, c]."""


@dataclass(frozen=True, slots=True)
class AudioLimits:
    """What a sound may take. Both are counted in decoded samples."""

    max_seconds: float | None = _MAX_SECONDS
    """None for no limit."""
    max_bytes: int = _MAX_BYTES
    """Bytes of mono float32 samples at the model's rate."""
    max_values: int = _MAX_VALUES
    """The samples of all channels, as they are in the file: this bounds the work."""


def check_channels(number: int) -> None:
    """Raise MediaError for too many channels, before a block of them exists."""
    if number > MAX_CHANNELS:
        raise MediaError(f"the audio has {number} channels, and may have {MAX_CHANNELS}.")


@contextmanager
def refusing_damage() -> Iterator[None]:
    """Raise MediaError for any error of a decoder. Its text is not quoted."""
    try:
        yield
    except MediaError:
        raise
    except Exception as error:
        message = "the audio cannot be decoded: the file is damaged, ends early or has another format."
        raise MediaError(message) from error
