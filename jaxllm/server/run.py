"""Run a server: bind the address, start the engine, serve, and drain requests at the end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import signal
import socket
import stat
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

import uvicorn
from fastapi import FastAPI

from jaxllm.config.server_arguments import ServerArgs, with_queue_bound
from jaxllm.engine.client.fork_server import ForkServer
from jaxllm.engine.online.async_client import build_async_engine_client
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import EngineBusyError, VLLMValidationError
from jaxllm.server.app import build_app, init_app_state
from jaxllm.server.http.access_log import log_settings
from jaxllm.server.http.auth import read_keys
from jaxllm.server.http.connection import bounded_protocol, set_up
from jaxllm.server.http.state import ServerLoad, ServerState
from jaxllm.server.http.tls import refresh, tls_settings
from jaxllm.server.model_settings import ModelSettings, has_several, read_models
from jaxllm.server.models.registry import ServedModels
from jaxllm.server.processes.acceptor import Acceptor
from jaxllm.server.processes.start import check_several, run_front_ends
from jaxllm.server.served_model import ServedModel
from jaxllm.server.several_models import init_models_state
from jaxllm.utils.async_utils import start_worker_threads
from jaxllm.utils.garbage import settle_garbage
from jaxllm.utils.log import configure_log, show_log

logger = logging.getLogger(__name__)

_DRAIN_POLL_SECONDS = 0.05
_LAST_SECONDS = 0.2
"""The time to send the last bytes and to close idle connections at the end."""
_CUT_OFF = "The server ends, and has cut off this request: another one may answer it."
_BACKLOG = 2048
_MAX_FILES = 65_536
"""The limit of open files and connections that the server sets, if the system allows it. Shells often set 1,024."""


class _Server(uvicorn.Server):
    """A server that leaves signals to `run_server`: uvicorn's own handling would end the process before the engine."""

    acceptor: Acceptor | None = None
    """What takes connections, if they are not uvicorn's own to take."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections."""
        if self.acceptor is None:
            await super().startup(sockets)
            return
        await super().startup([])
        config, loop = self.config, asyncio.get_running_loop()
        make = partial(
            config.http_protocol_class,
            config=config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=loop,
        )
        self.acceptor.begin(cast(Callable[[], asyncio.Protocol], make), config.ssl, config.backlog)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, and end those that there are."""
        if self.acceptor is not None:
            self.acceptor.end()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing."""
        yield

    def end(self) -> None:
        """Stop taking connections, and cut off running answers. A second call does not wait at all."""
        self.force_exit = self.should_exit
        self.should_exit = True


class FrontPart(Protocol):
    """What one of several front ends shares with the others."""

    load: ServerLoad
    is_again: bool
    """True if a front end of the engine has served before: the engine has the adapters of the start."""

    def acceptor(self, listener: socket.socket, connections: set[Any]) -> Acceptor:
        """Return what takes this front end's connections."""
        ...

    async def begin(self) -> None:
        """Share with the others, once the application has its engine."""
        ...

    async def end(self) -> None:
        """Leave the others."""
        ...


