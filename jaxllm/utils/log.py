"""The engine's log goes to stderr for programs without logging of their own, and marks the parts of a start-up."""

from __future__ import annotations

import json
import logging
import logging.config
from pathlib import Path

from jaxllm.exceptions import VLLMValidationError
from jaxllm.utils.log_handler import StderrHandler


class _Fallback(StderrHandler):
    """A handler that shows records only while nothing else does: the program may set up its logging later."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def show_log() -> None:
    """Show the start-up line, statistics and warnings unless the program already handles jaxllm's log."""
    logger = logging.getLogger("jaxllm")
    if logger.hasHandlers():
        return
    logger.addHandler(_Fallback())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def shown_log() -> logging.Handler:
    """Return the handler that shows jaxllm's log, for the lines of others to go the same way and in order."""
    show_log()
    found = (each for each in logging.getLogger("jaxllm").handlers if isinstance(each, StderrHandler))
    return next(found, None) or StderrHandler()


def configure_log(file: str) -> None:
    """Set logging up as a JSON file says, in the form of `logging.config.dictConfig`; what showed jaxllm's log goes.

    Raises VLLMValidationError for a file that cannot be read or used.
    """
    logger = logging.getLogger("jaxllm")
    handlers = logger.handlers[:]
    try:
        settings = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
        logger.handlers.clear()
        logging.config.dictConfig(settings)
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError, ImportError) as error:
        logger.handlers[:] = handlers
        message = f"log_config_file={file!r} cannot be used: {error}. It holds JSON for logging.config.dictConfig."
        raise VLLMValidationError(message, parameter="log_config_file", value=file) from error


def log_phase(logger: logging.Logger, phase: str, seconds: float | None = None) -> None:
    """Log, at DEBUG, that a part of the start-up is done, for those who time it (`jaxllm bench startup`).

    The record carries `phase` and `seconds`: how long it took by itself, None if since the record before it.
    """
    took = "" if seconds is None else f" in {seconds:.2f} s"
    logger.debug("%s done%s", phase, took, extra={"phase": phase, "seconds": seconds})
