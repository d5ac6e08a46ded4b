"""How asynchronous engines are made of engine arguments, by the class methods of vLLM's `AsyncLLM`, and end."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, Self

from jaxllm.engine.front.front_end import FrontEnd, refuse_given
from jaxllm.engine.online.admission import Admission
from jaxllm.engine.start import start_in_process, start_in_thread
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.resolve.discovery import on_this_host
from jaxllm.utils.log import configure_log

if TYPE_CHECKING:
    from jaxllm.engine.client.remote_client import RemoteClient
    from jaxllm.usage.usage_lib import UsageContext

POLL_SECONDS = 0.2

type Start = Callable[[], tuple[RemoteClient, FrontEnd]]
"""What starts a core and its front end, as often as it is called."""


class FromArguments(ABC):
    """A base of engines that say how their core is started, what they admit, and whether they log requests.

    An engine ends with the block of a `with`, or of an `async with`, during whose end the event loop goes on.
    """

    max_log_len: int | None = None
    """How many characters or token ids of a prompt are logged at most."""

    @abstractmethod
    def __init__(self, start: Start, *, admission: Admission, logs_requests: bool = False) -> None:
        """Start an engine; use `from_engine_args`."""

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine."""

    @abstractmethod
    async def aclose(self, timeout: float | None = None) -> None:
        """End the engine, while the event loop goes on."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    @classmethod
    def from_engine_args(
        cls,
        engine_args: AsyncEngineArgs,
        start_engine_loop: bool = True,
        usage_context: UsageContext | None = None,
        stat_loggers: Any = None,
        *,
        disable_frontend_multiprocessing: bool = False,
    ) -> Self:
        """Start an engine; returns when it is ready. With disable_frontend_multiprocessing its core is a thread."""
        del start_engine_loop, usage_context  # it starts with the first request; nothing is reported to anybody
        refuse_given(stat_loggers=stat_loggers)
        engine_args = AsyncEngineArgs.of(engine_args)
        if engine_args.log_config_file is not None:
            configure_log(engine_args.log_config_file)
        engine_args = on_this_host(engine_args)
        begin = start_in_thread if disable_frontend_multiprocessing else start_in_process
        engine = cls(
            lambda: begin(engine_args, asks_core=False),
            admission=Admission(engine_args.max_num_queued_reqs, engine_args.max_num_queued_tokens),
            logs_requests=engine_args.enable_log_requests,
        )
        engine.max_log_len = engine_args.max_log_len
        return engine

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: Any,
        start_engine_loop: bool = True,
        usage_context: UsageContext | None = None,
        stat_loggers: Any = None,
        enable_log_requests: bool | None = None,
        aggregate_engine_logging: bool = False,
        disable_log_stats: bool | None = None,
        client_addresses: Any = None,
        client_count: int = 1,
        client_index: int = 0,
        *,
        disable_log_requests: bool | None = None,
    ) -> Self:
        """Start an engine of what `AsyncEngineArgs.create_engine_config` returned: the core resolves it."""
        del aggregate_engine_logging  # one engine's line is that of all
        refuse_given(
            client_addresses=client_addresses,
            client_count=None if client_count == 1 else client_count,
            client_index=client_index or None,
        )
        engine_args = AsyncEngineArgs.of_config(
            vllm_config,
            enable_log_requests=enable_log_requests,
            disable_log_requests=disable_log_requests,
            disable_log_stats=disable_log_stats,
        )
        return cls.from_engine_args(engine_args, start_engine_loop, usage_context, stat_loggers)


def end_from_thread(loop: asyncio.AbstractEventLoop | None, close: Callable[[], Coroutine[Any, Any, None]]) -> bool:
    """Have `close()` run on an event loop that runs in another thread, and wait for its end; False if none does."""
    if loop is None or loop is asyncio._get_running_loop():
        return False
    if not loop.is_running():
        return False
    closing = asyncio.run_coroutine_threadsafe(close(), loop)
    while loop.is_running() and not wait([closing], POLL_SECONDS).done:
        pass
    if not closing.done() or closing.cancelled():  # the loop has ended first
        return False
    closing.result()
    return True
