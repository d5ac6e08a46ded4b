"""Start and end the engine of one model, whose core has a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable

from jaxllm.engine.client.fork_server import ForkServer
from jaxllm.engine.client.remote_client import RemoteClient
from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.engine.front.start import meet, start_processes
from jaxllm.engine.online.admission import Admission
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.server.models.entry import ModelEntry, Served
from jaxllm.usage.usage_lib import UsageContext

logger = logging.getLogger(__name__)

_LAST_SECONDS = 0.5
"""The time that a core has to end before it is killed. It has no requests, and may be compiling ahead."""

type Make[R: Served] = Callable[[ModelEntry[R], AsyncLLM], Awaitable[R]]
"""Makes what answers a model's requests by way of an engine."""


class EngineLoader[R: Served]:
    """Starts and ends the engine of one model."""

    def __init__(self, engine_args: AsyncEngineArgs, make: Make[R], forks: ForkServer) -> None:
        """Start engines with these arguments, by `forks`; `make` makes what answers requests by way of one."""
        self._args, self._make, self._forks = engine_args, make, forks
        self._lock = threading.Lock()
        self._starting: RemoteClient | None = None
        self._is_stopped = False

    async def load(self, entry: ModelEntry[R]) -> R:
        """Start an engine, and return what answers requests.

        Raises VLLMValidationError for arguments that cannot be served, EngineDeadError if the engine ends meanwhile.
        """
        logger.info("loading %s", entry.name)
        engine = await asyncio.to_thread(self._start)
        try:
            await asyncio.to_thread(engine.front.inputs.prepare_media)
            return await self._make(entry, engine)
        except BaseException:
            await engine.aclose(_LAST_SECONDS)
            raise

    async def close(self, record: R) -> None:
        """End the engine, and release its memory."""
        await record.engine.aclose(_LAST_SECONDS)

    def stop(self) -> None:
        """End a start that is under way, and every later one: `load` then raises EngineDeadError."""
        with self._lock:
            self._is_stopped = True
            self._kill()

    def _start(self) -> AsyncLLM:
        args = self._args
        engine = AsyncLLM(
            self._start_core,
            admission=Admission.of(args),
            logs_requests=args.enable_log_requests,
            reasoning_parser=args.reasoning_parser,
        )
        engine.max_log_len = args.max_log_len
        return engine

    def _start_core(self) -> tuple[RemoteClient, FrontEnd]:
        core = start_processes(self._args, UsageContext.OPENAI_API_SERVER, forks=self._forks)
        with self._lock:
            self._starting = core
            if self._is_stopped:
                self._kill()
        try:
            return meet(core, self._args, asks_core=False)
        finally:
            with self._lock:
                self._starting = None
            self._forks.begin()  # it may have been killed

    def _kill(self) -> None:
        """Kill the core that starts: another thread waits for it, and then sees that it has ended."""
        pids = {} if self._starting is None else self._starting.process_ids
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
