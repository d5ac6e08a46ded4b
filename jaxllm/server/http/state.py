"""The state that all routes of a server share: its arguments, its models and its load."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

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
    cut_offs: set[Callable[[], object]] = field(default_factory=set)
    """What ends answers that do not come from an engine, once the server is to end."""

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


class Model(Protocol):
    """One model of a server, as routes see it."""

    @property
    def record(self) -> Any:
        """Return what answers its requests; None until it has been loaded."""
        ...

    @property
    def engine(self) -> AsyncLLM:
        """Return its engine. It must have been loaded."""
        ...

    def begin(self) -> Any:
        """Return what answers a request, which counts until `end`; None if the request has to `wait`."""
        ...

    async def wait(self) -> Any:
        """Wait until it is loaded, and return what `begin` does. Raises EngineBusyError if that cannot be."""
        ...

    def end(self) -> None:
        """Count a request no more."""
        ...

    def keep(self, seconds: float | None) -> None:
        """Let it sleep after these seconds without a request; None is never."""
        ...


class Models(Protocol):
    """The models of a server, as routes see them."""

    @property
    def only(self) -> Model | None:
        """Return the model of a server that has no others."""
        ...

    def find(self, names: Sequence[str]) -> Model:
        """Return the model of the first known name. Raises RequestFailedError, 404, if none is known."""
        ...

    def check_room(self) -> None:
        """Raise EngineBusyError where a request would find no room, whatever model it is for."""
        ...

    async def check_health(self) -> None:
        """Raise the reason why no request can be answered."""
        ...

    def check_alive(self) -> None:
        """Raise EngineDeadError if no request will be answered any more."""
        ...


class ServerState(Protocol):
    """The attributes of `app.state` that all routes share."""

    args: argparse.Namespace
    """All arguments, the engine's too."""
    server_args: ServerArgs
    models: Models
    """There are none before `init_app_state`."""
    load: ServerLoad


async def check_serving(state: ServerState) -> None:
    """Raise the reason why no request is taken: the server drains, or its engine sleeps, hangs or has ended."""
    state.load.check_open()
    await state.models.check_health()
