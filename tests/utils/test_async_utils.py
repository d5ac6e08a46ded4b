"""Merging the streams of several requests into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from jaxllm.utils import random_uuid
from jaxllm.utils.async_utils import merge_async_iterators


class Stream:
    """Yields a letter at each of some times, in hundredths of a second, and knows whether it was closed early."""

    def __init__(self, *letters: tuple[int, str], error: Exception | None = None) -> None:
        self.letters, self.error = letters, error
        self.was_closed = False

    async def read(self) -> AsyncGenerator[str, None]:
        now = 0
        try:
            for at, letter in self.letters:
                await asyncio.sleep((at - now) / 100)
                now = at
                yield letter
            if self.error is not None:
                raise self.error
        except (GeneratorExit, asyncio.CancelledError):
            self.was_closed = True
            raise


def test_items_come_as_they_are_made_until_all_have_ended() -> None:
    streams = [Stream((0, "a"), (8, "d")), Stream((2, "b"), (4, "c")), Stream()]

    async def run() -> list[tuple[int, str]]:
        return [item async for item in merge_async_iterators(*(each.read() for each in streams))]

    assert asyncio.run(run()) == [(0, "a"), (1, "b"), (1, "c"), (0, "d")]
    assert not any(each.was_closed for each in streams)


def test_one_and_none() -> None:
    async def run(*streams: Stream) -> list[tuple[int, str]]:
        return [item async for item in merge_async_iterators(*(each.read() for each in streams))]

    assert asyncio.run(run()) == []
    assert asyncio.run(run(Stream((0, "a"), (0, "b")))) == [(0, "a"), (0, "b")]


def test_an_error_closes_the_others() -> None:
    bad, waiting, begun = Stream((3, "x"), error=OSError("gone")), Stream((500, "y")), Stream((0, "z"), (500, "z"))

    async def run() -> list[str]:
        letters = []
        with pytest.raises(OSError, match="gone"):  # noqa: PT012 - the loop is what raises
            async for _, letter in merge_async_iterators(bad.read(), waiting.read(), begun.read()):
                letters.append(letter)
        return letters

    assert asyncio.run(run()) == ["z", "x"]
    assert waiting.was_closed
    assert begun.was_closed


def test_leaving_closes_all() -> None:
    streams = [Stream((0, "a"), (0, "b")), Stream((500, "c"))]

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
