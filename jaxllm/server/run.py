"""A server runs: the port is taken, the engine starts, the port opens, and at the end requests are drained."""

from __future__ import annotations

import argparse
import socket
from typing import Any

import uvicorn

from jaxllm.engine.async_client import build_async_engine_client
from jaxllm.server.app import build_app, init_app_state
from jaxllm.server.arguments import ServerArgs


async def run_server(args: argparse.Namespace, **uvicorn_kwargs: Any) -> None:
    """Serve until the program is told to end. `args` is a parsed command line, of the engine and of the server."""
    server_args = ServerArgs.from_cli_args(args)
    listener = bind(server_args)
    async with build_async_engine_client(args) as engine:
        app = build_app(args)
        await init_app_state(engine, await engine.get_vllm_config(), app.state, args)
        config = uvicorn.Config(app, loop="uvloop", http="httptools", **uvicorn_kwargs)
        await uvicorn.Server(config).serve(sockets=[listener])


def bind(args: ServerArgs) -> socket.socket:
    """Take the address, so that one in use is seen before a model is loaded; it does not listen yet."""
    listener = socket.socket(socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((args.host or "0.0.0.0", args.port))
    return listener
