"""With drafts, right ones and wrong ones, a request's outputs are what they are without, to the bit.

Tokens, texts, log-probabilities and ends are compared over all kinds of requests: beside batch mates, preempted, with
prompts in chunks, with grammars, penalties, stop tokens and processors that read the output.
"""

from __future__ import annotations

import json
import random
import shutil
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jax import Array

from jaxllm import LLM, RequestOutput, SamplingParams
from jaxllm.exceptions import VLLMValidationError
from jaxllm.sampling.processors import LogitsState
from jaxllm.sampling_params import StructuredOutputsParams
from tests.e2e.inside import core_of, limited
from tests.e2e.test_batch_invariance import CONTEXT, JOBS, KINDS, LONG, differing, kind_of
from tests.e2e.tiny_engine import Job, RecordingScheduler, run_together, tiny_llm
from tests.e2e.tiny_tokenizer import save_tokenizer
from tests.models.tiny import folder

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quick_compile", "estimated_costs")]

CASE = "gemma3"
MOST = 4
FIELDS: dict[str, dict[str, Any]] = {
    "stops": {"temperature": 0.8, "stop_token_ids": [30, 31, 32, 40, 41], "min_tokens": 4},
    "stop strings": {"temperature": 0.8, "stop": ["a", "1"], "include_stop_str_in_output": True},
    "allowed": {"temperature": 1.0, "allowed_token_ids": list(range(20, 60))},
    "asked": {"temperature": 1.0, "logprob_token_ids": [9, 8, 40]},
    "regex": {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(regex="(ab|cd|[0-9]){4,30}")},
    "repeats": {"temperature": 0.0, "repetition_penalty": 1.02, "presence_penalty": -1.0},
}
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "skip_tokenizer_init": False,
    "max_num_batched_tokens": 512,
    "cudagraph_capture_sizes": [8, 32, 128],
    "max_num_seqs": 64,
    "num_gpu_blocks_override": 1600,
    "hf_overrides": {"max_position_embeddings": CONTEXT},
}


def more_jobs() -> list[Job]:
    """Return jobs of kinds that batches do not touch, but drafts may; some end in the middle of a step."""
    rng, jobs = random.Random(5), []
    for turn in range(3):
        for index, fields in enumerate(FIELDS.values()):
            settings: dict[str, Any] = {"logprobs": 3} | fields if "logprob_token_ids" not in fields else fields
            prompt = [rng.randrange(7, 256) for _ in range(rng.randrange(2, 40))]
            jobs.append(Job(prompt, SamplingParams(**settings, seed=100 * turn + index, max_tokens=10 + 7 * turn)))
    return jobs


ALL = [*JOBS, *more_jobs()]


class Oracle:
    """Guesses the tokens that a run without drafts gave, some of them wrong."""

    def __init__(self, outputs: Sequence[RequestOutput]) -> None:
        self._random = random.Random(3)
        self._answers = {tuple(output.prompt_token_ids or ()): list(output.outputs[0].token_ids) for output in outputs}

    def propose(self, token_ids: array[int], at_most: int) -> array[int]:
        ids = token_ids.tolist()
        for prompt, answer in self._answers.items():
            num_outputs = len(ids) - len(prompt)
            if num_outputs >= 0 and tuple(ids[: len(prompt)]) == prompt and ids[len(prompt) :] == answer[:num_outputs]:
                guesses = answer[num_outputs:][:at_most]
                return array("i", [50 if self._random.random() < 0.2 else guess for guess in guesses])
        return array("i", [50])

    def learn(self, token_ids: array[int], num_prompt_tokens: int) -> None:
        pass


type Engine = tuple[LLM, RecordingScheduler]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def reference(tokenizer: str) -> list[RequestOutput]:
    """Run all jobs without drafts."""
    with tiny_llm(CASE, tokenizer=tokenizer, **SETTINGS) as (llm, _):
        assert llm.model_config.batch_invariant
        return run_together(llm, ALL)


@pytest.fixture(scope="module")
def engine(tokenizer: str, reference: list[RequestOutput]) -> Iterator[Engine]:
    """Start an engine whose drafts are mostly right, and always worth it."""
    config = {"method": "ngram", "num_speculative_tokens": MOST}
    with tiny_llm(CASE, tokenizer=tokenizer, speculative_config=config, **SETTINGS) as (llm, scheduler):
        assert scheduler._speculation is not None
        scheduler._speculation._drafter = Oracle(reference)
        scheduler._speculation._settings = replace(scheduler._speculation._settings, num_free_rows=1e6)
        yield llm, scheduler


