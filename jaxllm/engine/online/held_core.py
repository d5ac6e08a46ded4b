"""The core that an asynchronous engine holds: it sleeps, wakes, is started again, and ends with the engine."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from typing import Any

from jaxllm.engine.client.remote_client import RemoteClient
from jaxllm.engine.front.asleep import ASLEEP, PauseMode, sleeps_in_place
from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.engine.online.async_core import AsyncCore, drop_core
from jaxllm.engine.online.gate import Changes, Gate
from jaxllm.engine.online.running_requests import RunningRequests
from jaxllm.engine.transport.core_client import SLEEPING_PARTS
from jaxllm.exceptions import EngineDeadError
from jaxllm.utils.fork_safety import engines_home

logger = logging.getLogger(__name__)

type StartCore = Callable[[], tuple[RemoteClient, FrontEnd]]
"""A function that starts a core and its front end, each time it is called."""


class HeldCore:
    """Holds an engine's core. No event loop holds this, so that the core ends once nobody holds the engine."""

    def __init__(
        self, start: StartCore, remote: RemoteClient, front: FrontEnd, requests: RunningRequests, gate: Gate
    ) -> None:
        """Hold the core that `remote` reaches; `start` starts another one in its place."""
        self._start, self._front, self._requests, self._gate = start, front, requests, gate
        self.home = engines_home()
        self.changes = Changes()
        """The changes between sleeping and waking: one is under way at a time."""
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._hold(self._joined(remote))

    @property
    def dead_error(self) -> EngineDeadError:
        """Return the error that requests get once the core has ended."""
        return self.core.dead_error or EngineDeadError("The engine core has ended.")

    def check_awake(self) -> None:
        """Raise EngineBusyError while the engine sleeps, EngineDeadError once its core has ended."""
        self.home.check()
        self._gate.check_awake(self.core.dead_error)
        self.core.attach()

    async def settle(self, mode: PauseMode) -> None:
        """Bring all running requests to an end: at once with mode "abort"."""
        if mode == "abort":
            for request_id in self._requests.ids():
                self.core.abort_requests(self._requests.abort(request_id))
        await self._requests.idle.wait()

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Sleep, if it does not, as `AsyncLLM.sleep` does; a caller that is cancelled while requests run undoes it."""
        await self.changes.make(lambda: self._release_device(level), lambda: self.fall_asleep(level, mode))

    async def fall_asleep(self, level: int, mode: PauseMode) -> None:
        """Refuse calls and requests from now on, and bring those that run to an end."""
        if self._gate.is_sleeping:
            return
        self.check_awake()
        self._gate.asleep.begin(level)
        try:
            await self.settle(mode)
            if not self._gate.is_sleeping:
                raise self.dead_error  # it was shut down meanwhile
        except BaseException:
            self._gate.asleep.end()
            raise

    async def _release_device(self, level: int) -> None:
        if not sleeps_in_place(self._front.ready.vllm_config.device_config.device_type):
            await self.core.close(error=EngineDeadError(ASLEEP))
            return
        try:
            await self.core.call("sleep", level)
        except BaseException:
            if self.core.dead_error is None:  # other replicas may sleep
                await self.core.call("wake_up", list(SLEEPING_PARTS))
            self._gate.asleep.end()
            raise
        self._front.inputs.forget_media()
        self._front.metrics.forget_hits()

    async def wake_up(self, parts: list[str]) -> None:
        """Bring parts back, as `AsyncLLM.wake_up` does. This goes on if the caller is cancelled."""
        self.home.check()
        await self.changes.make(lambda: self._wake_up(parts))

    async def _wake_up(self, parts: list[str]) -> None:
        asleep = self._gate.asleep
        parts = [part for part in parts if part in asleep.parts]
        if parts and self.core.dead_error is not None:
            await self._start_again()
            return
        for part in parts:
            await self.core.call("wake_up", [part])
            asleep.end([part])

    async def _start_again(self) -> None:
        """Start another core in place of one that the sleep has ended, or that has ended while it slept."""
        if not self.core.remote.is_closed:
            logger.warning("another engine core is started, for this one has ended while it slept: %s", self.dead_error)
        core = await asyncio.to_thread(lambda: self._joined(self._start()[0]))
        if not self._gate.is_sleeping:  # it was shut down meanwhile
            await core.close()
            return
        self._hold(core)
        self._gate.asleep.end()
        self._front.metrics.on_new_cores()

    def _joined(self, remote: RemoteClient) -> AsyncCore:
        """Return a core that ends when nobody holds it, as after a cancelled wake-up."""
        return AsyncCore(remote, self._requests.take_outcome, self._requests.on_end, self._requests.outbox)

    def _hold(self, core: AsyncCore) -> None:
        """Use a core, which ends with this: the event loop holds the core alone."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self.core, self._finalizer = core, weakref.finalize(self, drop_core, self.home, core)
