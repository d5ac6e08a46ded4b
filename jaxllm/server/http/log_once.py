"""Names that requests bring and that have no effect are logged, each once."""

from __future__ import annotations

import logging
from collections.abc import Iterable

logger = logging.getLogger(__name__)

MAX_KNOWN = 1000
MAX_LINE = 20
"""The most names of a line in the log."""
MAX_NAME = 64
"""The most characters of a name there."""


class LogOnce:
    """This logs names that are new."""

    def __init__(self, message: str) -> None:
        """Log with a message that has one %s, for the names."""
        self._message = message
        self._seen: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Log those names that are new, MAX_LINE of them at a time; after MAX_KNOWN of them none is."""
        room = min(MAX_LINE, MAX_KNOWN - len(self._seen))
        if room <= 0:
            return
        unknown = (short for name in names if (short := name[:MAX_NAME]) not in self._seen)
        new: set[str] = set()
        for name in unknown:
            new.add(name)
            if len(new) == room:
                break
        if new:
            self._seen |= new
            logger.warning(self._message, ", ".join(map(repr, sorted(new))))
