"""The engine's log goes to stderr for programs without logging of their own, and marks the parts of a start-up."""

from __future__ import annotations

import logging


class _Fallback(logging.StreamHandler):
    """A handler that shows records only while nothing else does: the program may set up its logging later."""

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


def log_phase(logger: logging.Logger, phase: str, seconds: float | None = None) -> None:
    """Log, at DEBUG, that a part of the start-up is done, for those who time it (`jaxllm bench startup`).

    The record carries `phase` and `seconds`: how long it took by itself, None if since the record before it.
    """
    took = "" if seconds is None else f" in {seconds:.2f} s"
    logger.debug("%s done%s", phase, took, extra={"phase": phase, "seconds": seconds})
