"""Authentication by API key over gRPC, for all calls except health checks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import grpc

from jaxllm.server.grpc.service import refuse
from jaxllm.server.http.auth import KeyChecker
from jaxllm.server.http.errors import make_error

OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check"})
"""These methods need no key."""


class Authentication(grpc.aio.ServerInterceptor):
    """Refuses calls without a key in the metadata "authorization: Bearer KEY"."""

    def __init__(self, checker: KeyChecker) -> None:
        self._checker = checker
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)  # for any method: it reads no message

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Pass a call on, or answer UNAUTHENTICATED, also for unknown methods."""
        if handler_call_details.method not in OPEN_METHODS:
            keys = [value for name, value in handler_call_details.invocation_metadata if name == "authorization"]
            if len(keys) != 1 or not self._accepts(keys[0]):
                return self._refusal
        return await continuation(handler_call_details)

    def _accepts(self, authorization: str | bytes) -> bool:
        value = authorization.encode() if isinstance(authorization, str) else authorization
        return self._checker.accepts_header(value)


async def _refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    message = "A key is needed, in the metadata: authorization: Bearer KEY."
    await refuse(context, make_error(HTTPStatus.UNAUTHORIZED, message))
