"""The engine's log on stderr, for programs that set up no logging of their own."""

from __future__ import annotations

import logging


class _Fallback(logging.StreamHandler):
    """Shows records only while nothing else does: the program may set up its logging later."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def show_log() -> None:
    """Show the start-up line, statistics and warnings unless the program already handles jaxllm's log."""
    logger = logging.getLogger("jaxllm")
    if logger.hasHandlers():
        return
    handler = _Fallback()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
