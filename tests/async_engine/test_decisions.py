"""`AsyncLLM.decide`: decisions that end early leave nothing, and count in the bounds like their rows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from jaxllm.engine.online.admission import Admission
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import EngineGenerateError, QueueOverflowError, VLLMValidationError
from tests.async_engine.support import greedy, mock_llm, read, tiny_args, until
from tests.server.support import TEMPLATE

pytestmark = pytest.mark.server

QUESTIONS: dict[str, Any] = {
    str(i): {"type": "choice", "instructions": "?", "criteria": dict.fromkeys(("first", "second", "third"))}
    for i in range(20)
}


def run(tokenizer: str, work: Callable[[AsyncLLM], Awaitable[None]], **bounds: Any) -> None:
    """Run a coroutine on an engine without a model that makes a token a second for each request."""
    args = tiny_args(tokenizer, chat_template=TEMPLATE, **bounds)
    with mock_llm(args, tokens_per_second=1) as llm:
        asyncio.run(asyncio.wait_for(work(llm), 30))


def is_idle(llm: AsyncLLM) -> bool:
    admission: Admission = llm.admission
    return not (llm._requests.ids() or admission.num_reqs or admission.num_tokens)


async def begun(llm: AsyncLLM) -> asyncio.Task[Any]:
    """Return a decision whose rows are queued."""
    task = asyncio.create_task(llm.decide("state", QUESTIONS, "asked"))
    await until(lambda: len(llm._requests.ids()) > len(QUESTIONS))
    return task


def test_aborted_decisions_fail_and_leave_nothing(tokenizer: str) -> None:
    async def work(llm: AsyncLLM) -> None:
        task = await begun(llm)
        with pytest.raises(VLLMValidationError, match="in use"):
            await llm.decide("state", QUESTIONS, "asked")
        await llm.abort("asked")
        with pytest.raises(EngineGenerateError, match="aborted"):
            await task
        assert is_idle(llm)

    run(tokenizer, work)


def test_cancelled_decisions_leave_nothing(tokenizer: str) -> None:
    async def work(llm: AsyncLLM) -> None:
        task = await begun(llm)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert is_idle(llm)
        assert len(await read(llm, "later", greedy(max_tokens=1))) == 1

    run(tokenizer, work)


def test_rows_count_as_requests(tokenizer: str) -> None:
    async def work(llm: AsyncLLM) -> None:
        with pytest.raises(QueueOverflowError):
            await llm.decide("state", QUESTIONS, "asked")
        assert is_idle(llm)
        few = {"a": {"type": "noul", "instructions": "?"}}
        assert (await llm.decide("state", few, "few")).answers["a"].probabilities
        assert is_idle(llm)

    run(tokenizer, work, max_num_queued_reqs=len(QUESTIONS))


def test_an_engine_that_ends_ends_its_decisions(tokenizer: str) -> None:
    async def work(llm: AsyncLLM) -> None:
        task = await begun(llm)
        llm.cut_off(EngineGenerateError("cut off"))
        with pytest.raises(EngineGenerateError, match="cut off"):
            await task
        assert is_idle(llm)

    run(tokenizer, work)
