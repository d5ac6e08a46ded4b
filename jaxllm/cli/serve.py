"""`jaxllm serve` runs the OpenAI-compatible server."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any

from jaxllm.cli.flags.engine_flags import read_engine_args
from jaxllm.cli.flags.help import add_help
from jaxllm.config.server_arguments import ServerArgs
from jaxllm.exceptions import EngineDeadError, VLLMValidationError
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.resolve.discovery import on_this_host
from jaxllm.usage.usage_lib import UsageContext
from jaxllm.utils.streams import say

_MODEL = "hub id, folder, or .gguf file; several, or a folder of models, are loaded as requests ask for them"


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP with OpenAI's API",
        description="Serve a model over HTTP, with OpenAI's API and vLLM's flags. The port opens when the engine is "
        "ready; SIGTERM and Ctrl-C end the server, a second one at once.",
        epilog="Exit status: 0 told to end, 1 the engine has ended by itself, 2 misuse.",
        allow_abbrev=False,
        add_help=False,
    )
    add_serve_flags(parser)
    add_help(parser, AsyncEngineArgs, ServerArgs)
    parser.set_defaults(run=run)
    return parser


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and all flags of a server and its engine."""
    parser.add_argument("model_tag", metavar="MODEL", nargs="*", help=_MODEL)
    parser.add_argument("--config", metavar="FILE.yaml", help="flags and their values; the command line wins")
    ServerArgs.add_cli_args(parser)
    AsyncEngineArgs.add_cli_args(parser)


def check_serve_args(args: argparse.Namespace) -> AsyncEngineArgs:
    """Return the engine's arguments, checked; set `args.model` to their MODEL, and the numbers for --nnodes auto.
    With several models they are those of the first.

    Raises VLLMValidationError for a command line that cannot be served.
    """
    from jaxllm.server.model_settings import has_several, read_models

    if has_several(args):
        first = read_models(args)[0]
        return first.engine_args
    for name in ("max_loaded_models", "models_memory"):
        if (value := getattr(args, name, None)) is not None:
            message = f"{name} is for several models: name them all, or give a folder of models or --models."
            raise VLLMValidationError(message, parameter=name, value=value)
    if isinstance(args.model_tag, list):
        args.model_tag = next(iter(args.model_tag), None)
    engine_args = on_this_host(read_engine_args(args, AsyncEngineArgs))
    assert isinstance(engine_args, AsyncEngineArgs)
    for name in ("nnodes", "node_rank", "master_addr"):
        setattr(args, name, getattr(engine_args, name))
    if ServerArgs.from_cli_args(args).headless and engine_args.node_rank == 0:
        message = "headless is for the hosts of a model that have a --node-rank above 0: host 0 has the server."
        raise VLLMValidationError(message, parameter="headless", value=True)
    return engine_args


def run(args: argparse.Namespace) -> int:
    """Serve until stopped and return the exit status."""
    engine_args = check_serve_args(args)
    if engine_args.node_rank > 0:
        from jaxllm.engine.front.start import follow_if_not_first  # imports zmq

        follow_if_not_first(engine_args, UsageContext.OPENAI_API_SERVER)
    if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "uvloop", "httptools")):
        message = "the server needs packages of its own: pip install 'jaxllm[serve]'."
        raise VLLMValidationError(message, parameter="serve")
    import uvloop

    from jaxllm.server.run import run_server

    try:
        uvloop.run(run_server(args))
    except EngineDeadError as error:
        say(f"jaxllm: error: {error}")
        return 1
    return 0
