"""Encode values as valid JSON text, and decode JSON objects."""

from __future__ import annotations

import json
import re
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character, which UTF-8 cannot encode."""


def as_json(value: Any) -> str:
    """Return JSON text. Raises ValueError for NaN and infinity, and TypeError for other types."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def read_object(text: str) -> dict[str, Any] | None:
    """Return the object in JSON text; None if it is not one, as when an output was cut short."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_arguments(text: str, *, is_cut: bool = False) -> dict[str, Any] | None:
    """Return a call's arguments, which must be an object; None if they are not.

    Empty text means no arguments, unless the output `is_cut`.
    """
    return {} if not text and not is_cut else read_object(text)


def is_sendable(text: str) -> bool:
    """Return whether a text has no lone surrogates, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
