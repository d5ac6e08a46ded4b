"""The log of requests is uvicorn's, a line for each but those to paths that are not worth one."""

from __future__ import annotations

import copy
import logging
from typing import Any

from uvicorn.config import LOGGING_CONFIG

from jaxllm.server.arguments import ServerArgs


class NotTheseEndpoints(logging.Filter):
    """This lets pass what is not about one of some paths."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__()
        self._paths = frozenset(paths)

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether a record is to be logged; uvicorn's has the path as its third argument, with the query."""
        arguments = record.args
        if not isinstance(arguments, tuple) or len(arguments) < 3:
            return True
        return str(arguments[2]).partition("?")[0] not in self._paths


def log_settings(args: ServerArgs) -> dict[str, Any]:
    """Return uvicorn's settings of its log."""
    config: dict[str, Any] = copy.deepcopy(LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"  # with all the rest that is logged
    paths = [path.strip() for path in (args.disable_access_log_for_endpoints or "").split(",") if path.strip()]
    if paths:
        config["filters"] = {"endpoints": {"()": NotTheseEndpoints, "paths": paths}}
        config["handlers"]["access"]["filters"] = ["endpoints"]
    return {
        "log_config": config,
        "log_level": args.uvicorn_log_level,
        "access_log": not args.disable_uvicorn_access_log,
    }
