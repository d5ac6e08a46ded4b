"""`jaxllm serve` runs the OpenAI-compatible server."""

from __future__ import annotations

import argparse
from typing import Any

from jaxllm.cli.engine_flags import read_engine_args
from jaxllm.config.async_engine_args import AsyncEngineArgs


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI's API does",
        description="Serve a model over HTTP, with OpenAI's API and vLLM's flags.",
        allow_abbrev=False,
    )
    parser.add_argument("model_tag", metavar="MODEL", nargs="?", help="hub id, folder, or .gguf file")
    parser.add_argument("--config", metavar="FILE.yaml", help="flags and their values; the command line wins")
    AsyncEngineArgs.add_cli_args(parser)
    _server_args().add_cli_args(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Serve until told to end; returns the exit status."""
    import uvloop

    from jaxllm.server.run import run_server

    read_engine_args(args)
    uvloop.run(run_server(args))
    return 0


def _server_args() -> Any:
    from jaxllm.server.arguments import ServerArgs

    return ServerArgs
