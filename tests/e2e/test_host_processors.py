"""Logits processors that are classes, in an engine: rows, live outputs, temperature, preemption, failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.exceptions import VLLMValidationError
from jaxllm.logits_processors import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor, process_dict_updates
from tests.e2e.test_speculation import Oracle
from tests.e2e.tiny_engine import CASE, Job, RecordingScheduler, run_together, tiny_llm

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quick_compile", "estimated_costs")]

Engine = tuple[LLM, RecordingScheduler]
PROMPTS = [[9, 8, 7, 6, 5], [30], list(range(20, 43)), [3, 4, 5] * 6, [50, 51], [11] * 9]


class Forced(LogitsProcessor):
    """Forces extra_args["target"], as vLLM's example does."""

    made: ClassVar[list[Forced]] = []

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        target = (sampling_params.extra_args or {}).get("target")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target must be a token id, got {target!r}")

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self.max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self.targets: dict[int, int] = {}
        self.made.append(self)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self.targets, batch_update, lambda params, _prompt, _output: (params.extra_args or {}).get("target")
        )

    def apply(self, logits: np.ndarray) -> np.ndarray:
        if self.targets and min(self.targets.values()) < 0:
            raise OverflowError("a target below 0")
        rows, targets = list(self.targets), list(self.targets.values())
        kept = logits[rows, targets].copy()
        logits[rows] = float("-inf")
        logits[rows, targets] = kept
        return logits


class Counting(AdapterLogitsProcessor):
    """Continues a prompt by its last token plus 1, 2, 3, ... where extra_args has "counts"."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., np.ndarray] | None:
        def count(prompt_ids: list[int], output_ids: list[int], logits: np.ndarray) -> np.ndarray:
            logits[prompt_ids[-1] + len(output_ids) + 1] = 1e9
            return logits

        return count if (params.extra_args or {}).get("counts") else None


class Nucleus(LogitsProcessor):
    """Keeps what is at most 2 below the largest logit over the temperature."""

    def __init__(self, *_engine: Any) -> None: ...

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None: ...

    def apply(self, logits: np.ndarray) -> np.ndarray:
        return np.where(logits >= logits.max(axis=1, keepdims=True) - 2, logits, -np.inf)


CLASSES: list[Any] = [f"{__name__}:Forced", Counting, Nucleus]
SETTINGS: dict[str, Any] = {
    "block_size": 8,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 17,
    "max_num_batched_tokens": 16,
    "cudagraph_capture_sizes": [16],
    "logprobs_mode": "processed_logprobs",
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """An engine with too few blocks for its requests."""
    with tiny_llm(CASE, logits_processors=CLASSES, **SETTINGS) as made:
        yield made


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, "logprobs": 5, **fields})


def test_each_request_gets_its_own(engine: Engine) -> None:
    """Six requests, some of them forced, in steps that chunk, preempt and move them."""
    llm, scheduler = engine
    jobs = [
        Job(PROMPTS[0], params(extra_args={"target": 5})),
        Job(PROMPTS[1], params(extra_args={"counts": 1})),
        Job(PROMPTS[2], params()),
        Job(PROMPTS[3], params(extra_args={"target": 60, "counts": 0}, temperature=1.0, seed=3, max_tokens=7)),
        Job(PROMPTS[4], params(temperature=0.7, seed=5, top_k=9)),
        Job(PROMPTS[5], params(extra_args={"counts": 1}, temperature=2.0, seed=8)),
    ]
    before = scheduler.stats().num_preemptions
    outputs = run_together(llm, jobs)
    assert scheduler.stats().num_preemptions > before
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    assert (tokens[0], tokens[3]) == ([5] * 20, [60] * 7)
    assert (tokens[1], tokens[5]) == (list(range(31, 51)), list(range(12, 32)))
    assert Forced.made[-1].max_num_seqs == 8
    alone = [run_together(llm, [job])[0] for job in jobs]
    assert tokens == [list(output.outputs[0].token_ids) for output in alone]


def test_drafts_change_nothing(engine: Engine) -> None:
    """Drafts, a fifth of them wrong, give what the engine without drafts gives."""
    targets = [{"target": 5}, {"counts": 1}, {}, {"counts": 1}, {}, {"target": 60}]
    sampling = [{"temperature": t, "seed": 7} for t in (0.0, 0.0, 0.0, 1.5, 0.9, 0.7)]
    jobs = [
        Job(prompt, params(extra_args=args, **fields))
        for prompt, args, fields in zip(PROMPTS, targets, sampling, strict=True)
    ]
    expected = run_together(engine[0], jobs)
    config = {"method": "ngram", "num_speculative_tokens": 4}
    settings = SETTINGS | {"max_num_batched_tokens": 40, "cudagraph_capture_sizes": [40]}
    with tiny_llm(CASE, logits_processors=CLASSES, speculative_config=config, **settings) as (llm, scheduler):
        speculation = scheduler._speculation
        assert speculation is not None
        speculation._drafter = Oracle(expected)
        speculation._settings = replace(speculation._settings, num_free_rows=1e6)
        outputs = run_together(llm, jobs)
        stats = scheduler.stats()
    assert stats.speculation is not None
    assert stats.num_preemptions
    assert 20 < stats.speculation.num_accepted_tokens < stats.speculation.num_draft_tokens - 5
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert output.outputs[0].logprobs == wanted.outputs[0].logprobs


def test_the_invariant_one_sees_the_temperature(engine: Engine) -> None:
    """Log-probabilities of what is drawn from span 2 at every temperature; greedy requests keep all of them."""
    llm, _ = engine
    hot, cold, greedy = run_together(
        llm, [Job(PROMPTS[2], params(temperature=t, seed=1, logprobs=5)) for t in (2.0, 0.5, 0.0)]
    )
    for output in (hot, cold):
        for step in output.outputs[0].logprobs or ():
            kept = [each.logprob for each in step.values() if each.logprob > -1e30]
            assert max(kept) - min(kept) <= 2.001
    spans = [max(each.logprob for each in step.values()) - min(each.logprob for each in step.values())
             for step in greedy.outputs[0].logprobs or ()]  # fmt: skip
    assert max(spans) > 2


def test_failures_are_told_and_pass(engine: Engine) -> None:
    llm, _ = engine
    with pytest.raises(VLLMValidationError, match="sampling_params: Forced refuses them: target must be a token id"):
        run_together(llm, [Job(PROMPTS[0], params(extra_args={"target": 0.5}))])
    with pytest.raises(VLLMValidationError, match="logits_processors: Forced failed: OverflowError: a target below 0"):
        run_together(llm, [Job(PROMPTS[0], params(extra_args={"target": -1}))])
    (output,) = run_together(llm, [Job(PROMPTS[0], params(extra_args={"target": 6}))])
    assert list(output.outputs[0].token_ids) == [6] * 20
