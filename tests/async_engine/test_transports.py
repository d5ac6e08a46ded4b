"""Requests give the same to the bit wherever the core runs: in place, in a thread, or in a process of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from tests.async_engine.support import metric, nothing_left, tiny_args
from tests.e2e.sampling_cases import CASES, others, tilt
from tests.e2e.tiny_engine import Job
from tests.e2e.tiny_tokenizer import ids_of

pytestmark = pytest.mark.server

NUM_STREAMS = 64
NUM_LEAVERS = 16
LONG_TOKENS = 400
"""Two sequences of this length need 50 of the 32 blocks that there are, and more than half of them each."""


def jobs() -> list[Job]:
    """Return requests that use every feature of sampling, one whose sequences preempt, and plain ones up to 64.

    How many of the short ones are in the core at once depends on the machine. The two sequences of the long one come
    to it in one message, at the head of the line, and grow until there is no room for both.
    """
    of_fields = [case.job() for case in CASES.values() if not case.is_refused]
    shown: dict[str, Any] = {"logprobs": 2, "max_tokens": 12, "temperature": 0.9}
    grammars: list[dict[str, Any]] = [
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        {"grammar": 'root ::= "ab" [c-f]+'},
        {"regex": "[a-c]{3,5}"},
    ]
    made = [*of_fields, *others()]
    made += [
        Job(ids_of("abc"), SamplingParams(structured_outputs=StructuredOutputsParams(**each), seed=i, n=2, **shown))
        for i, each in enumerate(grammars)
    ]
    made.append(Job(ids_of("def"), SamplingParams(n=2, seed=1, ignore_eos=True, max_tokens=LONG_TOKENS)))
    rng = random.Random(7)
    while len(made) < NUM_STREAMS:
        prompt = [rng.randrange(7, 256) for _ in range(rng.randrange(1, 60))]
        fields: dict[str, Any] = shown | {"seed": len(made), "max_tokens": rng.randrange(50, 90)}
        made.append(Job(prompt, SamplingParams(ignore_eos=True, **fields)))
    return made[:NUM_STREAMS]


JOBS = jobs()
# The lowest is the first in line.
PRIORITIES = [-1 if job.params.max_tokens == LONG_TOKENS else i * 7 % 5 for i, job in enumerate(JOBS)]


@pytest.fixture(scope="module")
def args(tokenizer: str) -> Any:
    """Return arguments of an engine with too few blocks for its requests."""
    return tiny_args(
        tokenizer,
        block_size=16,
        num_gpu_blocks_override=33,
        max_logprobs=-1,
        logits_processors=[tilt],
        scheduling_policy="priority",
        batch_invariant=True,
        seed=3,
    )


def run_llm(args: Any) -> list[RequestOutput]:
    """Run all requests in one call of `LLM.generate`."""
    fields = {name: getattr(args, name) for name in EngineArgs.__dataclass_fields__}
    with LLM.from_engine_args(EngineArgs(**fields)) as llm:
        prompts = [TokensPrompt(prompt_token_ids=job.prompt) for job in JOBS]
        outputs = llm.generate(prompts, [job.params for job in JOBS], use_tqdm=False, priority=PRIORITIES)
        preemptions = next(each for each in llm.get_metrics() if each.name == "vllm:num_preemptions")
        assert preemptions.value > 0  # type: ignore[attr-defined]
    return outputs


@pytest.fixture(scope="module")
def expected(args: Any) -> list[RequestOutput]:
    return run_llm(args)


def comparable(output: RequestOutput) -> tuple[Any, ...]:
    """Return the computed values of an output, without the number of cached tokens."""
    matrix = output.prompt_token_id_logprobs
    asked = None if matrix is None else np.asarray(matrix).tobytes()
    return output.prompt_token_ids, output.prompt_logprobs, output.outputs, asked


def assert_same(expected: list[RequestOutput], got: list[RequestOutput]) -> None:
    different = [
        i for i, pair in enumerate(zip(expected, got, strict=True)) if comparable(pair[0]) != comparable(pair[1])
    ]
    assert not different, [JOBS[i].params for i in different]


def test_llm_over_a_process(args: Any, expected: list[RequestOutput], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with nothing_left():
        assert_same(expected, run_llm(args))


@pytest.fixture(scope="module", params=["process", "thread"])
def llm(request: pytest.FixtureRequest, args: Any, expected: list[RequestOutput]) -> Iterator[AsyncLLM]:
    with AsyncLLM.from_engine_args(args, disable_frontend_multiprocessing=request.param == "thread") as llm:
        yield llm


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_streams_among_others_that_leave(llm: AsyncLLM, expected: list[RequestOutput], kind: RequestOutputKind) -> None:
    """64 streams, which are preempted now and then, while others come and leave in the middle of theirs."""
    rng = random.Random(int(kind.value))
    preemptions_before = metric(llm, "num_preemptions")

    async def stream(index: int) -> RequestOutput:
        params = JOBS[index].params.clone()
        params.output_kind = kind
        prompt = TokensPrompt(prompt_token_ids=JOBS[index].prompt)
        whole: RequestOutput | None = None
        async for output in llm.generate(prompt, params, f"{kind.name} {index}", priority=PRIORITIES[index]):
            if whole is None or kind is not RequestOutputKind.DELTA:
                whole = output
            else:
                whole.add(output, aggregate=True)
        assert whole is not None
        assert whole.finished
        return whole

    async def leave(index: int) -> None:
        await asyncio.sleep(rng.random())
        stay = rng.random()
        prompt = TokensPrompt(prompt_token_ids=[rng.randrange(7, 256) for _ in range(rng.randrange(1, 60))])
        params = SamplingParams(max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        try:
            async with asyncio.timeout(stay):
                async for _ in llm.generate(prompt, params, f"leaver {index}", priority=index % 3):
                    pass
        except TimeoutError:
            pass

    async def run() -> list[RequestOutput]:
        leavers = [asyncio.create_task(leave(index)) for index in range(NUM_LEAVERS)]
        outputs = await asyncio.gather(*map(stream, range(NUM_STREAMS)))
        await asyncio.gather(*leavers)
        return outputs

    assert_same(expected, asyncio.run(run()))
    assert metric(llm, "num_preemptions") > preemptions_before
