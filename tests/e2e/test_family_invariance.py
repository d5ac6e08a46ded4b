"""Batch invariance, to the bit, of what test_batch_invariance.py's models lack: experts, latents, states, groups.

Few kinds of requests will do: the step around the model is the same. Prompts are longer than windows, so that blocks
come back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from jaxllm import LLM, RequestOutput, SamplingParams
from jaxllm.scheduling.cache.block_pool import NULL_BLOCK
from tests.e2e.inside import core_of, limited
from tests.e2e.tiny_engine import NUM_LOGPROBS, Job, RecordingScheduler, bits, run_alone, run_together, tiny_llm

pytestmark = pytest.mark.families

NUM_JOBS = 64
WHOLE = 256  # tokens a step
CHUNKED = 16
SMALL_CHUNKS = (7, 1)
"""Chunks that are no multiple of a tile, and a prompt token by token; in few families, since steps are many."""
LENGTHS = (190, 170, 60, 50, 40, 33, 24, 23, 17, 16, 15, 9, 8, 7, 3, 1)
"""Lengths of prompts. A block comes back once a window and the tile of 128 keys that it begins in have left it."""
SCORED = 33
"""The longest prompt that is scored: scored positions fill the rows that other requests would have in a step."""
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.0, "prompt_logprobs": NUM_LOGPROBS},
)


class Setting(NamedTuple):
    """A tiny checkpoint, in a dtype whose kernels take its matrices: their rows are a multiple of 64 bytes."""

    case: str
    dtype: str
    has_experts: bool = False
    has_windows: bool = False
    has_small_chunks: bool = False


SETTINGS = (
    Setting("qwen3_moe", "float32", has_experts=True),
    # Biases of experts, sinks.
    Setting("gpt_oss", "bfloat16", has_experts=True, has_windows=True),
    # No layer without a window.
    Setting("mistral", "float32", has_windows=True),
    # Experts beside an MLP, heads of two sizes.
    Setting("gemma4_moe", "float32", has_experts=True, has_windows=True),
    # Latents in place of keys and values, experts in groups.
    Setting("deepseek_v3", "float32", has_experts=True),
    # A choice of tokens; layers of GLM-5 share it.
    Setting("deepseek_v32", "float32", has_experts=True, has_small_chunks=True),
    Setting("glm_moe_dsa", "float32", has_experts=True, has_small_chunks=True),
    # Windows of latents beside chosen positions.
    Setting("dots3_note", "float32", has_experts=True, has_windows=True, has_small_chunks=True),
    # Latents that layers share, and a learned rotation.
    Setting("mistral_large4", "float32", has_experts=True, has_small_chunks=True),
    # Recurrent states beside attention, which are saved where blocks end; experts and a shared one.
    Setting("qwen3_next", "float32", has_experts=True),
    # States that fade by number, beside latents.
    Setting("kimi_linear", "float32", has_experts=True, has_small_chunks=True),
    Setting("bailing_hybrid", "float32", has_experts=True, has_small_chunks=True),
    Setting("lfm2", "float32"),
    # State spaces; layers of one part each.
    Setting("nemotron_h", "float32"),
    # State spaces alone, without attention.
    Setting("mamba2", "float32"),
    # Keys and values that layers share, and inputs of a layer's own.
    Setting("gemma4_e2b", "bfloat16", has_windows=True),
)


def make_jobs() -> list[Job]:
    """Return a job of each kind for each length; those of a length begin alike."""
    rng = random.Random(NUM_JOBS)
    jobs = []
    for length in LENGTHS:
        shared = [rng.randrange(3, 256) for _ in range(length // 2)]
        for fields in KINDS:
            if length > SCORED and "prompt_logprobs" in fields:
                fields: dict[str, Any] = {"temperature": 0.7}
            prompt = shared + [rng.randrange(3, 256) for _ in range(length - len(shared))]
            params = SamplingParams(
                **fields, seed=len(jobs), max_tokens=12, logprobs=NUM_LOGPROBS, ignore_eos=True, detokenize=False
            )
            jobs.append(Job(prompt, params))
    return jobs


JOBS = make_jobs()
LONG = range(2 * len(KINDS))
READERS = [index for index, job in enumerate(JOBS) if job.params.prompt_logprobs is None and len(job.prompt) > 16]
"""The jobs that may read the prefix cache, and have a block to find there; a scored prompt must be computed."""
FEW = [index for index, job in enumerate(JOBS) if len(job.prompt) in (50, 33, 17, 8)]
"""The jobs that run in small chunks."""
Engine = tuple[LLM, RecordingScheduler]


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda setting: setting.case)
def setting(request: pytest.FixtureRequest) -> Setting:
    """Return the setting that the module's engine has."""
    return request.param


