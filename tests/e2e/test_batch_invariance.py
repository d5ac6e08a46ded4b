"""With batch invariance a request's outputs are the same to the bit: tokens, log-probabilities, ranks, prompt's too.

Alone or among 64, prompt whole or in chunks of any size, prefix cached or not, preempted or not, decoded or prefilled.
Without it some bit differs, so these tests can fail.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from jaxllm import LLM, RequestOutput, SamplingParams
from jaxllm.sampling_params import StructuredOutputsParams
from tests.e2e.inside import limited
from tests.e2e.tiny_engine import (
    CONTEXT,
    NUM_LOGPROBS,
    Job,
    RecordingScheduler,
    bits,
    run_alone,
    run_together,
    shown,
    tiny_llm,
)
from tests.e2e.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.engine

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "ages": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "ages"],
}
# One request of each kind per round; a new kind of request is one more line.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9},
    "truncated": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "bad_words": {"temperature": 1.5, "bad_words": ["a", "the", "e"]},
    "prompt_logprobs": {"temperature": 0.0, "prompt_logprobs": 3},
    "json": {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    "biased": {"temperature": 1.0, "logit_bias": {20: 4.0, 21: -3.0}, "min_tokens": 6},
}
PLAIN = ("greedy", "seeded")
NUM_JOBS = 64
WHOLE = 512  # tokens a step
MAX_TOKENS = 24
LENGTHS = (330, 64, 60, 50, 40, 35, 8, 3)
"""Lengths of the prompts of each round."""


class Setting(NamedTuple):
    """A model and how it runs. The two models differ in windows, norms and matmuls."""

    case: str
    dtype: str
    invariant: bool | None
    """The value of `batch_invariant` that gives invariance; the opposite must show differences."""


SETTINGS = (Setting("gemma3", "bfloat16", None), Setting("llama3_tied", "float32", True))


class Engines:
    """Makes engines of one setting."""

    def __init__(self, setting: Setting, tokenizer: str) -> None:
        self.setting, self.tokenizer = setting, tokenizer

    def __call__(self, **arguments: Any) -> Any:
        defaults = {
            "dtype": self.setting.dtype,
            "batch_invariant": self.setting.invariant,
            "tokenizer": self.tokenizer,
            "skip_tokenizer_init": False,
            "max_num_batched_tokens": WHOLE,
            "cudagraph_capture_sizes": [8, 32, 128],
            "max_num_seqs": NUM_JOBS,
            "num_gpu_blocks_override": 1600,
            "hf_overrides": {"max_position_embeddings": CONTEXT},
        }
        return tiny_llm(self.setting.case, **(defaults | arguments))


def make_jobs() -> list[Job]:
    """Return 64 jobs, all kinds in turn; each round has its prompt lengths, and its prompts begin alike."""
    rng = random.Random(64)
    jobs = []
    for start, length in zip(range(0, NUM_JOBS, len(KINDS)), LENGTHS, strict=True):
        shared = [rng.randrange(7, 256) for _ in range(length // 2)]
        for index, fields in enumerate(KINDS.values(), start):
            prompt = shared + [rng.randrange(7, 256) for _ in range(length - len(shared))]
            params = SamplingParams(**fields, seed=index, max_tokens=MAX_TOKENS, logprobs=NUM_LOGPROBS, ignore_eos=True)
            jobs.append(Job(prompt, params))
    return jobs


JOBS = make_jobs()
LONG = range(len(KINDS))
SHORT = range(6 * len(KINDS), 7 * len(KINDS))
"""A round of prompts: each alone takes the smallest bucket, all together take one with 8 times the rows."""


def differing(expected: Sequence[RequestOutput], got: Sequence[RequestOutput]) -> list[str]:
    """Return the jobs with outputs that differ in any bit."""
    pairs = enumerate(zip(expected, got, strict=True))
    return [f"{index}: {kind_of(index)}" for index, (left, right) in pairs if bits(left) != bits(right)]


def kind_of(index: int) -> str:
    """Return the kind of a job."""
    return list(KINDS)[index % len(KINDS)]


Engine = tuple[LLM, RecordingScheduler]


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda setting: setting.dtype)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Return a setting's engines."""
    return Engines(request.param, save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def whole(engines: Engines) -> Iterator[Engine]:
    """Start an engine that takes every prompt whole, 64 requests at a time, with blocks in plenty."""
    with engines() as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(whole: Engine) -> list[RequestOutput]:
    """Run every job alone, with its prompt whole unless its scored positions take too many rows."""
    llm, scheduler = whole
    outputs = run_alone(llm, JOBS)
    assert all(len(plan.chunks) == 1 for plan in scheduler.plans)
    assert all(output.num_cached_tokens == 0 for output in outputs)
    assert all(len(output.outputs[0].token_ids) >= 6 for output in outputs)
    return outputs


def test_alone_and_among_64(whole: Engine, reference: list[RequestOutput]) -> None:
    llm, scheduler = whole
    assert llm.reset_prefix_cache()
    scheduler.plans.clear()
    outputs = run_together(llm, JOBS)
    # Those with a grammar or a bad word of several tokens sit out the steps in which they wait for their last token:
    # a step has most of the others, and all have begun before the first has ended.
    rows = [{chunk.request_id for chunk in plan.chunks} for plan in scheduler.plans]
    assert max(map(len, rows)) >= NUM_JOBS * 3 // 4
    steps = [[step for step, ids in enumerate(rows) if output.request_id in ids] for output in outputs]
    assert max(each[0] for each in steps) <= min(each[-1] for each in steps)
    assert differing(reference, outputs) == []


def test_prefix_hit_and_miss(whole: Engine, reference: list[RequestOutput]) -> None:
    llm, _ = whole
    outputs = run_together(llm, JOBS)
    hits = [index for index, output in enumerate(outputs) if output.num_cached_tokens]
    assert {kind_of(index) for index in hits} == KINDS.keys() - {"prompt_logprobs"}  # whose prompts must be computed
    assert differing(reference, outputs) == []


@pytest.mark.parametrize("budget", [16, 64, 256])
def test_chunked(budget: int, whole: Engine, reference: list[RequestOutput]) -> None:
    llm, scheduler = whole
    with limited(scheduler, budget):
        outputs = run_together(llm, JOBS)
    assert all(scheduler.num_prompt_chunks(outputs[index].request_id) >= 330 / budget for index in LONG)
    assert differing(reference, outputs) == []


def test_preempted(whole: Engine, reference: list[RequestOutput]) -> None:
    llm, scheduler = whole
    assert llm.reset_prefix_cache()
    before = scheduler.stats().num_preemptions
    with limited(scheduler, 64, num_blocks=CONTEXT // 16):
        outputs = run_together(llm, JOBS)
    assert scheduler.stats().num_preemptions - before >= 5
    assert differing(reference, outputs) == []


def test_decoded_and_prefilled(whole: Engine, reference: list[RequestOutput]) -> None:
    """A token's log-probability when it was generated is its log-probability in a prompt.

    Only the rows of grammars differ: what they generate is scored among the tokens that the grammar allows.
    """
    llm, _ = whole
    scoring = SamplingParams(max_tokens=1, prompt_logprobs=NUM_LOGPROBS)
    jobs = [
        Job([*job.prompt, *output.outputs[0].token_ids], scoring) for job, output in zip(JOBS, reference, strict=True)
    ]
    for job, output, scored in zip(JOBS, reference, run_together(llm, jobs), strict=True):
        if job.params.structured_outputs is not None:
            continue
        generated, prompt = output.outputs[0].logprobs, scored.prompt_logprobs
        assert generated is not None
        assert prompt is not None
        assert [shown(entries) for entries in prompt[len(job.prompt) :]] == [shown(entries) for entries in generated]


def test_neighbours_that_use_no_feature(whole: Engine, reference: list[RequestOutput]) -> None:
    """The program for steps without any feature draws what the one with all features does."""
    llm, _ = whole
    indices = [index for index in range(SHORT.start, NUM_JOBS) if kind_of(index) in PLAIN]
    jobs = []
    for index in indices:
        fields = {**KINDS[kind_of(index)], "seed": index, "max_tokens": MAX_TOKENS, "ignore_eos": True}
        jobs.append(Job(JOBS[index].prompt, SamplingParams(**fields)))
    got = [output.outputs[0].token_ids for output in run_together(llm, jobs)]
    assert got == [reference[index].outputs[0].token_ids for index in indices]


def test_would_differ_without(engines: Engines) -> None:
    """This is the negative control: invariance is off, and so are the CPU's kernels, which cannot be otherwise."""
    jobs = [JOBS[index] for index in SHORT]
    shapes = {"max_num_batched_tokens": 128, "cudagraph_capture_sizes": [8]}
    with engines(batch_invariant=False, attention_config={"backend": "xla"}, **shapes) as (llm, _):
        alone = run_alone(llm, jobs)
        assert llm.reset_prefix_cache()
        together = run_together(llm, jobs)
        assert llm.model_config.batch_invariant is False
    assert differing(alone, together) != []
