"""Merging the streams of several requests into one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator

import pytest

from jaxllm.utils import random_uuid
from jaxllm.utils.async_utils import Turns, merge_async_iterators, start_worker_threads


class Stream:
    """Yields letters, then rests, fails or ends; knows whether it was closed early."""

    def __init__(self, letters: str, *, error: Exception | None = None, rests: bool = False) -> None:
        self.letters, self.error, self.rests = letters, error, rests
        self.was_closed = False

    async def read(self) -> AsyncGenerator[str, None]:
        try:
            for letter in self.letters:
                yield letter
            if self.rests:
                await asyncio.Event().wait()
            if self.error is not None:
                raise self.error
        except (GeneratorExit, asyncio.CancelledError):
            self.was_closed = True
            raise


def test_items_come_as_they_are_made_until_all_have_ended() -> None:
    async def read(letters: asyncio.Queue[str]) -> AsyncGenerator[str, None]:
        while letter := await letters.get():
            yield letter

    async def run() -> list[tuple[int, str]]:
        queues: list[asyncio.Queue[str]] = [asyncio.Queue(), asyncio.Queue(), asyncio.Queue()]
        merged = merge_async_iterators(*map(read, queues))
        queues[2].put_nowait("")
        items = []
        for index, letter in [(0, "a"), (1, "b"), (1, "c"), (0, "d")]:
            queues[index].put_nowait(letter)
            items.append(await anext(merged))
        queues[0].put_nowait("")
        queues[1].put_nowait("e")
        queues[1].put_nowait("")
        return [*items, *[item async for item in merged]]

    assert asyncio.run(run()) == [(0, "a"), (1, "b"), (1, "c"), (0, "d"), (1, "e")]


def test_one_and_none() -> None:
    async def run(*streams: Stream) -> list[tuple[int, str]]:
        return [item async for item in merge_async_iterators(*(each.read() for each in streams))]

    assert asyncio.run(run()) == []
    assert asyncio.run(run(Stream("ab"))) == [(0, "a"), (0, "b")]


def test_an_error_closes_the_others() -> None:
    bad, waiting, begun = Stream("x", error=OSError("gone")), Stream("", rests=True), Stream("z", rests=True)

    async def run() -> list[str]:
        letters = []
        with pytest.raises(OSError, match="gone"):  # noqa: PT012 - the loop is what raises
            async for _, letter in merge_async_iterators(bad.read(), waiting.read(), begun.read()):
                letters.append(letter)
        return letters

    assert sorted(asyncio.run(run())) == ["x", "z"]
    assert waiting.was_closed
    assert begun.was_closed


def test_leaving_closes_all() -> None:
    streams = [Stream("ab"), Stream("", rests=True)]

    async def run() -> None:
        merged = merge_async_iterators(*(each.read() for each in streams))
        assert await anext(merged) == (0, "a")
        await merged.aclose()

    asyncio.run(run())
    assert [each.was_closed for each in streams] == [True, True]


def test_names_are_never_the_same() -> None:
    names = {random_uuid() for _ in range(1000)}
    assert len(names) == 1000
    assert {len(each) for each in names} == {32}


def test_as_many_calls_as_there_are_workers_start_no_thread() -> None:
    async def run() -> None:
        start_worker_threads()
        before = threading.active_count()
        num = sum(thread.name.startswith("jaxllm-worker") for thread in threading.enumerate())
        all_run = threading.Barrier(num)
        await asyncio.gather(*(asyncio.to_thread(all_run.wait, 30) for _ in range(num)))
        assert threading.active_count() == before

    asyncio.run(run())


def test_a_few_tasks_go_on_in_each_turn() -> None:
    async def run() -> list[str]:
        loop, turns, order = asyncio.get_running_loop(), Turns(2), list[str]()

        async def go(i: int) -> None:
            await turns.take()
            order.append(f"task {i}")
            loop.call_soon(order.append, "between")

        tasks = [asyncio.create_task(go(i)) for i in range(6)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.wait(tasks)
        await asyncio.sleep(0)
        await go(9)
        await asyncio.sleep(0)
        return order

    turns = ((0, 1), (2, 4), (5,), (9,))
    assert asyncio.run(run()) == [
        word for tasks in turns for word in ([f"task {i}" for i in tasks] + ["between"] * len(tasks))
    ]
