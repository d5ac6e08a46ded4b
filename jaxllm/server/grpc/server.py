"""Run the gRPC server beside the HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncGenerator
from typing import Any, cast

import grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION
from grpc_reflection.v1alpha.reflection import enable_server_reflection

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.grpc.authentication import Authentication
from jaxllm.server.grpc.credentials import server_credentials
from jaxllm.server.grpc.health import EngineHealth
from jaxllm.server.grpc.service import SERVICE, InferenceService
from jaxllm.server.http.auth import KeyChecker, read_keys
from jaxllm.server.http.state import ServerState
from jaxllm.server.openai.serving_completion import OpenAIServingCompletion
from jaxllm.server.operations.prometheus import HttpMetrics

logger = logging.getLogger(__name__)

KEEPALIVE_MS, ANSWER_MS = 60_000, 60_000
"""Keep-alive detects a vanished peer within two minutes, even if nothing is sent to it."""


@contextlib.asynccontextmanager
async def opened(
    serving: OpenAIServingCompletion,
    state: ServerState | Any,
    metrics: HttpMetrics,
    listener: socket.socket,
    last_seconds: float,
) -> AsyncGenerator[None, None]:
    """Serve at the address of `listener`, which is closed first. At the end running calls get `last_seconds` to send
    their errors.

    Raises VLLMValidationError if another program has taken the address.
    """
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    health, chat = EngineHealth(state), cast(Any, state).openai_serving_chat
    server = _make_server(state, InferenceService(serving, chat, state, metrics), health)
    credentials = server_credentials(state.server_args)
    listener.close()  # gRPC makes its own sockets
    try:
        if credentials is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, credentials)
    except RuntimeError as error:
        message = f"{address} cannot be listened on any more. Choose another grpc_port."
        raise VLLMValidationError(message, parameter="grpc_port", value=port) from error
    await health.update()
    await server.start()
    logger.info("listening on %s://%s", "grpc" if credentials is None else "grpcs", address)
    watching = asyncio.create_task(health.watch())
    try:
        yield
    finally:
        watching.cancel()
        await server.stop(last_seconds)


def _make_server(state: ServerState, inference: InferenceService, health: EngineHealth) -> grpc.aio.Server:
    keys = read_keys(state.server_args)
    server = grpc.aio.server(
        interceptors=[Authentication(KeyChecker(keys))] if keys else [],
        options=_options(state.server_args),
    )
    server.add_generic_rpc_handlers([inference.handler()])
    add_HealthServicer_to_server(health, server)
    enable_server_reflection([SERVICE, HEALTH, REFLECTION], server)
    return server


def _options(args: ServerArgs) -> list[tuple[str, int]]:
    """Return the limits on clients' messages and metadata, from the flags for HTTP's bodies and headers."""
    return [
        ("grpc.so_reuseport", 0),  # or another server could share the port and take half of the requests
        ("grpc.max_receive_message_length", args.max_body_size),
        ("grpc.max_metadata_size", args.h11_max_incomplete_event_size),
        ("grpc.absolute_max_metadata_size", args.h11_max_incomplete_event_size),
        ("grpc.server_handshake_timeout_ms", int(args.header_timeout * 1000)),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", ANSWER_MS),
    ]
