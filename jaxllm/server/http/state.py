"""The state that all routes of a server share: its arguments, its engine and its load."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.server.http.errors import RequestFailedError
from jaxllm.utils.async_utils import Turns

_DRAINING = "The server is about to end, and takes no more requests: another one may."


@dataclass
class ServerLoad:
    """Counts the requests that the server is answering."""

    num_requests: int = 0
    """Requests to routes that run the model, until the last byte of their answer."""
    is_draining: bool = False
    """True once the server is to end: it then refuses requests."""
    turns: Turns = field(default_factory=lambda: Turns(4))
    """The turns of the event loop in which requests begin. One takes 1 ms, and tokens of streams wait meanwhile."""

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request that runs the model while its answer is made."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    def total(self) -> int:
        """Return the number of requests that the server is answering."""
        return self.num_requests

    def check_open(self) -> None:
        """Raise RequestFailedError, 503, while the server drains."""
        if self.is_draining:
            raise RequestFailedError(HTTPStatus.SERVICE_UNAVAILABLE, _DRAINING)


class ServerState(Protocol):
    """The attributes of `app.state` that all routes share, under vLLM's names where it has them."""

    args: argparse.Namespace
    """All arguments, the engine's too."""
    server_args: ServerArgs
    engine_client: AsyncLLM
    load: ServerLoad


async def check_serving(state: ServerState) -> None:
    """Raise the reason why no request is taken: the server drains, or the engine sleeps, hangs or has ended."""
    state.load.check_open()
    await state.engine_client.check_health()