class _Ending:
    """Ends a server on request: it drains first, with its port still open for health checks."""

    def __init__(self, server: _Server, models: ServedModels[Any], load: ServerLoad, seconds: float) -> None:
        """Let running requests go on for `seconds`; those left then end with an error."""
        self._server, self._models, self._load, self._seconds = server, models, load, seconds
        self._draining: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begin to end; a second call does not wait for running requests."""
        if self._draining is None and self._seconds:
            self._draining = asyncio.create_task(self._drain())
        else:
            self._end()

    async def _drain(self) -> None:
        self._load.is_draining = True
        logger.info("draining: %d requests may go on for %g s", self._load.num_requests, self._seconds)
        deadline = time.monotonic() + self._seconds
        while self._load.num_requests and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        if not self._server.should_exit:
            self._end()

    def _end(self) -> None:
        self._models.cut_off(EngineBusyError(_CUT_OFF))
        for cut_off in self._load.cut_offs:
            cut_off()
        self._server.end()


async def run_server(args: argparse.Namespace, **uvicorn_kwargs: Any) -> None:
    """Serve until SIGTERM or SIGINT. `args` is a parsed command line of the engine and the server; uvicorn_kwargs go to
    uvicorn.Config.

    Raises VLLMValidationError for bad arguments or an address in use, before the engine starts, and EngineDeadError
    if the engine ends by itself.
    """
    warnings.filterwarnings("ignore", module="PIL")  # Pillow warns of damaged metadata, which requests may have
    app = build_app(args)
    args = with_queue_bound(args)
    settings = read_models(args) if has_several(args) else []
    server_args = ServerArgs.from_cli_args(args)
    tls_settings(server_args)
    log_settings(server_args, args.log_config_file)
    has_fronts = (server_args.api_server_count or 1) > 1
    if has_fronts:
        check_several(server_args, uvicorn_kwargs)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(bind(server_args)))
        stack.enter_context(_unlinked(server_args.uds))
        grpc_listener = bind_grpc(server_args)
        if grpc_listener is not None:
            stack.enter_context(contextlib.closing(grpc_listener))
        if has_fronts:
            if args.log_config_file is not None:
                configure_log(args.log_config_file)
            else:
                show_log()
            _warn_if_open(server_args, [each for each in (listener, grpc_listener) if each is not None])
            await run_front_ends(args, server_args, listener, grpc_listener)
            return
        start_worker_threads()
        if settings:
            await _serve_several(settings, app, args, listener, **uvicorn_kwargs)
            return
        async with build_async_engine_client(args) as engine:
            await asyncio.to_thread(engine.front.inputs.prepare_media)
            settle_garbage()
            await serve_engine(engine, app, listener, args, grpc_listener, **uvicorn_kwargs)


async def _serve_several(
    settings: list[ModelSettings],
    app: FastAPI,
    args: argparse.Namespace,
    listener: socket.socket,
    **uvicorn_kwargs: Any,
) -> None:
    """Serve several models, which are loaded on demand. Their engines end with this."""
    if args.log_config_file is not None:
        configure_log(args.log_config_file)
    else:
        show_log()
    with contextlib.closing(ForkServer()) as forks:
        models = init_models_state(settings, app.state, args, forks)
        forks.begin()
        settle_garbage()
        try:
            await serve_models(app, listener, args, **uvicorn_kwargs)
        finally:
            await models.close()


async def serve_engine(
    engine: AsyncLLM,
    app: FastAPI,
    listener: socket.socket,
    args: argparse.Namespace,
    grpc_listener: socket.socket | None = None,
    *,
    part: FrontPart | None = None,
    **uvicorn_kwargs: Any,
) -> None:
    """Serve a started engine, as `run_server` does. The caller closes the engine and the listener.

    gRPC takes over the address of `grpc_listener`, which it closes. `part` is what this process shares if it is one of
    several front ends of the engine.
    """
    load = None if part is None else part.load
    is_again = part is not None and part.is_again
    await init_app_state(engine, await engine.get_vllm_config(), app.state, args, load=load, is_again=is_again)
    await serve_models(app, listener, args, grpc_listener, part=part, **uvicorn_kwargs)
    if engine.is_stopped:
        raise engine.dead_error


async def serve_models(
    app: FastAPI,
    listener: socket.socket,
    args: argparse.Namespace,
    grpc_listener: socket.socket | None = None,
    *,
    part: FrontPart | None = None,
    **uvicorn_kwargs: Any,
) -> None:
    """Serve the models in an application's state until it is told to end, or the only model's engine has ended."""
    _allow_connections()
    server_args: ServerArgs = app.state.server_args
    models: ServedModels[ServedModel] = app.state.models
    config = _uvicorn_config(app, args, server_args, uvicorn_kwargs)
    server = _Server(config)
    if part is None:
        _warn_if_open(server_args, [each for each in (listener, grpc_listener) if each is not None])
    else:
        server.acceptor = part.acceptor(listener, server.server_state.connections)
        await part.begin()
    tasks = [asyncio.create_task(_watch(server, models))]
    if config.ssl is not None and server_args.enable_ssl_refresh:
        tasks.append(asyncio.create_task(refresh(config.ssl, server_args)))
    try:
        async with contextlib.AsyncExitStack() as stack:
            if grpc_listener is not None:
                from jaxllm.server.grpc.server import opened

                assert models.only is not None
                assert models.only.record is not None
                completion, metrics = models.only.record.completion, app.state.http_metrics
                state = cast(ServerState, app.state)
                await stack.enter_async_context(opened(completion, state, metrics, grpc_listener, _LAST_SECONDS))
            await _serve(server, _Ending(server, models, app.state.load, args.shutdown_timeout), listener)
    finally:
        for task in tasks:
            task.cancel()
        if part is not None:
            await part.end()


def _uvicorn_config(
    app: FastAPI, args: argparse.Namespace, server_args: ServerArgs, more: Mapping[str, Any]
) -> uvicorn.Config:
    settings: dict[str, Any] = {
        "loop": "uvloop",
        "lifespan": "off",
        "timeout_graceful_shutdown": _LAST_SECONDS,
        "timeout_keep_alive": server_args.timeout_keep_alive,
        "http": bounded_protocol(server_args),
        "backlog": _BACKLOG,
        **log_settings(server_args, args.log_config_file),
        **tls_settings(server_args),
    }
    config = uvicorn.Config(app, **{**settings, **more})
    config.load()
    return config


def _allow_connections() -> None:
    """Raise this process's limit of open files as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # some systems have a lower limit that they do not report
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def _serve(server: _Server, ending: _Ending, listener: socket.socket) -> None:
    """Serve until a signal comes or the server ends."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.begin)
    logger.info("listening on %s", _shown(listener, "http" if server.config.ssl is None else "https"))
    try:
        await server.serve(sockets=[listener])
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _watch(server: _Server, models: ServedModels[Any]) -> None:
    """End the server once its only engine has ended; by then its requests have failed."""
    await models.watch()
    server.end()


def bind(args: ServerArgs) -> socket.socket:
    """Bind the address without listening, so that an address in use is reported before a model is loaded.

    Raises VLLMValidationError if it cannot be bound.
    """
    try:
        if args.uds is not None:
            return _bind_path(Path(args.uds))
        listener = _bind_port(args.host or "", args.port)
    except OSError as error:
        where, parameter = (args.uds, "uds") if args.uds is not None else (f"{args.host or '*'}:{args.port}", "port")
        message = f"{where} cannot be listened on: {error.strerror or error}. Choose another {parameter}."
        raise VLLMValidationError(message, parameter=parameter, value=where) from error
    set_up(listener, args.stalled_client_timeout)
    return listener


def bind_grpc(args: ServerArgs) -> socket.socket | None:
    """Bind gRPC's address, as `bind` does HTTP's; None without gRPC.

    Raises VLLMValidationError if it cannot be bound, if packages are missing, and for unsupported arguments.
    """
    if args.grpc_port is None:
        return None
    if any(find_spec(name) is None for name in ("grpc", "grpc_health", "grpc_reflection")):
        message = "grpc_port needs packages of its own: pip install 'jaxllm[grpc]'."
        raise VLLMValidationError(message, parameter="grpc_port", value=args.grpc_port)
    from jaxllm.server.grpc.credentials import check_tls

    check_tls(args)
    try:
        return _bind_port(args.host or "", args.grpc_port)
    except OSError as error:
        where = f"{args.host or '*'}:{args.grpc_port}"
        message = f"{where} cannot be listened on: {error.strerror or error}. Choose another grpc_port."
        raise VLLMValidationError(message, parameter="grpc_port", value=where) from error


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
    """Make a Unix socket for this user only, replacing one that nobody listens on."""
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
    """Delete a Unix socket's file at the end."""
    try:
        yield
    finally:
        if uds is not None:
            Path(uds).unlink(missing_ok=True)


def _warn_if_open(args: ServerArgs, listeners: list[socket.socket]) -> None:
    """Log a warning if other machines can use the server without a key."""
    addresses = [each.getsockname() for each in listeners if each.family != socket.AF_UNIX]
    if not all(ipaddress.ip_address(address[0]).is_loopback for address in addresses) and not read_keys(args):
        logger.warning("anyone who reaches this machine can use the server: give --api-key, or --host 127.0.0.1")


def _shown(listener: socket.socket, scheme: str) -> str:
    address = listener.getsockname()
    if isinstance(address, str):
        return address
    host, port = address[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
