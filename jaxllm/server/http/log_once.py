"""Log names in requests that have no effect, each once."""

from __future__ import annotations

import logging
from collections.abc import Iterable

logger = logging.getLogger(__name__)

MAX_KNOWN = 1000
MAX_LINE = 20
"""The maximum number of names in a line."""
_MAX_NAME = 64
"""The maximum number of characters of a name."""


class LogOnce:
    """Logs each name once."""

    def __init__(self, message: str) -> None:
        """Use a message that has one %s, for the names."""
        self._message = message
        self._seen: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Log the new names, at most MAX_LINE of them, and none after MAX_KNOWN in all."""
        room = min(MAX_LINE, MAX_KNOWN - len(self._seen))
        if room <= 0:
            return
        unknown = (short for name in names if (short := name[:_MAX_NAME]) not in self._seen)
        new: set[str] = set()
        for name in unknown:
            new.add(name)
            if len(new) == room:
                break
        if new:
            self._seen |= new
            logger.warning(self._message, ", ".join(map(repr, sorted(new))))
