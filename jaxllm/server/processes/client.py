"""The engine of one of several front ends: its core is reached through their parent."""

# ruff: noqa: ARG002 - methods that are refused have the parameters of those they stand for

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, Self

import zmq

from jaxllm.engine.client.remote_core import RemoteCore
from jaxllm.engine.client.replicated_core import MAX_REPLICAS
from jaxllm.engine.front.asleep import PauseMode, check_level, check_mode, check_pause_mode, check_tags, sleeps_in_place
from jaxllm.engine.front.start import meet
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.engine.transport.core_client import SLEEPING_PARTS
from jaxllm.engine.transport.sockets import Addresses, Meeting
from jaxllm.engine.transport.wire import FrameError, FromCore, Told
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.server.processes.board import Board, SharedAdmission

_PAUSED = "paused"
ASLEEP = "asleep"
"""The kind of change whose value is a level of sleep, a mode of falling asleep, and the parts that sleep."""
_NO_MEDIA = "no media"
_ONE_ONLY = "is for a server with one front end: start it with api_server_count=1."


class _ParentHandle:
    """The parent in the place of a core's process; this process ends with it, whatever it waits for."""

    name = "the engine"
    pid = None
    fds: list[int] = []  # noqa: RUF012 - there are none
    poll_seconds = 0.5

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting

    def end_reason(self) -> str | None:
        """Return None: it runs."""
        return None

    def wait(self, seconds: float) -> None:
        """Do nothing: the parent goes on."""

    def stop(self, seconds: float) -> None:
        """Do nothing: the parent goes on."""

    def kill(self) -> None:
        """Do nothing: the parent goes on."""


class ParentClient(RemoteCore):
    """The client of an engine that other front ends use too. Its shutdown ends the connection, and not the engine."""

    def __init__(self, addresses: Addresses, *, has_replicas: bool) -> None:
        """Wait for the parent at the addresses, whose files it deletes once it has heard of this process."""
        super().__init__(_ParentHandle(Meeting(addresses)), zmq.Context())
        self._next_report = math.inf  # the parent logs what the core does while it starts
        self.max_replicas = MAX_REPLICAS if has_replicas else 1
        self.on_told: Callable[[Told], object] | None = None
        """What takes changes of what is shared; they wait until it is set by `listen`."""
        self._told: list[Told] = []

    def listen(self, on_told: Callable[[Told], object]) -> None:
        """Give changes of what is shared to a function, first those that have come."""
        self.on_told = on_told
        told, self._told = self._told, []
        for change in told:
            on_told(change)

    def finish_shutdown(self, timeout: float | None = None) -> None:
        """Close the connection."""
        del timeout
        self._close()

    def _take(self, message: FromCore | FrameError) -> None:
        if not isinstance(message, Told):
            super()._take(message)
        elif self.on_told is None:
            self._told.append(message)
        else:
            self.on_told(message)


