"""Names that requests bring and that have no effect are logged, each once."""

from __future__ import annotations

import logging
from collections.abc import Iterable

logger = logging.getLogger(__name__)

MAX_KNOWN = 1000


class LogOnce:
    """This logs names that are new."""

    def __init__(self, message: str) -> None:
        """Log with a message that has one %s, for the names."""
        self._message = message
        self._seen: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Log those names that are new; after MAX_KNOWN of them none is."""
        new = set(names) - self._seen
        if new and len(self._seen) < MAX_KNOWN:
            self._seen |= new
            logger.warning(self._message, ", ".join(sorted(repr(name[:64]) for name in new)))
