"""What a request generates depends on nothing but the request: not on company, chunks, cached prefixes or blocks.

The reference is each request alone, its prompt whole, nothing cached, blocks in plenty.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from copy import deepcopy

import pytest

from jaxllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from tests.e2e.inside import limited
from tests.e2e.tiny_engine import (
    CASE,
    NUM_LOGPROBS,
    TOLERANCE,
    Job,
    RecordingScheduler,
    difference,
    differences,
    run_alone,
    run_together,
    tiny_llm,
)

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quick_compile")]

WHOLE, CHUNKED_64, CHUNKED_256 = 512, 64, 256
Engine = tuple[LLM, RecordingScheduler]


def make_params(index: int, max_tokens: int, *, seed: int = 1000) -> SamplingParams:
    """Return sampling settings: one kind of five, by index. Every kind asks for log-probabilities."""
    kinds = (
        {"temperature": 0.0, "ignore_eos": True},
        {"temperature": 0.9, "ignore_eos": True},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "ignore_eos": True},
        {"temperature": 1.0, "min_tokens": 12, "stop_token_ids": list(range(3, 120))},
        {"temperature": 1.5, "min_p": 0.01, "stop_token_ids": [5, 50, 100, 150, 200]},
    )
    return SamplingParams(
        **kinds[index % len(kinds)],
        max_tokens=max_tokens,
        seed=seed + index,
        logprobs=NUM_LOGPROBS,
        detokenize=False,
    )


def make_jobs(lengths: Sequence[int], max_tokens: range) -> list[Job]:
    """Return jobs with prompts of these lengths; every fourth begins as one before it does."""
    rng = random.Random(len(lengths))
    jobs: list[Job] = []
    for index, length in enumerate(lengths):
        prompt = [rng.randrange(3, 256) for _ in range(length)]
        if index % 4 == 3:
            shared = rng.choice(jobs).prompt
            count = min(len(shared), length) * 3 // 4
            prompt[:count] = shared[:count]
        jobs.append(Job(prompt, make_params(index, rng.choice(max_tokens))))
    return jobs


def many_jobs() -> list[Job]:
    """Return 64 jobs, ten of them with prompts that no budget but the reference's takes whole."""
    rng = random.Random(64)
    lengths = [rng.choice((rng.randrange(1, 9), rng.randrange(9, 65))) for _ in range(54)]
    lengths += [rng.randrange(CHUNKED_256 + 1, 340) for _ in range(10)]
    rng.shuffle(lengths)
    return make_jobs(lengths, range(24, 65))


JOBS = many_jobs()
LONG = [index for index, job in enumerate(JOBS) if len(job.prompt) > CHUNKED_256]


def prompt_chunks(scheduler: RecordingScheduler, outputs: Sequence[RequestOutput]) -> list[int]:
    """Return the number of steps that each prompt took."""
    return [scheduler.num_prompt_chunks(output.request_id) for output in outputs]


