"""A stream is timed by a clock that the test turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from jaxllm.cli.bench.datasets import Sample
from jaxllm.cli.bench.figures import Result
from jaxllm.cli.bench.load import time_stream
from jaxllm.cli.client.openai_client import Choice, Chunk, Delta, RequestError, Usage

SAMPLE = Sample("hello", 3, 8)


def text(added: str | None, finish_reason: str | None = None) -> Chunk:
    return Chunk(choices=[Choice(text=added, finish_reason=finish_reason)])


def delta(**fields: str) -> Chunk:
    return Chunk(choices=[Choice(delta=Delta(**fields))])


def timed(script: Sequence[tuple[float, Chunk | RequestError]], end: float) -> Result:
    """Time a stream whose events come at the given readings of the clock, and which ends at `end`."""
    now = 100.0

    async def chunks() -> AsyncGenerator[Chunk, None]:
        nonlocal now
        for moment, chunk in script:
            now = 100.0 + moment
            if isinstance(chunk, RequestError):
                raise chunk
            yield chunk
        now = 100.0 + end

    return asyncio.run(time_stream(chunks(), SAMPLE, len, lambda: now))


def test_completions():
    usage = Chunk(usage=Usage(prompt_tokens=4, completion_tokens=6))
    result = timed([(1, text("a")), (1.5, text("b")), (3, text("c", "length")), (3.25, usage)], 4)
    assert (result.ttft, result.itl, result.latency) == (1.0, [0.5, 1.5], 4.0)
    assert (result.prompt_len, result.output_len, result.text, result.error) == (4, 6, "abc", None)
    assert result.tpot == pytest.approx(3 / 5)


def test_a_chats_first_token_is_its_first_text():
    """The event with the role says nothing of when the model began to answer; reasoning is text."""
    result = timed([(1, delta(content="")), (2, delta(reasoning="x")), (3, delta(content="y")), (4, delta())], 5)
    assert (result.ttft, result.itl, result.text) == (2.0, [1.0], "xy")


def test_without_usage_the_tokenizer_counts():
    result = timed([(1, text("abc"))], 2)
    assert (result.prompt_len, result.output_len) == (3, 3)


def test_a_token_without_text_is_an_answer():
    result = timed([(1, text("", "length")), (2, Chunk(usage=Usage(prompt_tokens=4, completion_tokens=1)))], 3)
    assert (result.ttft, result.output_len, result.error) == (3.0, 1, None)


def test_errors():
    result = timed([(1, text("a")), (2, RequestError("cut off"))], 3)
    assert (result.error, result.text, result.latency) == ("cut off", "a", 2.0)
    assert timed([], 1).error == "the answer is empty"
