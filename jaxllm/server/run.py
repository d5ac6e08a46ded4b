"""A server runs: the address is taken, the engine starts, the port opens, and at the end requests are drained."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from jaxllm.engine.async_client import build_async_engine_client
from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.app import build_app, init_app_state
from jaxllm.server.arguments import ServerArgs

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.25
LEAST_DRAIN_SECONDS = 0.2
BACKLOG = 2048


class _Server(uvicorn.Server):
    """A server that leaves signals to `run_server`: uvicorn's own handling would end the process before the engine."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing."""
        yield

    def end(self) -> None:
        """End: take no more connections, and wait for the answers on their way; a second call does not wait."""
        self.force_exit = self.should_exit
        self.should_exit = True


async def run_server(args: argparse.Namespace, **uvicorn_kwargs: Any) -> None:
    """Serve until the program is told to end, by SIGTERM or SIGINT. `args` is a parsed command line, of the engine and
    of the server; uvicorn_kwargs go to uvicorn.Config.

    Raises VLLMValidationError for arguments that cannot be used, an address that is taken among them, before the
    engine starts, and EngineDeadError if the engine ends by itself.
    """
    app = build_app(args)
    server_args = ServerArgs.from_cli_args(args)
    with contextlib.closing(bind(server_args)) as listener, _unlinked(server_args.uds):
        async with build_async_engine_client(args) as engine:
            await serve_engine(engine, app, listener, args, **uvicorn_kwargs)


async def serve_engine(
    engine: AsyncLLM, app: FastAPI, listener: socket.socket, args: argparse.Namespace, **uvicorn_kwargs: Any
) -> None:
    """Serve an engine that has started, as `run_server` does; the engine and the listener stay the caller's."""
    await init_app_state(engine, await engine.get_vllm_config(), app.state, args)
    settings = {
        "loop": "uvloop",
        "http": "httptools",
        "lifespan": "off",
        "log_level": "warning",
        # 0 would be over before connections that rest have closed.
        "timeout_graceful_shutdown": max(args.shutdown_timeout, LEAST_DRAIN_SECONDS),
        "backlog": BACKLOG,
    }
    await _serve(_Server(uvicorn.Config(app, **(settings | uvicorn_kwargs))), listener, engine)


async def _serve(server: _Server, listener: socket.socket, engine: AsyncLLM) -> None:
    """Serve until a signal comes, or the engine ends. Raises EngineDeadError then."""
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, server.end)
    watching = asyncio.create_task(_watch(server, engine))
    logger.info("listening on %s", _shown(listener))
    try:
        await server.serve(sockets=[listener])
    finally:
        watching.cancel()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)
    if engine.is_stopped:
        raise engine.dead_error


async def _watch(server: _Server, engine: AsyncLLM) -> None:
    """End the server once its engine has ended: requests have got their errors by then."""
    while not engine.is_stopped:
        await asyncio.sleep(WATCH_SECONDS)
    server.end()


def bind(args: ServerArgs) -> socket.socket:
    """Take the address, so that one in use is seen before a model is loaded; it does not listen yet.

    Raises VLLMValidationError for one that cannot be had.
    """
    try:
        return _bind_path(Path(args.uds)) if args.uds is not None else _bind_port(args.host or "", args.port)
    except OSError as error:
        where, parameter = (args.uds, "uds") if args.uds is not None else (f"{args.host or '*'}:{args.port}", "port")
        message = f"{where} cannot be listened on: {error.strerror or error}. Choose another {parameter}."
        raise VLLMValidationError(message, parameter=parameter, value=where) from error


def _bind_port(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except BaseException:
        listener.close()
        raise
    return listener


def _bind_path(path: Path) -> socket.socket:
    """Make a Unix socket that only this user may connect to; one that nobody listens on any more is replaced."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(path)) != 0:
                    path.unlink()
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _unlinked(uds: str | None) -> Iterator[None]:
    """Delete the file of a Unix socket at the end."""
    try:
        yield
    finally:
        if uds is not None:
            Path(uds).unlink(missing_ok=True)


def _shown(listener: socket.socket) -> str:
    address = listener.getsockname()
    if isinstance(address, str):
        return address
    host, port = address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
