"""Run a server of several front ends: check that its arguments allow it, and run their parent."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.engine.front.start import start_processes
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.resolve.discovery import on_this_host
from jaxllm.server.processes.front_process import Settings
from jaxllm.server.processes.parent import Parent
from jaxllm.usage.usage_lib import UsageContext


def check_several(args: ServerArgs, uvicorn_kwargs: Mapping[str, Any]) -> None:
    """Raise VLLMValidationError for arguments that a server of several front ends cannot follow."""
    reasons = {
        "disable_frontend_multiprocessing": args.disable_frontend_multiprocessing
        and "a core in a thread serves the front end of its process alone",
        "uvicorn_kwargs": bool(uvicorn_kwargs) and "they cannot be passed to other processes",
    }
    for name, reason in reasons.items():
        if reason:
            message = f"{name} needs api_server_count=1: {reason}. Leave one of the two out."
            raise VLLMValidationError(message, parameter=name)


async def run_front_ends(
    args: argparse.Namespace,
    server_args: ServerArgs,
    listener: socket.socket,
    grpc_listener: socket.socket | None = None,
    command: Sequence[str] = (),
) -> None:
    """Serve with several front ends until SIGTERM or SIGINT, on a listener that is bound; with `grpc_listener` the
    first front end serves gRPC at its address.

    `command` is another program to run as a core; see `CoreProcess`. Raises as `run_server` does.
    """
    engine_args = on_this_host(AsyncEngineArgs.from_cli_args(args))
    assert server_args.api_server_count is not None
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def on_ready() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.call_soon_threadsafe(loop.add_signal_handler, number, parent.end)

    def run() -> None:
        try:
            parent.run()
        except BaseException as error:  # noqa: BLE001 - it is raised below
            loop.call_soon_threadsafe(_settle, ended, error)
        else:
            loop.call_soon_threadsafe(_settle, ended, None)

    parent = Parent(
        lambda: start_processes(engine_args, UsageContext.OPENAI_API_SERVER, command),
        Settings(engine_args.portable(), dataclasses.asdict(server_args)),
        listener.fileno(),
        server_args.api_server_count,
        grpc_fd=None if grpc_listener is None else grpc_listener.fileno(),
        drain_seconds=engine_args.shutdown_timeout,
        metrics_prefix=server_args.metrics_prefix,
        on_ready=on_ready,
    )
    threading.Thread(target=run, name="jaxllm-front-ends", daemon=True).start()
    try:
        await ended
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _settle(ended: asyncio.Future[None], error: BaseException | None) -> None:
    if ended.done():
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)
