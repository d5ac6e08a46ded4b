"""Set up uvicorn's log, which has a line for each request except those to excluded paths."""

from __future__ import annotations

import logging
from typing import Any

from jaxllm.config.server_arguments import DEFAULT_LOG_LEVEL, ServerArgs
from jaxllm.exceptions import VLLMValidationError
from jaxllm.utils.log import shown_log


class NotTheseEndpoints(logging.Filter):
    """Drops the records of requests to some paths."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__()
        self._paths = frozenset(paths)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record; uvicorn's third argument is the path with the query."""
        arguments = record.args
        if not isinstance(arguments, tuple) or len(arguments) < 3:
            return True
        return str(arguments[2]).partition("?")[0] not in self._paths


def log_settings(args: ServerArgs, log_config_file: str | None = None) -> dict[str, Any]:
    """Return uvicorn's settings for logging. A log_config_file replaces them.

    Raises VLLMValidationError for flags that conflict with such a file.
    """
    access_log = not args.disable_uvicorn_access_log
    if log_config_file is not None:
        _refuse_what_the_file_says(args)
        return {"log_config": None, "log_level": None, "access_log": access_log}
    to_stderr: dict[str, Any] = {"handlers": ["stderr"], "level": "INFO", "propagate": False}
    config: dict[str, Any] = {
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {"stderr": {"()": shown_log}},
        "loggers": {
            "uvicorn": to_stderr,
            "uvicorn.error": {"level": "INFO"},
            "uvicorn.access": dict(to_stderr),
            "asyncio": to_stderr | {"level": "WARNING"},
        },
    }
    paths = [path.strip() for path in (args.disable_access_log_for_endpoints or "").split(",") if path.strip()]
    if paths:
        config["filters"] = {"endpoints": {"()": NotTheseEndpoints, "paths": paths}}
        config["loggers"]["uvicorn.access"]["filters"] = ["endpoints"]
    return {"log_config": config, "log_level": args.uvicorn_log_level, "access_log": access_log}


def _refuse_what_the_file_says(args: ServerArgs) -> None:
    if args.uvicorn_log_level != DEFAULT_LOG_LEVEL:
        message = (
            "uvicorn_log_level cannot go with log_config_file: say it there, as the level of the logger 'uvicorn'."
        )
        raise VLLMValidationError(message, parameter="uvicorn_log_level", value=args.uvicorn_log_level)
    if args.disable_access_log_for_endpoints is not None:
        message = (
            "disable_access_log_for_endpoints cannot go with log_config_file: give the logger 'uvicorn.access' the "
            'filter {"()": "jaxllm.server.http.access_log.NotTheseEndpoints", "paths": [...]} there.'
        )
        value = args.disable_access_log_for_endpoints
        raise VLLMValidationError(message, parameter="disable_access_log_for_endpoints", value=value)
