"""An engine's recurrent states: snapshots of shared prefixes, forks, beams, aborts, and no copies."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import jax
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.execution.kv_pool import SPARE_PART
from jaxllm.sampling.inputs import Sampling
from jaxllm.sampling_params import BeamSearchParams
from tests.e2e.inside import core_of
from tests.e2e.tiny_engine import Job, RecordingScheduler, bits, run_alone, run_together, tiny_llm
from tests.models.tiny import read_goldens

pytestmark = pytest.mark.engine

CASES = ("qwen3_next", "mamba2")
"""A hybrid, and a model without attention."""
Engine = tuple[LLM, RecordingScheduler]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    """Return the tiny checkpoint that an engine runs."""
    return request.param


@pytest.fixture(scope="module")
def engine(case: str) -> Iterator[Engine]:
    """Start an engine with blocks and slots in plenty."""
    arguments = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "num_gpu_blocks_override": 200}
    with tiny_llm(case, **arguments) as made:
        yield made


def greedy(num_tokens: int = 8, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0, n=n, max_tokens=num_tokens, ignore_eos=True, detokenize=False, logprobs=1)


def ids(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(6, 256) for _ in range(num_tokens)]


def test_the_end_of_what_prompts_share_is_computed_twice_and_then_found(engine: Engine) -> None:
    llm, _ = engine
    jobs = [Job(ids(1, 70) + ids(10 + number, 20), greedy()) for number in range(4)]
    alone = run_alone(llm, jobs)
    assert llm.reset_prefix_cache()
    outputs = [run_together(llm, [job])[0] for job in jobs]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 64, 64]
    assert [bits(output) for output in outputs] == [bits(output) for output in alone]


def test_a_conversation_goes_on_from_its_last_answer(engine: Engine) -> None:
    llm, _ = engine
    assert llm.reset_prefix_cache()
    prompt, outputs, jobs = ids(2, 50), [], []
    for turn in range(3):
        jobs.append(Job(prompt, greedy(20)))
        outputs += run_together(llm, jobs[-1:])
        assert outputs[-1].num_cached_tokens == (0 if turn == 0 else (len(prompt) - 16) // 16 * 16)
        prompt = [*prompt, *outputs[-1].outputs[0].token_ids, *ids(20 + turn, 15)]
    assert [bits(output) for output in outputs] == [bits(output) for output in run_alone(llm, jobs)]


def test_several_outputs_of_a_prompt_share_its_state(engine: Engine, case: str) -> None:
    llm, scheduler = engine
    golden = read_goldens(case)[1]
    assert llm.reset_prefix_cache()
    scheduler.plans.clear()
    [output] = run_together(llm, [Job(golden.prompt.tolist(), greedy(16, n=4))])
    assert [each.token_ids for each in output.outputs] == [golden.tokens.tolist()] * 4
    num_tokens = sum(plan.num_tokens for plan in scheduler.plans)
    assert num_tokens <= len(golden.prompt) + 3 + 4 * 16, "the prompt is computed once"


def test_beams_have_the_log_probabilities_of_their_tokens(engine: Engine) -> None:
    llm, _ = engine
    prompt = ids(3, 21)
    params = BeamSearchParams(beam_width=2, max_tokens=8, ignore_eos=True)
    [output] = llm.beam_search([{"prompt_token_ids": prompt}], params)
    assert len(output.sequences) == 2
    for beam in output.sequences:
        tokens = list(beam.tokens)
        scoring = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        [scored] = run_together(llm, [Job(tokens, scoring)])
        entries = [(scored.prompt_logprobs or [])[place] for place in range(len(prompt), len(tokens))]
        total = sum((entry or {})[token].logprob for entry, token in zip(entries, tokens[len(prompt) :], strict=True))
        assert math.isclose(beam.cum_logprob or 0, total, abs_tol=1e-3)


def test_requests_that_are_given_up_leave_nothing_behind(engine: Engine, case: str) -> None:
    llm, scheduler = engine
    assert llm.reset_prefix_cache()
    for number in range(12):
        llm.llm_engine.add_request(f"given up {number}", {"prompt_token_ids": ids(number, 40)}, greedy(30))
    for step in range(6):
        llm.llm_engine.step()
        llm.llm_engine.abort_request([f"given up {step}", f"given up {11 - step}"])
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    golden = read_goldens(case)[2]
    [output] = run_together(llm, [Job(golden.prompt.tolist(), greedy(16))])
    assert output.outputs[0].token_ids == golden.tokens.tolist()
    assert llm.reset_prefix_cache()
    scheduler.check()


def test_a_step_copies_no_state(engine: Engine) -> None:
    """What a step takes besides weights and pools does not grow with the slots, and pools are updated in place."""
    llm, _ = engine
    runner = core_of(llm)._runner
    assert runner is not None
    num_blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    assert num_blocks is not None
    compiler, pool_bytes = runner.compiler, sum(x.nbytes for x in jax.tree.leaves(runner.launcher.pools))
    layout = compiler.config.kv_layout
    assert layout.num_slots == 1 + 8 + math.ceil(8 * SPARE_PART) + 1
    assert layout.bytes(num_blocks) == pool_bytes
    shape = compiler.shapes.step_shape(compiler.shapes.buckets[0], Sampling.PLAIN)
    memory = compiler.compile(shape, num_blocks).memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < layout.state_bytes / 2
