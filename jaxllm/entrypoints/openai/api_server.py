"""vLLM's import path for the server; `python -m jaxllm.entrypoints.openai.api_server --model M` is `jaxllm serve M`."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.engine.online.async_client import build_async_engine_client, build_async_engine_client_from_engine_args
    from jaxllm.server.app import build_app, init_app_state
    from jaxllm.server.run import run_server

__all__ = [
    "build_app",
    "build_async_engine_client",
    "build_async_engine_client_from_engine_args",
    "init_app_state",
    "run_server",
]

_MODULES = {
    "build_app": "jaxllm.server.app",
    "build_async_engine_client": "jaxllm.engine.online.async_client",
    "build_async_engine_client_from_engine_args": "jaxllm.engine.online.async_client",
    "init_app_state": "jaxllm.server.app",
    "run_server": "jaxllm.server.run",
}


def __getattr__(name: str) -> Any:
    """Load the module that holds `name` (PEP 562) on first use: the server's modules load FastAPI and uvicorn."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def main() -> int:
    """Serve with this program's command line, and return the exit status."""
    from jaxllm.cli.main import main as run_command

    return run_command(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
