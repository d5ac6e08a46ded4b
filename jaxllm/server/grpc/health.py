"""gRPC's health service, with the status of `/health`."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from jaxllm.server.grpc.service import SERVICE
from jaxllm.server.http.state import ServerState, check_serving

_WATCH_SECONDS = 0.25


class EngineHealth(health.aio.HealthServicer):  # type: ignore[attr-defined] # its types leave out this half
    """Reports SERVING while requests are taken, and NOT_SERVING while the server drains or the engine sleeps, and once
    the engine has ended or hangs.
    """

    def __init__(self, state: ServerState) -> None:
        super().__init__()
        self._state = state

    async def Check(self, request: HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> Any:  # noqa: N802
        """Return the current status."""
        await self.update()
        return await super().Check(request, context)

    async def watch(self) -> None:
        """Update the status forever, for watching clients."""
        while True:
            await self.update()
            await asyncio.sleep(_WATCH_SECONDS)

    async def update(self) -> None:
        """Update the status."""
        status = HealthCheckResponse.SERVING if await self._is_serving() else HealthCheckResponse.NOT_SERVING
        for service in (health.OVERALL_HEALTH, SERVICE):
            await self.set(service, status)

    async def _is_serving(self) -> bool:
        try:
            await check_serving(self._state)
        except Exception:  # noqa: BLE001 - whatever it is
            return False
        return True
