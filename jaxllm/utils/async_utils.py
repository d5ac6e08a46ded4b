"""Helpers for programs with an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

LONG = 2000
"""Work on more characters, ids or numbers than these is done in a thread. A token of a text takes 2.5 microseconds."""


async def threaded_if_long[**P, T](size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function, in a thread if it works on more than LONG items, so that other requests do not wait."""
    return await asyncio.to_thread(function, *args, **kwargs) if size > LONG else function(*args, **kwargs)


class Turns:
    """Lets a few tasks go on in each turn of the event loop. The loop looks after sockets in between, so that many
    tasks at once hold them up no longer than these few. For one event loop.
    """

    def __init__(self, most: int) -> None:
        """Let at most this many tasks go on in a turn."""
        self._most = self._left = most
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Wait for a turn in which not too many other tasks have gone on."""
        loop = asyncio.get_running_loop()
        if self._left == self._most:
            loop.call_soon(self._pass, loop)
        if self._left:
            self._left -= 1
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _pass(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give the next turn to tasks that wait."""
        self._left = self._most
        while self._waiting and self._left:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                self._left -= 1
        if self._left < self._most:
            loop.call_soon(self._pass, loop)


async def merge_async_iterators[T](*iterators: AsyncIterator[T]) -> AsyncGenerator[tuple[int, T], None]:
    """Merge iterators: yield (i, item) for each item of the i-th iterator, as items arrive.

    Raises what an iterator raises. On an error, or when the caller stops, the unfinished iterators are closed, which
    aborts the requests of `AsyncLLM.generate`.
    """
    waiting = {_next(each): (i, each) for i, each in enumerate(iterators)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i, iterator = waiting[task]
                try:
                    item = task.result()
                except StopAsyncIteration:
                    del waiting[task]
                    continue
                yield i, item
                del waiting[task]
                waiting[_next(iterator)] = i, iterator
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for _, iterator in waiting.values():
            if isinstance(iterator, AsyncGenerator):
                await iterator.aclose()


def _next[T](iterator: AsyncIterator[T]) -> asyncio.Task[T]:
    async def following() -> T:
        return await anext(iterator)

    return asyncio.create_task(following())


def start_worker_threads() -> None:
    """Start all the threads that `asyncio.to_thread` may use in the running loop, instead of on demand.

    Started on demand, they would let a server's memory grow for hours: each thread has a heap of its own.
    """
    num = min(32, (os.cpu_count() or 1) + 4)
    executor, all_run = ThreadPoolExecutor(num, thread_name_prefix="jaxllm-worker"), threading.Barrier(num)
    for _ in range(num):
        executor.submit(all_run.wait)
    asyncio.get_running_loop().set_default_executor(executor)
