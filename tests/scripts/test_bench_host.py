"""scripts/bench.py host: a mock device lets time pass, and its tokens do not depend on the batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lib.mock_core import start_mock
from lib.mock_device import DeviceClock, ProcessorTime, StepTimes

from jaxllm import SamplingParams
from jaxllm.engine.client.in_process import InprocClient
from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.engine.offline.llm_engine import LLMEngine
from jaxllm.resolve.engine_args import EngineArgs
from tests.e2e.tiny_tokenizer import save_tokenizer
from tests.models.tiny import folder

pytestmark = pytest.mark.scripts

TIMES = StepTimes(plain=1000.0, chunk=2000.0, full=3000.0)


@pytest.fixture
def clock() -> DeviceClock:
    return DeviceClock(TIMES, ProcessorTime())


@pytest.fixture
def engine(clock: DeviceClock, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMEngine]:
    tokenizer = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    args = EngineArgs(model=str(folder("qwen3")), tokenizer=tokenizer, max_num_seqs=8, disable_log_stats=True)
    tokenizers = []
    core, ready = start_mock(args, tokenizers.append, device=clock)
    engine = LLMEngine(InprocClient(core), FrontEnd(ready, tokenizers[0], core.check))
    yield engine
    engine.shutdown()


def generate(engine: LLMEngine, *all_params: SamplingParams) -> list[list[int]]:
    for index, params in enumerate(all_params):
        engine.add_request(str(index), "Hello", params)
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step() if output.finished}
    return [done[str(index)] for index in range(len(all_params))]


def params(seed: int, logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=5, ignore_eos=True, logprobs=logprobs)


def test_steps_take_the_time_of_their_kind_one_after_the_other(engine: LLMEngine, clock: DeviceClock) -> None:
    generate(engine, params(1))
    assert [round(step.ends - step.begins, 3) for step in clock.steps] == [2.0, 1.0, 1.0, 1.0, 1.0]
    for before, after in zip(clock.steps, clock.steps[1:], strict=False):
        assert after.begins == before.ends  # launched while the one before ran
        assert before.taken is not None
        assert before.taken >= before.ends
    clock.steps.clear()
    generate(engine, params(1, logprobs=1))
    assert {round(step.ends - step.begins, 3) for step in clock.steps} == {3.0}


def test_tokens_do_not_depend_on_the_batch(engine: LLMEngine) -> None:
    all_params = [params(100 * seed) for seed in range(8)]
    together = generate(engine, *all_params)
    assert len({tuple(each) for each in together}) > 1
    assert together == [tokens for each in all_params for tokens in generate(engine, each)]
