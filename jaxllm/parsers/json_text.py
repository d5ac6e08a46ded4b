"""Values as JSON text that can be sent."""

from __future__ import annotations

import json
from typing import Any


def as_json(value: Any) -> str:
    """Return JSON text. Raises ValueError for numbers that JSON lacks, and TypeError for what is no JSON at all."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_sendable(text) else json.dumps(value, allow_nan=False)


def is_sendable(text: str) -> bool:
    """Say whether a text has no lone halves of characters, which UTF-8 cannot write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
