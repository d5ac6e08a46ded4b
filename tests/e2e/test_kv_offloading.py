"""Blocks that the host keeps come back with the bits that computing gives, in every kind of cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.exceptions import VLLMValidationError
from jaxllm.scheduling.cache.fetch_times import Part, PartTime
from tests.e2e.inside import assert_nothing_left
from tests.e2e.tiny_engine import NUM_LOGPROBS, Job, RecordingScheduler, bits, run_alone, run_together, tiny_llm

pytestmark = pytest.mark.engine

PASSES = 4
NUM_GROUPS = 4
Engine = tuple[LLM, RecordingScheduler]


class Setting(NamedTuple):
    """A tiny checkpoint with one kind of cache."""

    case: str
    changes: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it


SETTINGS = (
    Setting("llama3_tied"),
    Setting("llama3_tied", {"kv_cache_dtype": "fp8"}),
    # Layers with windows, which keep less, beside others.
    Setting("gpt_oss", {"dtype": "bfloat16"}),
    # Keys of an indexer beside latents.
    Setting("glm_moe_dsa"),
    # Recurrent states beside attention.
    Setting("qwen3_next"),
)


ARGUMENTS: dict[str, Any] = {
    "batch_invariant": True,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "max_model_len": 192,
    "num_gpu_blocks_override": 26,
    "kv_offloading_size": 0.05,
    "cudagraph_capture_sizes": [8],
}


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda setting: "-".join([setting.case, *setting.changes]))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Start an engine whose devices hold two requests at a time, and whose host holds all."""
    with tiny_llm(request.param.case, **(ARGUMENTS | request.param.changes)) as (llm, scheduler):
        yield llm, scheduler
        assert_nothing_left(scheduler)


def make_jobs() -> list[Job]:
    """Return jobs in groups that begin alike; some end within a block."""
    rng, jobs = random.Random(7), []
    for group in range(NUM_GROUPS):
        shared = [rng.randrange(3, 256) for _ in range(120 + 5 * group)]
        for length in (20, 33):
            prompt = shared + [rng.randrange(3, 256) for _ in range(length)]
            params = SamplingParams(
                temperature=0.8, seed=len(jobs), max_tokens=6, logprobs=NUM_LOGPROBS, ignore_eos=True
            )
            jobs.append(Job(prompt, params))
    return jobs


def test_what_comes_back_has_the_bits_of_what_is_computed(engine: Engine) -> None:
    llm, scheduler = engine
    jobs = make_jobs()
    alone = []
    for job in jobs:
        assert llm.reset_prefix_cache(reset_connector=True)
        alone += run_together(llm, [job])
    assert {output.num_cached_tokens for output in alone} == {0}
    assert llm.reset_prefix_cache(reset_connector=True)
    num_cached = []
    for number in range(PASSES):
        order = random.Random(number).sample(range(len(jobs)), len(jobs))
        outputs = run_together(llm, [jobs[index] for index in order])
        for index, output in zip(order, outputs, strict=True):
            assert bits(output) == bits(alone[index])
        num_cached.append(sum(output.num_cached_tokens or 0 for output in outputs))
    assert scheduler.tiers.counts.num_fetches > 0
    # After the first pass nearly all that requests share with others or with themselves is somewhere.
    assert num_cached[-1] > 0.6 * sum(len(job.prompt) for job in jobs)
    scheduler.check()


def test_the_host_forgets_when_it_is_told_to(engine: Engine) -> None:
    llm, _ = engine
    [job, *_] = make_jobs()
    run_together(llm, [job])
    [output] = run_alone(llm, [job])  # it forgets what the devices have
    assert llm.reset_prefix_cache(reset_connector=True)
    [again] = run_together(llm, [job])
    assert again.num_cached_tokens == 0
    assert bits(again) == bits(output) or output.num_cached_tokens


def test_a_slow_host_is_left_alone(engine: Engine) -> None:
    llm, scheduler = engine
    jobs, times, tiers = make_jobs(), scheduler.fetch_times, scheduler.tiers
    expected = [run_together(llm, jobs) for _ in range(2)][-1]
    assert tiers.counts.num_fetches > 0
    times.most_refused = 10**9
    try:
        assert not times.pays({Part(0, reads_files=False): 1}, num_tokens=0, num_left=1), "no fetch was measured"
        num_fetches, num_refused = tiers.counts.num_fetches, times.num_refused
        hour = [PartTime(Part(0, reads_files=False), num_blocks, 3600.0) for num_blocks in range(1, 13)]
        for _ in range(9):
            times.record(hour)
        outputs = run_together(llm, jobs)
        assert (tiers.counts.num_fetches, times.num_refused > num_refused) == (num_fetches, True)
        assert list(map(bits, outputs)) == list(map(bits, expected))
    finally:
        times.most_refused = 0
    scheduler.check()


@pytest.mark.parametrize("case", ["llama3_tied", "qwen3_next"])
def test_a_preempted_request_goes_on_from_the_host(case: str) -> None:
    rng = random.Random(5)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=80, logprobs=NUM_LOGPROBS, ignore_eos=True)
    # No two begin alike: what comes back was a preempted request's.
    jobs = [Job([rng.randrange(3, 256) for _ in range(100)], params) for _ in range(8)]
    with tiny_llm(case, **ARGUMENTS) as (llm, scheduler):
        expected = run_together(llm, jobs)
        assert scheduler.stats().num_preemptions == 0
    with tiny_llm(case, **(ARGUMENTS | {"num_gpu_blocks_override": 18})) as (llm, scheduler):
        outputs = run_together(llm, jobs)
        scheduler.check()
        assert scheduler.stats().num_preemptions > 0
        assert scheduler.tiers.counts.num_fetches > 0
    assert list(map(bits, outputs)) == list(map(bits, expected))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_offloading_size": 0.0}, "kv_offloading_size"),
        ({"kv_offloading_backend": "lmcache"}, "kv_offloading_backend"),
        ({"enable_prefix_caching": False}, "set enable_prefix_caching"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], reason: str) -> None:
    with (
        pytest.raises(VLLMValidationError, match=reason),
        tiny_llm("llama3_tied", **{"kv_offloading_size": 1} | changes),
    ):
        pass
