"""Read how long a model is to stay loaded after a request, as Ollama's clients write it."""

from __future__ import annotations

import math
import re

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_DURATION = re.compile(rf"(-?)((?:{_PART.pattern})+)")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_MAX_TEXT = 64


def read_keep_alive(value: float | str) -> float | None:
    """Return the seconds of a number, or of a duration in Go's form, as "5m" or "1h30m"; None if it is negative, which
    is for ever. Raises VLLMValidationError for anything else.
    """
    seconds = value if isinstance(value, (int, float)) else _read(value[:_MAX_TEXT].strip())
    if seconds is None or not math.isfinite(seconds):
        message = f"keep_alive must be a number of seconds or a duration such as '5m', got {shown(value)}."
        raise VLLMValidationError(message, parameter="keep_alive", value=value)
    return None if seconds < 0 else seconds


def _read(text: str) -> float | None:
    if _NUMBER.fullmatch(text):
        return float(text)
    duration = _DURATION.fullmatch(text)
    if duration is None:
        return None
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(duration[2]))
    return -seconds if duration[1] else seconds
