"""Programs written for vLLM run against an engine with a core that has no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.engine.online.running_requests import log_request
from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.utils import random_uuid
from jaxllm.utils.async_utils import merge_async_iterators
from tests.async_engine.support import greedy, ids, metric, read, read_one, until

KINDS = list(RequestOutputKind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 3])
def test_an_abort_ends_the_stream_with_what_there_is(mock: AsyncLLM, kind: RequestOutputKind, n: int) -> None:
    async def run() -> list[RequestOutput]:
        name, num_before = random_uuid(), metric(mock, "generation_tokens")
        task = asyncio.create_task(read(mock, name, greedy(max_tokens=100, n=n, output_kind=kind, temperature=1.0)))
        await until(lambda: metric(mock, "generation_tokens") >= num_before + 2 * n)
        await mock.abort([name, "nobody's"])
        return await asyncio.wait_for(task, 2)

    *before, last = asyncio.run(run())
    assert last.finished
    assert not any(each.finished for each in before)
    assert [(each.index, each.finish_reason, each.stop_reason) for each in last.outputs] == [
        (index, "abort", None) for index in range(n)
    ]
    assert last.num_cached_tokens == 0
    if kind is RequestOutputKind.FINAL_ONLY:
        assert before == []
    if kind is RequestOutputKind.DELTA:
        assert sum(len(each.token_ids) for output in before for each in output.outputs) > 0
    else:
        assert all(len(each.token_ids) > 0 for each in last.outputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 3])
def test_only_the_last_output_is_finished_and_all_tokens_come(mock: AsyncLLM, kind: RequestOutputKind, n: int) -> None:
    outputs = asyncio.run(read(mock, random_uuid(), greedy(n=n, output_kind=kind, temperature=1.0)))
    assert [each.finished for each in outputs] == [False] * (len(outputs) - 1) + [True]
    if kind is RequestOutputKind.DELTA:
        counts = [0] * n
        for output in outputs:
            for completion in output.outputs:
                counts[completion.index] += len(completion.token_ids)
    else:
        counts = [len(each.token_ids) for each in outputs[-1].outputs]
    assert counts == [8] * n
    assert len(outputs) == 1 or kind is not RequestOutputKind.FINAL_ONLY


def test_a_later_vllm_s_keywords(mock: AsyncLLM) -> None:
    async def run(**arguments: Any) -> RequestOutput:
        stream = mock.generate(ids(), sampling_params=greedy(), request_id=random_uuid(), **arguments)
        return [output async for output in stream][-1]

    arguments = dict.fromkeys(("session_id", "reasoning_ended", "reasoning_parser_kwargs", "prompt_text"))
    assert asyncio.run(run(data_parallel_rank=0, lora_request=None, trace_headers={}, **arguments)).finished
    assert asyncio.run(run(session_id="mine")).finished  # there is one core for all sessions
    assert asyncio.run(run(reasoning_ended=True)).finished
    with pytest.raises(VLLMValidationError, match="reasoning_parser_kwargs is not supported"):
        asyncio.run(run(reasoning_parser_kwargs={"a": 1}))
    with pytest.raises(VLLMValidationError, match="data_parallel_rank must be at most 0"):
        asyncio.run(run(data_parallel_rank=1))
    with pytest.raises(VLLMValidationError, match="lora_request: must be a"):
        asyncio.run(run(lora_request=object()))


def test_an_older_vllm_s_positions(mock: AsyncLLM) -> None:
    async def run() -> RequestOutput:
        stream = mock.generate(ids(), greedy(), random_uuid(), None, None, None, 0)
        return [output async for output in stream][-1]

    assert asyncio.run(run()).finished


def test_a_prompt_that_comes_in_parts_is_refused(mock: AsyncLLM) -> None:
    async def parts() -> AsyncGenerator[str, None]:
        yield "Hello"

    with pytest.raises(VLLMValidationError, match=r"prompt: a prompt is a str.*async_generator"):
        asyncio.run(read_one(mock, random_uuid(), greedy(), parts()))


def test_requests_are_waited_for_and_others_may_come(mock: AsyncLLM) -> None:
    async def run() -> RequestOutput:
        await mock.wait_for_requests_to_drain()
        task = asyncio.create_task(read_one(mock, random_uuid(), greedy(max_tokens=40)))
        await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError):
            await mock.wait_for_requests_to_drain(drain_timeout=0.01)
        await mock.wait_for_requests_to_drain(2)
        assert (await task).finished
        return await read_one(mock, random_uuid(), greedy())

    assert asyncio.run(run()).finished


def test_the_tokenizer_with_await_and_without(mock: AsyncLLM) -> None:
    async def run() -> None:
        tokenizer = mock.get_tokenizer()
        assert await mock.get_tokenizer() is tokenizer is mock.tokenizer  # type: ignore[misc]
        assert tokenizer.encode("ab") != []

    asyncio.run(run())


def test_streams_are_merged_as_a_benchmark_does_it(mock: AsyncLLM) -> None:
    async def run() -> dict[int, int]:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        streams = [mock.generate(ids(), params, request_id=f"test{i}") for i in range(20)]
        counts = dict.fromkeys(range(20), 0)
        async for i, output in merge_async_iterators(*streams):
            counts[i] = len(output.outputs[0].token_ids)
        return counts

    assert asyncio.run(run()) == dict.fromkeys(range(20), 5)


def test_requests_are_logged_from_when_they_are_asked_for(mock: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    assert mock.log_requests is False
    with caplog.at_level("INFO", "jaxllm.engine.online.running_requests"):
        asyncio.run(read_one(mock, "quiet", greedy()))
        mock.log_requests = True
        try:
            asyncio.run(read_one(mock, "told", greedy()))
        finally:
            mock.log_requests = False
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["request told"]


def test_prompts_are_logged_at_level_debug_as_far_as_max_log_len(mock: AsyncLLM, caplog: pytest.LogCaptureFixture):
    request = mock.front.inputs.process("a", ids([1, 2, 3]), greedy())
    for most, shown in ((None, "[1, 2, 3]"), (3, "[1, 2, 3]"), (2, "[1, 2]..."), (0, "[]...")):
        with caplog.at_level("DEBUG", "jaxllm.engine.online.running_requests"):
            log_request(request, most)
        assert caplog.messages[-1] == f"request a: prompt {shown}"