def numbers_of_drafts(scheduler: RecordingScheduler) -> set[int]:
    """Return the numbers of drafts in the chunks of all plans so far."""
    return {chunk.num_drafts for plan in scheduler.plans for chunk in plan.chunks}


def accepted(scheduler: RecordingScheduler) -> tuple[int, int]:
    """Return the numbers of drafts and of accepted drafts."""
    stats = scheduler.stats().speculation
    assert stats is not None
    return stats.num_draft_tokens, stats.num_accepted_tokens


def run_in_company(engine: Engine, company: int) -> tuple[list[RequestOutput], int, int]:
    """Run all jobs, `company` at a time, every other time with few blocks and short steps.

    Return their outputs, how many drafts were made, and how many were right.
    """
    llm, scheduler = engine
    assert llm.reset_prefix_cache()
    scheduler.plans.clear()
    before = accepted(scheduler)
    order = list(range(len(ALL)))
    random.Random(company).shuffle(order)
    outputs: dict[int, RequestOutput] = {}
    for start in range(0, len(order), company):
        some = order[start : start + company]
        budget, num_blocks = (64, CONTEXT // 16) if start % (2 * company) else (512, 1600)
        with limited(scheduler, budget, num_blocks=num_blocks):
            outputs |= dict(zip(some, run_together(llm, [ALL[index] for index in some]), strict=True))
    drafted, right = (now - then for now, then in zip(accepted(scheduler), before, strict=True))
    return [outputs[index] for index in range(len(ALL))], drafted, right


@pytest.mark.parametrize("company", [2, 16, 40])
def test_drafts_change_nothing(company: int, engine: Engine, reference: list[RequestOutput]) -> None:
    """Few requests at a time have many drafts each; some of them preempt each other, and prompts come in chunks."""
    outputs, drafted, right = run_in_company(engine, company)
    assert differing(reference, outputs) == []
    assert right > 200
    assert drafted - right > 50
    assert numbers_of_drafts(engine[1]) >= {0, 1, 2, MOST}


def test_every_kind_has_drafts(engine: Engine, reference: list[RequestOutput]) -> None:
    """Grammars, penalties, bad words and all others are drafted for."""
    llm, scheduler = engine
    for name, indices in {
        **{kind: [index for index in range(len(JOBS)) if kind_of(index) == kind][-3:] for kind in KINDS},
        **{kind: list(range(len(JOBS) + place, len(ALL), len(FIELDS))) for place, kind in enumerate(FIELDS)},
    }.items():
        before = accepted(scheduler)
        outputs = [run_together(llm, [ALL[index]])[0] for index in indices]
        assert differing([reference[index] for index in indices], outputs) == [], name
        if name != "stop strings":  # one of them may end an output at once
            assert accepted(scheduler)[1] > before[1], f"{name} had no right drafts"


def test_nothing_is_compiled_for_drafts(engine: Engine) -> None:
    """Steps with drafts are steps like others."""
    llm, _ = engine
    num_compiled = core_of(llm).num_compiled
    run_together(llm, [ALL[index] for index in (*LONG, *range(len(JOBS), len(ALL)))])
    assert core_of(llm).num_compiled == num_compiled


@pytest.fixture(scope="module")
def guessed(tokenizer: str, reference: list[RequestOutput]) -> Iterator[Engine]:
    """Start an engine that guesses by the same model, at no cost. It is wrong where a request's fields have a say."""
    config = {"model": str(folder(CASE)), "num_speculative_tokens": MOST}
    with tiny_llm(CASE, tokenizer=tokenizer, speculative_config=config, **SETTINGS) as (llm, scheduler):
        assert scheduler._speculation is not None
        scheduler._speculation._cost = lambda num_rows: 0.0
        yield llm, scheduler


@pytest.mark.parametrize("company", [2, 16, 40])
def test_drafts_of_a_model_change_nothing(company: int, guessed: Engine, reference: list[RequestOutput]) -> None:
    """The draft model reads prompts in chunks, and again after they were preempted."""
    outputs, drafted, right = run_in_company(guessed, company)
    assert differing(reference, outputs) == []
    assert right > 100
    assert drafted - right > 50
    assert numbers_of_drafts(guessed[1]) >= {0, 1, 2, MOST}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_the_same_model_guesses_right(temperature: float, guessed: Engine) -> None:
    """A guess is drawn with the noise of the token that it guesses, so it is as good at any temperature."""
    llm, scheduler = guessed
    rng, before = random.Random(temperature), accepted(scheduler)
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=40, ignore_eos=True)
    run_together(llm, [Job([rng.randrange(7, 256) for _ in range(20)], params) for _ in range(4)])
    drafted, right = (now - then for now, then in zip(accepted(scheduler), before, strict=True))
    assert drafted > 60
    assert right > 0.9 * drafted


