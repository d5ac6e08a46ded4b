"""Requests that come and go in numbers: everything is given back, and the bounds on what waits are exact."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm import SamplingParams
from jaxllm.engine.core.engine_core import EngineCore
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import EngineBusyError, MaxQueuedTokensError, QueueOverflowError, VLLMValidationError
from jaxllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from tests.async_engine.support import (
    END_SECONDS,
    PROMPT,
    greedy,
    ids,
    metric,
    mock_llm,
    nothing_left,
    read,
    read_one,
    remote_of,
    tiny_args,
    tokens_of,
    until,
)

pytestmark = pytest.mark.server

NUM_REQUESTS = 300
NUM_CANCELLED = 200


@pytest.fixture(scope="module", params=["process", "thread"])
def llm(request: pytest.FixtureRequest, tokenizer: str) -> Iterator[AsyncLLM]:
    """Return an engine with a model and few blocks."""
    args = tiny_args(tokenizer, block_size=16, num_gpu_blocks_override=65)
    with nothing_left():
        in_thread = request.param == "thread"
        with AsyncLLM.from_engine_args(args, disable_frontend_multiprocessing=in_thread) as llm:
            yield llm


def is_idle(llm: AsyncLLM) -> bool:
    names = ("num_requests_running", "num_requests_waiting")
    return not llm._requests.ids() and all(metric(llm, name) == 0 for name in names)


async def assert_all_given_back(llm: AsyncLLM) -> None:
    """Check that nothing waits or runs, and that all blocks come back, in time."""
    await read(llm, "a step for the metrics", greedy(max_tokens=1))
    await until(lambda: is_idle(llm))
    assert await llm.reset_prefix_cache()
    await read(llm, "the first step with nothing cached", greedy(max_tokens=1))
    await until(lambda: metric(llm, "kv_cache_usage_perc") == 0)
    admission = llm._requests._admission
    assert (admission.num_reqs, admission.num_tokens) == (0, 0)
    outputs = llm.front.outputs
    assert not outputs._requests
    assert not outputs._sequences


def core_in_thread(llm: AsyncLLM) -> EngineCore | None:
    """Return the core that runs in a thread of this process, if this one does."""
    if hasattr(remote_of(llm).handle, "pid"):
        return None
    return next(each for each in gc.get_objects() if isinstance(each, EngineCore) and each._runner is not None)


def some_request(rng: random.Random) -> tuple[Any, SamplingParams]:
    """Return a request: short or long, of one sequence or four, with a grammar or without."""
    prompt = [rng.randrange(7, 256) for _ in range(rng.choice([3, 20, 90]))]
    fields: dict[str, Any] = {"max_tokens": rng.choice([1, 5, 60]), "n": rng.choice([1, 1, 1, 4])}
    if rng.random() < 0.3:
        fields["structured_outputs"] = StructuredOutputsParams(regex=f"[a-f]{{{rng.randrange(1, 9)},40}}")
    return ids(prompt), greedy(temperature=1.0, seed=rng.randrange(99), **fields)


def test_r5_readers_that_leave_at_any_time_leave_nothing(llm: AsyncLLM) -> None:
    """R5: before prefill, in the middle of it, among the tokens, at the last step; n = 4; with grammars."""
    rng = random.Random(5)

    async def visit(index: int) -> str:
        prompt, params = some_request(rng)
        stream = llm.generate(prompt, params, f"visit {index}")
        await asyncio.sleep(rng.random() * 3)
        if rng.random() < 0.5:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rng.choice([0, 0.001, 0.02, 0.2, 60])):
                    async for _ in stream:
                        pass
                return "whole"
            return "cut off"
        left = rng.choice([1, 2, params.max_tokens or 1])
        async for _ in stream:
            left -= 1
            if left == 0:
                break
        await stream.aclose()
        return "left"

    async def run() -> None:
        ends = await asyncio.gather(*map(visit, range(NUM_REQUESTS)))
        assert set(ends) == {"whole", "cut off", "left"}
        await assert_all_given_back(llm)
        core = core_in_thread(llm)
        if core is not None:
            assert not core._live
            assert not core._preparing
            assert not core._masks._rules
            assert not core._masks._compiling
            core._scheduler.check()

    asyncio.run(run())


def test_r6_a_crowd_that_cancels_gives_way_at_once(llm: AsyncLLM) -> None:
    """R6: 200 requests for long outputs are cancelled after half a second."""

    async def run() -> None:
        tasks = [asyncio.create_task(read(llm, f"{i}", greedy(max_tokens=400))) for i in range(NUM_CANCELLED)]
        await asyncio.sleep(0.5)
        assert sum(task.done() for task in tasks) < NUM_CANCELLED / 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        cancelled = time.monotonic()
        assert len(tokens_of(await read(llm, "next", greedy()))) == 8
        assert time.monotonic() - cancelled < 5
        await until(lambda: is_idle(llm), cancelled + 5 - time.monotonic())
        await assert_all_given_back(llm)

    asyncio.run(run())


@pytest.mark.parametrize(
    "grammar", [{"regex": "(ab"}, {"json": {"type": "nothing"}}, {"grammar": 'root ::= "a" missing'}]
)
def test_a_bad_grammar_is_refused_before_any_token(llm: AsyncLLM, grammar: dict[str, Any]) -> None:
    async def run() -> None:
        well = asyncio.create_task(read(llm, "well", greedy(max_tokens=40)))
        params = greedy(structured_outputs=StructuredOutputsParams(**grammar))
        with pytest.raises(VLLMValidationError) as caught:
            await llm.add_request("bad", ids(), params)
        assert [caught.value.parameter] == list(grammar)
        assert len(tokens_of(await well)) == 40

    asyncio.run(run())


def test_a_cache_is_reset_while_nothing_runs(llm: AsyncLLM) -> None:
    async def run() -> None:
        stream = llm.generate(ids(), greedy(max_tokens=400), "runs")
        await anext(stream)
        assert not await llm.reset_prefix_cache()
        assert await llm.reset_prefix_cache(reset_running_requests=True)
        await anext(stream)
        await stream.aclose()
        long_prompt = ids(list(range(20, 100)))
        await read_one(llm, "first", greedy(), long_prompt)
        assert (await read_one(llm, "again", greedy(), long_prompt)).num_cached_tokens == 64
        await llm.pause_generation()
        assert await llm.is_paused()
        late = asyncio.create_task(read_one(llm, "late", greedy(), long_prompt))
        await asyncio.sleep(0.1)
        assert not late.done()
        await llm.resume_generation()
        assert (await late).num_cached_tokens == 0

    asyncio.run(run())


def test_a_refused_mode_leaves_the_engine_as_it_was(mock: AsyncLLM) -> None:
    async def run() -> None:
        calls: list[tuple[Any, str]] = [(mock.pause_generation, "hold"), (mock.sleep, "keep")]
        for call, mode in calls:
            with pytest.raises(VLLMValidationError, match="mode must be"):
                await call(mode=mode)
        assert not await mock.is_paused()
        assert not await mock.is_sleeping()
        assert tokens_of(await read(mock, "next", greedy()))

    asyncio.run(run())


def test_the_bound_on_requests_is_exact(tokenizer: str) -> None:
    """n counts as n, all or none; places come back at an end, when a reader leaves, and when a request is refused."""

    async def run() -> None:
        params = [greedy(n=1 + i % 3, max_tokens=30) for i in range(12)]
        ends = await asyncio.gather(*(read(llm, f"{i}", each) for i, each in enumerate(params)), return_exceptions=True)
        room, taken = 10, []
        for param in params:
            taken.append(param.n <= room)
            room -= param.n if taken[-1] else 0
        assert [not isinstance(each, QueueOverflowError) for each in ends] == taken
        assert room == 0
        num_refused = taken.count(False)
        assert metric(llm, "admission_rejections", reason="max_num_queued_reqs") == num_refused
        for _ in range(3):
            stream = llm.generate(ids(), greedy(n=10), "all")
            await anext(stream)
            with pytest.raises(EngineBusyError, match="max_num_queued_reqs=10"):
                await read(llm, "one more", greedy())
            await stream.aclose()
            with pytest.raises(VLLMValidationError):
                await read(llm, "bad", greedy(n=10), ids([400]))
        with pytest.raises(QueueOverflowError):
            await read(llm, "eleven", greedy(n=11))
        assert len(await read(llm, "ten", greedy(n=10, output_kind=RequestOutputKind.FINAL_ONLY))) == 1

    args = tiny_args(tokenizer, max_num_queued_reqs=10)
    with mock_llm(args, tokens_per_second=200) as llm:
        asyncio.run(run())


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_the_bound_on_tokens_counts_prompts_without_output(tokenizer: str, kind: RequestOutputKind) -> None:
    async def run() -> None:
        tasks = [asyncio.create_task(read(llm, f"{i}", greedy(max_tokens=60, output_kind=kind))) for i in range(3)]
        ends, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=0.05)
        assert [type(each.exception()) for each in ends] == [MaxQueuedTokensError]
        assert metric(llm, "admission_rejections", reason="max_num_queued_tokens") == 1
        await until(lambda: llm._requests._admission.num_tokens == 0)
        assert sum(not task.done() for task in tasks) == 2
        assert await read(llm, "after their first tokens", greedy(max_tokens=1))
        await asyncio.gather(*tasks, return_exceptions=True)

    args = tiny_args(tokenizer, max_num_queued_tokens=2 * len(PROMPT) + 3)
    with mock_llm(args, tokens_per_second=20) as llm:
        asyncio.run(run())


def test_r7_draining_completes_what_runs_and_refuses_the_rest(tokenizer: str) -> None:
    async def run() -> None:
        tasks = [asyncio.create_task(read(llm, f"{i}", greedy(max_tokens=40))) for i in range(4)]
        await asyncio.sleep(0.1)
        draining = asyncio.create_task(llm.drain(30))
        await asyncio.sleep(0)
        assert not llm.is_running
        with pytest.raises(Exception, match="takes no more requests"):
            await read(llm, "late", greedy())
        assert await draining
        assert [len(tokens_of(each)) for each in await asyncio.gather(*tasks)] == [40] * 4
        assert await llm.drain(0)

    with nothing_left(), mock_llm(tiny_args(tokenizer), tokens_per_second=100) as llm:
        asyncio.run(run())


def test_r7_draining_without_time_aborts(tokenizer: str) -> None:
    async def run() -> None:
        tasks = [asyncio.create_task(read(llm, f"{i}", greedy(max_tokens=400))) for i in range(4)]
        await asyncio.sleep(0.1)
        assert not await llm.drain(0)
        ends = await asyncio.wait_for(asyncio.gather(*tasks), END_SECONDS)
        assert [each[-1].outputs[0].finish_reason for each in ends] == ["abort"] * 4

    with nothing_left(), mock_llm(tiny_args(tokenizer), tokens_per_second=100) as llm:
        asyncio.run(run())


def test_a_grammar_that_comes_to_a_dead_end_ends_its_request_alone(llm: AsyncLLM) -> None:
    """No token of this model begins the third character."""

    async def run() -> None:
        well = asyncio.create_task(read(llm, "well", greedy(max_tokens=40)))
        outputs = await read(llm, "dead end", greedy(structured_outputs=StructuredOutputsParams(regex="ab\u65e5")))
        assert outputs[-1].outputs[0].finish_reason == "error"
        assert outputs[-1].outputs[0].stop_reason
        assert "".join(each.outputs[0].text for each in outputs) == "ab"
        assert len(tokens_of(await well)) == 40

    asyncio.run(run())