def hit_rate(outputs: Sequence[RequestOutput], block_size: int) -> float:
    """Return the part of the prompt tokens that came from the cache, of those that could: in whole blocks, all
    but the last token."""
    lengths = [len(output.prompt_token_ids or ()) for output in outputs]
    possible = sum((length - 1) // block_size * block_size for length in lengths)
    assert possible > 0
    return sum(output.num_cached_tokens or 0 for output in outputs) / possible


@pytest.fixture(scope="module")
def whole() -> Iterator[Engine]:
    """Start an engine that takes every prompt whole, 64 requests at a time, with blocks in plenty."""
    arguments = {"max_num_batched_tokens": WHOLE, "max_num_seqs": 64, "cudagraph_capture_sizes": [8, 64]}
    with tiny_llm(CASE, **arguments) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(whole: Engine) -> list[RequestOutput]:
    """Run every job alone."""
    llm, scheduler = whole
    outputs = run_alone(llm, JOBS)
    assert prompt_chunks(scheduler, outputs) == [1] * len(JOBS)
    assert all(output.num_cached_tokens == 0 for output in outputs)
    assert all(len(plan.chunks) == 1 for plan in scheduler.plans)
    return outputs


@pytest.fixture(scope="module")
def narrow() -> Iterator[Engine]:
    """Start an engine of 33 blocks, which hold one request of full length, and 16 tokens a step."""
    arguments = {"max_num_batched_tokens": 16, "max_num_seqs": 16, "num_gpu_blocks_override": 33}
    with tiny_llm(CASE, **arguments) as engine:
        yield engine


def test_the_jobs_use_what_they_claim_to(reference: list[RequestOutput]) -> None:
    assert len(JOBS) == 64
    assert len(LONG) == 10
    ends = {(output.outputs[0].finish_reason, output.outputs[0].stop_reason is None) for output in reference}
    assert ends >= {("length", True), ("stop", False)}
    for job, output in zip(JOBS, reference, strict=True):
        assert len(output.outputs[0].token_ids) >= job.params.min_tokens
    early = [output for output in reference if output.outputs[0].finish_reason == "stop"]
    assert len(early) >= 10
    seeded = [output.outputs[0].token_ids for job, output in zip(JOBS, reference, strict=True) if job.is_seeded]
    varied = [len(set(tokens)) > 5 for tokens in seeded if len(tokens) > 15]
    assert sum(varied) >= 0.9 * len(varied), "draws that hardly vary prove little"


def test_alone_and_among_64(whole: Engine, reference: list[RequestOutput]) -> None:
    llm, scheduler = whole
    assert llm.reset_prefix_cache()
    scheduler.plans.clear()
    outputs = run_together(llm, JOBS)
    assert max(len(plan.chunks) for plan in scheduler.plans) == 64
    assert differences(reference, outputs) == {}


def test_prefix_cache_cold_and_warm(whole: Engine, reference: list[RequestOutput]) -> None:
    llm, scheduler = whole
    assert llm.reset_prefix_cache()
    cold = run_together(llm, JOBS)
    # Some prompts begin as others do: those hits are a part of what the cold run does.
    assert 0 < hit_rate(cold, 16) < 0.3
    warm = run_together(llm, JOBS)
    assert hit_rate(warm, 16) >= 0.9
    assert differences(reference, cold) == differences(reference, warm) == {}
    assert scheduler.stats().num_preemptions == 0


def test_the_cache_is_reset_under_running_requests(whole: Engine, reference: list[RequestOutput]) -> None:
    """Also with a step in flight; none of what they had is found again."""
    llm, scheduler = whole
    engine, jobs = llm.llm_engine, JOBS[:16]
    before = scheduler.stats().num_preemptions
    for index, job in enumerate(jobs):
        engine.add_request(f"reset {index}", TokensPrompt(prompt_token_ids=job.prompt), job.params)
    outputs: dict[str, RequestOutput] = {}
    num_steps = 0
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
        num_steps += 1
        if num_steps % 10 == 0 and engine.has_unfinished_requests():
            assert not llm.reset_prefix_cache()
            assert llm.reset_prefix_cache(reset_running_requests=True)
            assert (scheduler.cache.groups[0].pool.num_cached, scheduler.stats().num_blocks_in_use) == (0, 0)
            scheduler.check()
    assert scheduler.stats().num_preemptions - before >= 20
    assert differences(reference[:16], [outputs[f"reset {index}"] for index in range(16)]) == {}


@pytest.mark.parametrize("budget", [CHUNKED_64, CHUNKED_256])
def test_whole_and_chunked(budget: int, whole: Engine, reference: list[RequestOutput]) -> None:
    llm, scheduler = whole
    with limited(scheduler, budget):
        outputs = run_together(llm, JOBS)
    chunks = prompt_chunks(scheduler, outputs)
    assert all(chunks[index] >= max(2, len(JOBS[index].prompt) // budget) for index in LONG)
    assert differences(reference, outputs) == {}


def test_whole_and_chunked_by_16(narrow: Engine, reference: list[RequestOutput]) -> None:
    llm, scheduler = narrow
    before = scheduler.stats().num_preemptions
    outputs = run_alone(llm, JOBS)
    assert prompt_chunks(scheduler, outputs) == [-(-len(job.prompt) // 16) for job in JOBS]
    assert scheduler.stats().num_preemptions == before
    assert differences(reference, outputs) == {}


def test_blocks_in_plenty_and_too_few(narrow: Engine, reference: list[RequestOutput]) -> None:
    llm, scheduler = narrow
    assert llm.reset_prefix_cache()
    before = scheduler.stats().num_preemptions
    outputs = run_together(llm, JOBS)
    assert scheduler.stats().num_blocks == 33
    assert scheduler.stats().num_preemptions - before >= 5
    assert all(count >= 2 for index, count in enumerate(prompt_chunks(scheduler, outputs)) if index in LONG)
    assert differences(reference, outputs) == {}


def test_block_size_16_and_default(reference: list[RequestOutput]) -> None:
    arguments = {"max_num_batched_tokens": 16, "max_num_seqs": 16, "block_size": None}
    with tiny_llm(CASE, **arguments) as (llm, scheduler):
        assert scheduler.config.block_size == llm.llm_engine.vllm_config.cache_config.block_size == 128
        cold = run_together(llm, JOBS)
        warm = run_together(llm, JOBS)
        assert all(count >= 2 for index, count in enumerate(prompt_chunks(scheduler, cold)) if index in LONG)
    assert hit_rate(warm, 128) >= 0.9
    assert differences(reference, cold) == differences(reference, warm) == {}


def test_sliding_windows_and_two_ropes() -> None:
    jobs = make_jobs([8, 33, 34, 37, 40, 47, 48, 49, 50, 55, 60, 63, 64], range(64, 97))
    # One that decodes from the first step to the last: each step samples, so that there is one kind of program.
    jobs[0] = Job(jobs[0].prompt, make_params(0, max_tokens=100))
    # A prompt in one chunk, with many blocks.
    with tiny_llm("gemma3", max_num_batched_tokens=64, max_num_seqs=8, num_gpu_blocks_override=129) as (llm, scheduler):
        reference = run_alone(llm, jobs)
        assert prompt_chunks(scheduler, reference) == [1] * len(jobs)
        assert scheduler.stats().num_preemptions == 0
        some = [0, 11, 12]
        for index in some:
            run_together(llm, [jobs[index]])
        warm = [run_together(llm, [jobs[index]])[0] for index in some]
    # In chunks, with room for one request of the greatest length and for windows of two.
    with tiny_llm("gemma3", max_num_batched_tokens=16, max_num_seqs=8, num_gpu_blocks_override=17) as (llm, scheduler):
        outputs = run_together(llm, jobs)
        assert min(prompt_chunks(scheduler, outputs)[1:]) >= 2
        assert scheduler.stats().num_preemptions >= 3
    assert hit_rate(warm, 16) >= 0.9
    assert differences(reference, outputs) == {}
    assert differences([reference[index] for index in some], warm) == {}


def test_would_notice_any_other_output(reference: list[RequestOutput]) -> None:
    good = reference[LONG[0]].outputs[0]
    assert difference(good, deepcopy(good)) is None
    for step in (0, len(good.token_ids) - 1):
        for key in (good.token_ids[step], None):
            bad = deepcopy(good)
            assert bad.logprobs is not None
            entries = bad.logprobs[step]
            entries[min(entries) if key is None else key].logprob += 2 * TOLERANCE
            assert difference(good, bad) is not None
        bad = deepcopy(good)
        bad.token_ids = [*good.token_ids[:step], good.token_ids[step] ^ 1, *good.token_ids[step + 1 :]]
        assert difference(good, bad) is not None
    bad = deepcopy(good)
    bad.finish_reason = "stop" if good.finish_reason == "length" else "length"
    assert difference(good, bad) is not None


def test_would_notice_other_seeds(whole: Engine, reference: list[RequestOutput]) -> None:
    llm, _ = whole
    others = [
        Job(job.prompt, make_params(index, job.params.max_tokens or 0, seed=2000)) for index, job in enumerate(JOBS)
    ]
    changed = differences(reference, run_together(llm, others))
    assert sorted(changed) == [index for index, job in enumerate(JOBS) if job.is_seeded]


def test_would_notice_a_wrong_block(
    whole: Engine, reference: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm run differs if its prompts get a cached block that is not theirs."""
    llm, scheduler = whole
    assert llm.reset_prefix_cache()
    jobs = [JOBS[index] for index in LONG]
    run_together(llm, jobs)
    pool = scheduler.cache.groups[0].pool
    find, wrong = pool.find, []

    def find_another(block_hash: bytes, token_bytes: bytes) -> int | None:
        block_id = find(block_hash, token_bytes)
        wrong.append(block_id)
        return block_id if len(wrong) % 2 else wrong[-2]

    monkeypatch.setattr(pool, "find", find_another)
    outputs = run_together(llm, jobs)
    monkeypatch.undo()
    assert hit_rate(outputs, 16) >= 0.9
    assert len(differences([reference[index] for index in LONG], outputs)) == len(LONG)
    assert llm.reset_prefix_cache()