class SharedLLM(AsyncLLM):
    """The engine of one of several front ends. Bounds, pauses, sleep and adapters are those of all."""

    parent: ParentClient

    @classmethod
    def join(cls, engine_args: AsyncEngineArgs, addresses: Addresses, board: Board, row: int) -> Self:
        """Wait until the engine is ready, and return it."""
        parent = ParentClient(addresses, has_replicas=engine_args.data_parallel_size > 1)
        engine = cls(
            lambda: meet(parent, engine_args, asks_core=False),
            admission=SharedAdmission.of(engine_args, board=board, row=row),
            logs_requests=engine_args.enable_log_requests,
        )
        engine.parent, engine.max_log_len = parent, engine_args.max_log_len
        engine.front.inputs.arrivals = board.arrivals()
        engine.front.metrics.stop_logging()
        return engine

    async def ask_parent(self, method: str, *arguments: Any) -> Any:
        """Call a method of the parent, also while the engine sleeps, and return its answer."""
        return await self._core.call(method, *arguments)

    async def tell(self, kind: str, key: str, value: Any) -> None:
        """Tell all front ends, this one too, of a change; return when all have taken it in."""
        await self.ask_parent("tell", kind, key, value)

    async def take_told(self, told: Told) -> None:
        """Take in a change that is the engine's; ignore others."""
        if told.kind == _NO_MEDIA:
            await super().reset_mm_cache()
        if told.kind == ASLEEP:
            await self._take_sleep(told.value)
        if told.kind != _PAUSED:
            return
        if told.value is None:
            await super().resume_generation()
        else:
            await super().pause_generation(mode=told.value, clear_cache=False)

    async def pause_generation(
        self, *, mode: PauseMode = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """Let new requests of all front ends wait, as `AsyncLLM.pause_generation` does."""
        mode = "wait" if wait_for_inflight_requests else mode
        check_pause_mode(mode)
        await self.tell(_PAUSED, "", mode)
        if clear_cache:
            await self.reset_prefix_cache(mode == "keep")

    def num_unfinished(self) -> int:
        """Return the number of sequences of all front ends that have not ended."""
        assert isinstance(self.admission, SharedAdmission)
        return self.admission.num_unfinished()

    async def resume_generation(self) -> None:
        """Take requests again, at all front ends."""
        await self.tell(_PAUSED, "", None)

    async def reset_mm_cache(self) -> None:
        """Forget all processed images and videos, at all front ends."""
        await self.tell(_NO_MEDIA, "", None)

    @property
    def is_stopped(self) -> bool:
        """Return whether the engine has ended; none is started in place of one that has ended asleep."""
        return self._core.dead_error is not None

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Have the core sleep as `AsyncLLM.sleep` does, once the requests of all front ends have ended.

        Raises VLLMValidationError for a core that would have to end instead.
        """
        self._check_sleeps("sleep")
        check_level(level, self.vllm_config.parallel_config.nnodes)
        check_mode(mode)
        await self._held.changes.make(lambda: self._in_turn(self._sleep_all(level, mode)))

    async def _in_turn(self, change: Coroutine[Any, Any, None]) -> None:
        """Change whether the engine sleeps, once no other front end does: then this one knows what sleeps."""
        with contextlib.closing(change):
            await self.ask_parent("take_turn")
            try:
                await change
            finally:
                await self.ask_parent("end_turn")

    async def _sleep_all(self, level: int, mode: PauseMode) -> None:
        if self._gate.is_sleeping:
            return
        await self.tell(ASLEEP, "", [level, mode, SLEEPING_PARTS])
        try:
            await self.ask_parent("sleep", level)
        except BaseException:
            await self._wake_all(list(SLEEPING_PARTS))
            raise

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring back the parts that `sleep` has freed, for all front ends."""
        self._check_sleeps("wake_up")
        parts = check_tags(tags)
        await self._held.changes.make(lambda: self._in_turn(self._wake_all(parts)))

    async def _wake_all(self, parts: list[str]) -> None:
        asleep = self._gate.asleep
        for part in parts:
            if part in asleep.parts:
                await self.ask_parent("wake_up", [part])
                left = [other for other in SLEEPING_PARTS if other in asleep.parts and other != part]
                await self.tell(ASLEEP, "", [asleep.level, "abort", left] if left else None)

    async def _take_sleep(self, told: Any) -> None:
        """Take in which parts of the core sleep, once this front end's requests have ended."""
        if told is None:
            self._gate.asleep.end()
            return
        level, mode, parts = told
        await self._held.fall_asleep(level, mode)
        self._gate.asleep.begin(level, parts)
        self.front.inputs.forget_media()

    def _check_sleeps(self, name: str) -> None:
        """Raise VLLMValidationError for a core that would end in place of sleeping: its parent would end too."""
        if not sleeps_in_place(self.vllm_config.device_config.device_type):
            raise _for_one(name)

    async def scale_elastic_ep(self, new_data_parallel_size: int, drain_timeout: int = 300) -> NoReturn:
        """Raise VLLMValidationError: the engine has other front ends."""
        raise _for_one("scale_elastic_ep")


def _for_one(name: str) -> VLLMValidationError:
    return VLLMValidationError(f"{name} {_ONE_ONLY}", parameter="api_server_count")
