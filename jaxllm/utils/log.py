"""Set up the engine's log: to stderr unless the program configures logging, with a record for each start-up phase."""

from __future__ import annotations

import json
import logging
import logging.config
from pathlib import Path

from jaxllm.exceptions import VLLMValidationError
from jaxllm.utils.log_handler import StderrHandler


class _Fallback(StderrHandler):
    """A handler that shows records only while no other handler does: the program may set up its logging later."""

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
    """Return the handler that shows jaxllm's log, so that other loggers' lines can share it and stay in order."""
    show_log()
    handlers = (each for each in logging.getLogger("jaxllm").handlers if isinstance(each, StderrHandler))
    return next(handlers, None) or StderrHandler()


def configure_log(file: str) -> None:
    """Configure logging from a JSON file for `logging.config.dictConfig`, replacing jaxllm's own handler.

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
    """Log at DEBUG that a phase of the start-up is done; `jaxllm bench startup` times these.

    The record has `phase` and `seconds`, the phase's own duration; None means the time since the previous record.
    """
    took = "" if seconds is None else f" in {seconds:.2f} s"
    logger.debug("%s done%s", phase, took, extra={"phase": phase, "seconds": seconds})
