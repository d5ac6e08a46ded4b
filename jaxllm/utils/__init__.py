"""Small tools that know nothing of models: the log, files, child processes, names that are used once."""

from __future__ import annotations

import uuid


def random_uuid() -> str:
    """Return 32 hexadecimal digits that nobody had before, as programs name their requests."""
    return uuid.uuid4().hex
