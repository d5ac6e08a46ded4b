"""scripts/lib/mock_core.py: a core without a model, behind a real front end in a thread and in a process."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Iterator

import pytest
from lib.mock_core import TEXT, start_mock, start_mock_process

from jaxllm.engine.client.remote_core import RemoteCore
from jaxllm.engine.front.start import meet
from jaxllm.engine.online.admission import Admission
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import RequestOutput
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from tests.e2e.tiny_tokenizer import save_tokenizer
from tests.models.tiny import folder

pytestmark = pytest.mark.scripts

RATE = 200.0


@pytest.fixture(scope="module")
def engine_args(tmp_path_factory: pytest.TempPathFactory) -> AsyncEngineArgs:
    tokenizer = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return AsyncEngineArgs(model=str(folder("qwen3")), tokenizer=tokenizer, max_num_seqs=8, disable_log_stats=True)


@pytest.fixture(scope="module", params=["thread", "process"])
def llm(request: pytest.FixtureRequest, engine_args: AsyncEngineArgs) -> Iterator[AsyncLLM]:
    def start_in_thread():
        start = functools.partial(start_mock, engine_args, tokens_per_second=RATE)
        return meet(RemoteCore.in_thread(start), engine_args, asks_core=False)

    def start_in_process():
        return start_mock_process(engine_args, tokens_per_second=RATE)

    starts = {"thread": start_in_thread, "process": start_in_process}
    with AsyncLLM(starts[request.param], admission=Admission(None, None)) as llm:
        yield llm


async def collect(llm: AsyncLLM, request_id: str, params: SamplingParams) -> list[RequestOutput]:
    return [output async for output in llm.generate("Hello", params, request_id)]


def test_each_stream_gets_the_text_at_the_rate_until_max_tokens(llm: AsyncLLM) -> None:
    text = TEXT.read_text(encoding="utf-8")

    async def run() -> list[list[RequestOutput]]:
        kind = RequestOutputKind.DELTA
        params = [SamplingParams(max_tokens=21, seed=i, output_kind=kind, ignore_eos=True) for i in range(4)]
        return await asyncio.gather(*(collect(llm, str(i), each) for i, each in enumerate(params)))

    started = time.monotonic()
    streams = asyncio.run(run())
    assert time.monotonic() - started >= 20 / RATE
    for outputs in streams:
        assert "".join(output.outputs[0].text for output in outputs) in text
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == 21
        assert outputs[-1].outputs[0].finish_reason == "length"
    assert len({streams[i][0].outputs[0].token_ids[0] for i in range(4)}) > 1


def test_n_log_probabilities_and_stop_tokens_are_as_a_model_would_give_them(llm: AsyncLLM) -> None:
    whole = asyncio.run(collect(llm, "whole", SamplingParams(n=2, logprobs=2, max_tokens=6, seed=0)))[-1]
    assert [len(output.token_ids) for output in whole.outputs] == [6, 6]
    for output in whole.outputs:
        assert output.logprobs is not None
        assert [position[token].rank for position, token in zip(output.logprobs, output.token_ids, strict=True)] == [
            1
        ] * 6
    stop_id = whole.outputs[0].token_ids[3]
    params = SamplingParams(max_tokens=6, seed=0, stop_token_ids=[stop_id], ignore_eos=True)
    stopped = asyncio.run(collect(llm, "stopped", params))[-1].outputs[0]
    assert stopped.stop_reason == stop_id
    assert list(stopped.token_ids) == whole.outputs[0].token_ids[: len(stopped.token_ids)]


def test_what_needs_a_model_is_refused_by_name(llm: AsyncLLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    with pytest.raises(VLLMValidationError) as caught:
        asyncio.run(collect(llm, "grammar", params))
    assert caught.value.parameter == "structured_outputs"


def test_an_aborted_stream_gets_nothing_more(llm: AsyncLLM) -> None:
    async def run() -> RequestOutput:
        outputs = llm.generate("Hello", SamplingParams(max_tokens=200), "aborted")
        await anext(outputs)
        await llm.abort("aborted")
        return [output async for output in outputs][-1]

    assert asyncio.run(run()).outputs[0].finish_reason == "abort"
