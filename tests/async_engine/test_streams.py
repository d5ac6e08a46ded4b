"""Streams of an asynchronous engine: readers that leave, are slow, or come from elsewhere; ids, loops, ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from jaxllm.engine.front.output_processor import OutputProcessor
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.engine.online.request_stream import RequestOutputCollector
from jaxllm.exceptions import EngineDeadError, EngineGenerateError, VLLMValidationError
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.detokenizer import Detokenizer
from jaxllm.text.logprobs import LogprobsCollector
from tests.async_engine.support import (
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

FAILURE = "what nobody has thought of"


def broken(*_args: Any, **_more: Any) -> Any:
    raise ZeroDivisionError(FAILURE)


def aborts(llm: AsyncLLM) -> float:
    return metric(llm, "request_success", finished_reason="abort")


def test_the_three_kinds_of_output_agree(mock: AsyncLLM) -> None:
    async def run() -> None:
        kinds = list(RequestOutputKind)
        runs = [read(mock, kind.name, greedy(n=2, seed=3, logprobs=2, output_kind=kind)) for kind in kinds]
        read_by_kind = dict(zip(kinds, await asyncio.gather(*runs), strict=True))
        deltas, cumulative = read_by_kind[RequestOutputKind.DELTA], read_by_kind[RequestOutputKind.CUMULATIVE]
        (final,) = read_by_kind[RequestOutputKind.FINAL_ONLY]
        assert cumulative[-1].outputs == final.outputs
        whole = deltas[0]
        for delta in deltas[1:]:
            whole.add(delta, aggregate=True)
        assert whole.outputs == final.outputs
        assert len(deltas) > 1 < len(cumulative)
        assert [each.text for each in final.outputs] != ["", ""]

    asyncio.run(run())


def test_a_slow_reader_gets_deltas_merged(mock: AsyncLLM) -> None:
    """One output is held for it, which has everything that has come."""

    async def run() -> None:
        params = greedy(max_tokens=40, seed=1, logprobs=1)
        reading = asyncio.create_task(read(mock, "swift", params))
        slow, num_read, held = None, 0, set[int]()
        async for output in mock.generate(ids(), params, "slow"):
            num_read += 1
            if slow is None:
                slow = output
            else:
                slow.add(output, aggregate=True)
            stream = mock._requests._running["slow"].reader if "slow" in mock._requests.ids() else None
            await asyncio.sleep(0.08)
            if isinstance(stream, RequestOutputCollector):
                held.add(len(stream._output.outputs) if stream._output is not None else 0)
        swift = await reading
        assert slow is not None
        assert num_read < 10 < len(swift)
        assert held == {1}
        assert list(slow.outputs[0].token_ids) == tokens_of(swift)
        assert slow.outputs[0].text == "".join(each.outputs[0].text for each in swift)
        assert slow.outputs[0].logprobs == [at for each in swift for at in each.outputs[0].logprobs or ()]
        assert slow.outputs[0].finish_reason == "length"

    asyncio.run(run())


@pytest.mark.parametrize("leave", ["close", "cancel", "abort"])
def test_a_reader_that_leaves_aborts_its_request(mock: AsyncLLM, leave: str) -> None:
    async def run() -> None:
        stream = mock.generate(ids(), greedy(max_tokens=400), "left")
        before = aborts(mock)

        async def read_on() -> None:
            async for _ in stream:
                started.set()

        started = asyncio.Event()
        if leave == "close":
            await anext(stream)
            await stream.aclose()
        else:
            task = asyncio.create_task(read_on())
            await started.wait()
            if leave == "cancel":
                task.cancel()
            else:
                await mock.abort(["left", "somebody else"])
            done, _ = await asyncio.wait([task])
            assert [each.cancelled() for each in done] == [leave == "cancel"]
        assert not mock._requests.ids()
        assert aborts(mock) == before + 1
        await until(lambda: metric(mock, "num_requests_running") == 0 or not remote_of(mock)._outputs)
        (final,) = await read(mock, "left", greedy(output_kind=RequestOutputKind.FINAL_ONLY))
        assert final.outputs[0].finish_reason == "length"
        assert metric(mock, "num_requests_running") == 0

    asyncio.run(run())


def test_aborting_several_gives_each_reader_its_end(mock: AsyncLLM) -> None:
    async def run() -> None:
        kinds = [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY]
        tasks = [
            asyncio.create_task(read(mock, kind.name, greedy(max_tokens=400, n=2, output_kind=kind))) for kind in kinds
        ]
        await asyncio.sleep(0.2)
        await mock.abort([kind.name for kind in kinds])
        for outputs in await asyncio.gather(*tasks):
            assert outputs[-1].finished
            assert [each.finish_reason for each in outputs[-1].outputs] == ["abort", "abort"]
        with pytest.raises(VLLMValidationError, match="request_id"):
            await mock.abort([7])  # type: ignore[list-item]

    asyncio.run(run())


def test_an_id_in_use_is_refused_and_nothing_happens_to_its_owner(mock: AsyncLLM) -> None:
    async def run() -> None:
        stream = mock.generate(ids(), greedy(max_tokens=20), "mine")
        await anext(stream)
        with pytest.raises(VLLMValidationError, match="'mine' is in use") as caught:
            await read(mock, "mine", greedy())
        assert caught.value.parameter == "request_id"
        assert [output async for output in stream][-1].finished
        await read(mock, "mine", greedy())

    asyncio.run(run())


def test_each_call_of_asyncio_run_has_its_loop(mock: AsyncLLM) -> None:
    """Also where the first loop has waited for what the second waits for."""

    async def run() -> list[int]:
        task = asyncio.create_task(read(mock, "a", greedy()))
        await asyncio.sleep(0.01)
        await mock.pause_generation(mode="wait")
        late = asyncio.create_task(read(mock, "b", greedy()))
        await asyncio.sleep(0.05)
        assert not late.done()
        await mock.resume_generation()
        return tokens_of(await task) + tokens_of(await late)

    assert asyncio.run(run()) == asyncio.run(run())


def test_requests_that_a_closed_loop_has_left_are_aborted(mock: AsyncLLM) -> None:
    async def leave() -> None:
        stream = mock.generate(ids(), greedy(max_tokens=400), "left behind")
        await anext(stream)
        task = asyncio.create_task(anext(mock.generate(ids(), greedy(max_tokens=400), "left too")))
        await asyncio.sleep(0.1)
        del task

    asyncio.run(leave())
    assert not mock._requests.ids()
    assert tokens_of(asyncio.run(read(mock, "left behind", greedy())))


def test_a_second_loop_is_told_so(mock: AsyncLLM) -> None:
    caught: list[BaseException] = []

    def elsewhere() -> None:
        for call in (lambda: read(mock, "b", greedy()), mock.check_health, mock.reset_prefix_cache):
            with pytest.raises(RuntimeError, match="belongs to another event loop") as error:
                asyncio.run(call())
            caught.append(error.value)

    async def run() -> None:
        stream = mock.generate(ids(), greedy(max_tokens=30), "a")
        await anext(stream)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        await asyncio.to_thread(thread.join)
        assert len(caught) == 3
        assert [output async for output in stream][-1].outputs[0].finish_reason == "length"

    asyncio.run(run())


@pytest.mark.parametrize("is_given_text", [True, False], ids=["text", "dictionary"])
def test_a_long_text_does_not_hold_up_the_loop(tokenizer: str, is_given_text: bool) -> None:
    text = "abc de fgh " * 90_000
    prompt: Any = text if is_given_text else {"prompt": text}
    args = tiny_args(tokenizer, hf_overrides={"max_position_embeddings": 1 << 20}, max_num_seqs=1)
    longest, ends = [0.0], [0.0]

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest[0], last = max(longest[0], now - last), now

    async def run() -> None:
        await read(llm, "short", greedy(max_tokens=1))
        ticking = asyncio.create_task(tick())
        started = time.perf_counter()
        (output,) = await read(llm, "long", greedy(max_tokens=1), prompt)
        ends[0] = time.perf_counter() - started
        assert output.prompt_token_ids is not None
        assert len(output.prompt_token_ids) > 500_000
        ticking.cancel()

    with mock_llm(args) as llm:
        asyncio.run(run())
    print(f"longest turn {longest[0] * 1e3:.0f} ms of {ends[0] * 1e3:.0f} ms")
    assert longest[0] < ends[0] / 5


def test_after_shutdown_everything_raises(tokenizer: str) -> None:
    """R7: also what is open at the time, and what waits for a paused engine."""

    async def run() -> None:
        open_one = asyncio.create_task(read(llm, "open", greedy(max_tokens=400)))
        await asyncio.sleep(0.1)
        llm._gate.unpaused.clear()
        waiting = asyncio.create_task(read(llm, "waiting", greedy()))
        await asyncio.sleep(0.05)
        calling = asyncio.create_task(llm.reset_prefix_cache())
        await asyncio.sleep(0)
        llm.shutdown()
        llm.shutdown()
        for task in (open_one, waiting):
            with pytest.raises(EngineDeadError, match="shut down"):
                await asyncio.wait_for(task, 2)
        with pytest.raises(EngineDeadError, match="shut down"):
            await calling
        for call in (lambda: read(llm, "late", greedy()), llm.check_health, llm.reset_prefix_cache, llm.sleep):
            with pytest.raises(EngineDeadError, match="shut down"):
                await call()
        assert llm.errored
        assert llm.is_stopped
        assert not llm.is_running
        assert isinstance(llm.dead_error, EngineDeadError)
        await llm.abort("open")

    with nothing_left(), mock_llm(tiny_args(tokenizer), tokens_per_second=100) as llm:
        asyncio.run(run())


@pytest.mark.parametrize("part", [(Detokenizer, "update"), (LogprobsCollector, "append")], ids=["text", "logprobs"])
def test_a_failure_in_making_one_output_ends_that_request_alone(
    mock: AsyncLLM, monkeypatch: pytest.MonkeyPatch, part: tuple[type, str]
) -> None:
    async def run() -> None:
        params = greedy(max_tokens=30, logprobs=1)
        expected = tokens_of(await read(mock, "before", params))
        others = [asyncio.create_task(read(mock, f"other {i}", params)) for i in range(3)]
        stream = mock.generate(ids(), params, "broken")
        await anext(stream)
        (sequence,) = mock.front.outputs._requests["broken"].sequences
        spoil(sequence.detokenizer if part[0] is Detokenizer else sequence.logprobs, part[1])
        outputs = [output async for output in stream]
        assert outputs[-1].outputs[0].finish_reason == "error"
        assert FAILURE in str(outputs[-1].outputs[0].stop_reason)
        assert [tokens_of(each) for each in await asyncio.gather(*others)] == [expected] * 3
        await mock.check_health()

    def spoil(target: Any, name: str) -> None:
        whole = getattr(type(target), name)

        def update(self: Any, *args: Any, **more: Any) -> Any:
            return broken() if self is target else whole(self, *args, **more)

        monkeypatch.setattr(type(target), name, update)

    asyncio.run(run())


def test_a_failure_in_handing_on_a_step_leaves_nobody_waiting(mock: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that run end with an error, the core drops them, and the engine goes on."""

    async def run() -> None:
        tasks = [asyncio.create_task(read(mock, f"{i}", greedy(max_tokens=400))) for i in range(3)]
        await asyncio.sleep(0.1)
        with monkeypatch.context() as spoiled:
            spoiled.setattr(OutputProcessor, "process_outputs", broken)
            ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 2)
        assert [type(each) for each in ends] == [EngineGenerateError] * 3
        assert FAILURE in str(ends[0])
        assert tokens_of(await read(mock, "next", greedy()))
        assert metric(mock, "num_requests_running") == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("params", "prompt", "parameter"),
    [
        (lambda: SamplingParams(prompt_logprobs=1), None, "prompt_logprobs"),
        (lambda: SamplingParams(min_tokens=600, max_tokens=600), None, "min_tokens"),
        (greedy, {"prompt_token_ids": [300]}, "prompt_token_ids"),
        (greedy, {"prompt_token_ids": [5] * 600}, "prompt"),
    ],
)
def test_what_cannot_be_run_is_refused_before_any_token(
    mock: AsyncLLM, params: Callable[[], SamplingParams], prompt: Any, parameter: str
) -> None:
    """The first is refused by the core, the others here; either way nothing is left of them."""
    with pytest.raises(VLLMValidationError) as caught:
        asyncio.run(read_one(mock, "bad", params(), prompt))
    assert caught.value.parameter == parameter
    assert not mock._requests.ids()
    assert mock._requests._admission.num_reqs == mock._requests._admission.num_tokens == 0