def seen_more_often(logits_sv: Array, state: LogitsState) -> Array:
    """Make what was said more likely, and one id with each output."""
    return (logits_sv + 0.5 * state.output_counts_sv).at[:, 9].add(0.2 * state.num_outputs_s)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_real_drafters_and_a_processor(method: str) -> None:
    """A processor sees the drafts before its row as output; the drafters find repeated text by themselves."""
    rng = random.Random(9)
    jobs = []
    for index in range(24):
        words = [rng.randrange(7, 256) for _ in range(rng.randrange(2, 9))]
        params = SamplingParams(temperature=0.3 * (index % 3), seed=index, max_tokens=30, logprobs=2, ignore_eos=True)
        jobs.append(Job((words * 12)[: rng.randrange(6, 60)], params))
    arguments: dict[str, Any] = {"logits_processors": [seen_more_often], "max_num_seqs": 32, "dtype": "bfloat16"}
    with tiny_llm("llama3_tied", **arguments) as (llm, _):
        expected = run_together(llm, jobs)
    with tiny_llm("llama3_tied", **arguments, speculative_config={"method": method}) as (llm, scheduler):
        assert scheduler._speculation is not None
        scheduler._speculation._settings = replace(scheduler._speculation._settings, num_free_rows=1e6)
        assert differing(expected, run_together(llm, jobs)) == []
        assert accepted(scheduler)[1] > 50
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        assert metrics["vllm:spec_decode_num_drafts"].value > 0  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ({"model": str(folder("qwen3_5"))}, "recurrent state"),
        ({"model": "/not/there"}, "/not/there"),
        ({"model": str(folder(CASE)), "tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"model": str(folder(CASE)), "quantization": "int3"}, "quantization"),
        ({"model": str(folder(CASE)), "max_model_len": 10**6}, "max_model_len"),
    ],
)
def test_draft_models_that_do_not_fit_are_refused(draft: dict[str, Any], words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words) as caught:
        LLM(str(folder(CASE)), skip_tokenizer_init=True, speculative_config=draft, load_format="dummy")
    assert caught.value.parameter == "speculative_config"


def save_model(path: Path, tokenizer: str | None, vocab_size: int) -> str:
    """Save a model without weights, with a tokenizer and as many rows of its embedding."""
    path.mkdir()
    config = json.loads((folder(CASE) / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    for source in Path(tokenizer).glob("*.json") if tokenizer else ():
        shutil.copy(source, path)
    return str(path)


def test_a_draft_model_may_have_more_rows_but_no_other_tokens(tmp_path: Path, tokenizer: str) -> None:
    """Models of one family often have embeddings that are filled up to different sizes."""
    models = {size: save_model(tmp_path / str(size), tokenizer, size) for size in (256, 320)}
    others = save_model(tmp_path / "others", None, 320)
    settings: dict[str, Any] = {"load_format": "dummy", "max_model_len": 128, "max_num_seqs": 8}
    prompts: Any = [{"prompt_token_ids": [9, 8, 7]}]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    with LLM(models[256], **settings) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids
    with LLM(models[256], **settings, speculative_config={"model": models[320]}) as llm:
        assert llm.generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids == expected
    with pytest.raises(VLLMValidationError, match="other tokens") as caught:
        LLM(models[256], **settings, speculative_config={"model": others})
    assert caught.value.parameter == "speculative_config"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": str(folder(CASE)), "runner": "pooling"}, "generate"),
    ],
)
def test_what_cannot_be_drafted_for_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words) as caught:
        LLM(**arguments, skip_tokenizer_init=True, spec_method="ngram", load_format="dummy")
    assert caught.value.parameter == "speculative_config"
