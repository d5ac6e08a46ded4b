"""Values as JSON text that can be sent."""

from __future__ import annotations

import json
from typing import Any


def as_json(value: Any) -> str:
    """Return JSON text. Raises ValueError for numbers that JSON lacks, and TypeError for what is no JSON at all."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_sendable(text) else json.dumps(value, allow_nan=False)


def read_object(text: str) -> dict[str, Any] | None:
    """Return the object that JSON text is; None for what is none, as when an output was cut short."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_arguments(text: str, *, is_cut: bool = False) -> dict[str, Any] | None:
    """Return the arguments of a call that has to have an object; None if it has none.

    Where the model wrote nothing there are no arguments, unless the output `is_cut` there.
    """
    return {} if not text and not is_cut else read_object(text)


def is_sendable(text: str) -> bool:
    """Return whether a text has no lone halves of characters, which UTF-8 cannot write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
