"""Helpers that do not depend on models: the log, files, child processes, locks."""

from __future__ import annotations

import uuid


def random_uuid() -> str:
    """Return 32 random hexadecimal digits, unique enough to name a request."""
    return uuid.uuid4().hex
