"""Replicas that are added to an asynchronous engine while it runs, or taken away, and requests for one of them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

import msgspec

from jaxllm.core_messages import EngineCoreRequest
from jaxllm.engine.client.remote_client import RemoteClient
from jaxllm.engine.client.replicated_core import ReplicatedCore
from jaxllm.engine.online.async_core import AsyncCore
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import INT32_MAX, check_int

POLL_SECONDS = 0.1
MOST_REPLICAS = 1024


class Scaling(ABC):
    """A base of engines whose core may be several."""

    _core: AsyncCore

    @abstractmethod
    def _check_awake(self) -> None:
        """Raise unless the engine can be called."""

    async def scale_elastic_ep(self, new_data_parallel_size: int, drain_timeout: int = 300) -> None:
        """Have another number of replicas; return when the new ones are ready, and those to go have ended.

        Those end their requests first, for `drain_timeout` seconds at most. Raises VLLMValidationError for an engine
        that was started with data_parallel_size=1, RuntimeError if a new replica cannot be started.
        """
        check_int("new_data_parallel_size", new_data_parallel_size, 1, MOST_REPLICAS)
        check_int("drain_timeout", drain_timeout, 0, INT32_MAX)
        self._check_awake()
        remote = self._core.remote
        if not isinstance(remote, ReplicatedCore):
            if new_data_parallel_size == 1:
                return
            message = "an engine of one replica has no others: start it with data_parallel_size of 2 or more."
            raise VLLMValidationError(message, parameter="new_data_parallel_size", value=new_data_parallel_size)
        remote.replicas.scale(new_data_parallel_size, drain_timeout)
        while remote.replicas.is_scaling:
            await asyncio.sleep(POLL_SECONDS)
            self._check_awake()
            self._core.look()
        if (error := remote.replicas.take_scale_error()) is not None:
            raise RuntimeError(f"A replica cannot be started: {error}")


def placed(request: EngineCoreRequest, remote: RemoteClient, rank: Any) -> EngineCoreRequest:
    """Return a request for one replica, if a number is given. Raises VLLMValidationError for a number that none can
    have.
    """
    if rank is None:
        return request
    is_alone = not isinstance(remote, ReplicatedCore)
    check_int("data_parallel_rank", rank, 0, 0 if is_alone else MOST_REPLICAS - 1)
    return msgspec.structs.replace(request, data_parallel_rank=rank)