@pytest.fixture(scope="module")
def whole(setting: Setting) -> Iterator[Engine]:
    """Start an engine that takes every prompt whole, 64 requests at a time, with blocks in plenty."""
    arguments = {
        "dtype": setting.dtype,
        "batch_invariant": True,
        "max_num_batched_tokens": WHOLE,
        "cudagraph_capture_sizes": [8],
        # More rows than requests, so that scored positions find some.
        "max_num_seqs": 2 * NUM_JOBS,
        "num_gpu_blocks_override": 600,
    }
    with tiny_llm(setting.case, **arguments) as (llm, scheduler):
        runner = core_of(llm)._runner
        assert runner is not None
        implementation = runner.compiler.model.ops.grouped_matmul.implementation
        assert implementation == ("cpu" if setting.has_experts else "xla")
        # Attention, latents and indexers by group; models of states alone attend to nothing.
        config = runner.compiler.config
        assert {group.attention.implementation for group in config.groups} <= {"cpu", "none"}
        assert {name for group in config.states for name in group.ops.implementations} <= {"cpu"}
        assert any(group._config.window for group in scheduler.cache.groups) == setting.has_windows
        yield llm, scheduler


@pytest.fixture(scope="module")
def reference(whole: Engine) -> list[RequestOutput]:
    """Run every job alone, its prompt whole."""
    llm, scheduler = whole
    outputs = run_alone(llm, JOBS)
    assert all(len(plan.chunks) == 1 for plan in scheduler.plans)
    assert {scheduler.num_prompt_chunks(output.request_id) for output in outputs} == {1}
    assert {output.num_cached_tokens for output in outputs} == {0}
    drawn = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert len(set(drawn)) > NUM_JOBS // 2, "outputs that hardly vary prove little"
    return outputs


def differing(
    expected: list[RequestOutput], got: list[RequestOutput], indices: Sequence[int] = range(NUM_JOBS)
) -> list[int]:
    """Return the jobs with outputs that differ in any bit; `got` are those of the jobs at the indices."""
    return [index for index, output in zip(indices, got, strict=True) if bits(expected[index]) != bits(output)]


def test_alone_and_among_64(whole: Engine, reference: list[RequestOutput]) -> None:
    llm, scheduler = whole
    assert llm.reset_prefix_cache()
    scheduler.plans.clear()
    outputs = run_together(llm, JOBS)
    assert max(len(plan.chunks) for plan in scheduler.plans) == NUM_JOBS
    assert differing(reference, outputs) == []


def test_prefix_hit_and_miss(whole: Engine, reference: list[RequestOutput]) -> None:
    llm, _ = whole
    run_together(llm, JOBS)
    outputs = run_together(llm, JOBS)
    assert [index for index, output in enumerate(outputs) if output.num_cached_tokens] == READERS
    assert differing(reference, outputs) == []


def test_chunked(setting: Setting, whole: Engine, reference: list[RequestOutput]) -> None:
    """Blocks come back while prompts are still being computed, and others take them."""
    llm, scheduler = whole
    scheduler.plans.clear()
    with limited(scheduler, CHUNKED):
        outputs = run_together(llm, JOBS)
    for index in LONG:
        assert scheduler.num_prompt_chunks(outputs[index].request_id) >= len(JOBS[index].prompt) / CHUNKED
    for group, cache in enumerate(scheduler.cache.groups):
        tables = [chunk.block_ids[group] for plan in scheduler.plans for chunk in plan.chunks]
        assert any(NULL_BLOCK in table for table in tables) == (cache._config.window is not None)
    assert differing(reference, outputs) == []
    for budget in SMALL_CHUNKS if setting.has_small_chunks else ():
        with limited(scheduler, budget):
            outputs = run_together(llm, [JOBS[index] for index in FEW])
        for index, output in zip(FEW, outputs, strict=True):
            assert scheduler.num_prompt_chunks(output.request_id) >= len(JOBS[index].prompt) / budget
        assert differing(reference, outputs, FEW) == [], budget


def test_preempted(whole: Engine, reference: list[RequestOutput]) -> None:
    llm, scheduler = whole
    assert llm.reset_prefix_cache()
    before = scheduler.stats().num_preemptions
    with limited(scheduler, 64, num_blocks=15):
        outputs = run_together(llm, JOBS)
    assert scheduler.stats().num_preemptions - before >= 5
    assert differing(reference, outputs) == []
