"""Engines of tiny models have a scheduler that can be looked at: what it planned, what is in flight, what is left."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm import LLM, CompletionOutput, RequestOutput, SamplingParams, TokensPrompt
from jaxllm.core_messages import EngineCoreOutput, NextTokens, RequestError, sequence_ids
from jaxllm.engine.front.growing_request import TextReader
from jaxllm.engine.front.input_processor import ProcessedRequest
from jaxllm.logprobs import Logprob
from jaxllm.scheduling.cache.tiers import Files
from jaxllm.scheduling.config import SchedulerConfig
from jaxllm.scheduling.plan import StepPlan, StepResult
from jaxllm.scheduling.scheduler import Scheduler
from jaxllm.scheduling.speculation import CutDrafts, keep_drafts
from tests.models.tiny import folder

CASE = "llama3_tied"
CONTEXT = 512  # its RoPE is plain: it may be longer than in the checkpoint
TOLERANCE = 1e-4
NUM_LOGPROBS = 5


class RecordingScheduler(Scheduler):
    """A scheduler that records its plans, and which of them are not committed yet."""

    def __init__(self, config: SchedulerConfig, files: Files | None = None) -> None:
        super().__init__(config, files=files)
        self.fetch_times.most_refused = 0  # what is fetched depends on no clock
        self.plans: list[StepPlan] = []
        self.in_flight: tuple[StepPlan, ...] = ()
        self.before_plan: Callable[[], None] = lambda: None
        self.sequence_ids: dict[str, list[str]] = {}
        """The core's names of the sequences of each user's request."""

    def plan(self, late: Collection[str] = (), cut_drafts: CutDrafts = keep_drafts) -> StepPlan | None:
        self.before_plan()
        plan = super().plan(late, cut_drafts)
        if plan is not None:
            self.plans.append(plan)
            self.in_flight += (plan,)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> tuple[list[EngineCoreOutput], NextTokens]:
        self.in_flight = tuple(each for each in self.in_flight if each.step_id != plan.step_id)
        return super().commit(plan, result)

    def abandon(self, error: RequestError) -> list[EngineCoreOutput]:
        self.in_flight = ()
        return super().abandon(error)

    def is_in_flight(self, sequence_id: str) -> bool:
        """Return whether the device is computing something for a sequence."""
        return any(chunk.request_id == sequence_id for plan in self.in_flight for chunk in plan.chunks)

    def num_prompt_chunks(self, request_id: str) -> int:
        """Count the steps that computed a part of a request's prompt."""
        first, *_ = self.sequence_ids[request_id]
        chunks = (chunk for plan in self.plans for chunk in plan.chunks if chunk.request_id == first)
        return sum(chunk.start < chunk.owner.num_prompt_tokens for chunk in chunks)


@dataclass(frozen=True)
class Job:
    """A prompt and what to do with it."""

    prompt: list[int]
    params: SamplingParams

    @property
    def is_seeded(self) -> bool:
        return self.params.temperature > 0


@contextmanager
def tiny_llm(case: str | Path, **arguments: Any) -> Iterator[tuple[LLM, RecordingScheduler]]:
    """Start an engine of a tiny case, or of a folder, in float32, in blocks of 16; nothing is compiled in vain.

    The usual case gets a longer context. Engines with the same shapes find each other's programs in the cache.
    """
    made: list[RecordingScheduler] = []

    class Recorded(RecordingScheduler):
        def __init__(self, config: SchedulerConfig, files: Files | None = None) -> None:
            super().__init__(config, files)
            made.append(self)

    defaults: dict[str, Any] = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "block_size": 16,
        "max_logprobs": NUM_LOGPROBS,
        "enforce_eager": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "scheduler_cls": Recorded,
        "hf_overrides": {"max_position_embeddings": CONTEXT} if case == CASE else {},
    }
    with LLM(str(case if isinstance(case, Path) else folder(case)), **(defaults | arguments)) as llm:
        remember_names(llm, made[0])
        yield llm, made[0]


def remember_names(llm: LLM, scheduler: RecordingScheduler) -> None:
    """Tell a scheduler the core's name of each request from now on."""
    outputs = llm.llm_engine.front.outputs
    add = outputs.add_request

    def remember(request: ProcessedRequest, text_reader: TextReader | None = None) -> None:
        scheduler.sequence_ids[request.request_id] = sequence_ids(request.core)
        add(request, text_reader)

    outputs.add_request = remember


def run_together(llm: LLM, jobs: Sequence[Job]) -> list[RequestOutput]:
    """Run jobs in one call."""
    prompts = [TokensPrompt(prompt_token_ids=job.prompt) for job in jobs]
    return llm.generate(prompts, [job.params for job in jobs], use_tqdm=False)


def run_alone(llm: LLM, jobs: Sequence[Job]) -> list[RequestOutput]:
    """Run jobs one after the other, each with an empty prefix cache."""
    outputs = []
    for job in jobs:
        assert llm.reset_prefix_cache()
        outputs += run_together(llm, [job])
    return outputs


def shown(entries: Mapping[int, Logprob] | None) -> list[tuple[int, str, int | None]] | None:
    """Return one position's log-probabilities, exactly."""
    if entries is None:
        return None
    return [(token, entry.logprob.hex(), entry.rank) for token, entry in entries.items()]


def bits(output: RequestOutput) -> tuple[Any, ...]:
    """Return all that was computed, exactly."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    return (
        list(completion.token_ids),
        completion.text,
        (completion.finish_reason, completion.stop_reason),
        [shown(entries) for entries in completion.logprobs],
        [shown(entries) for entries in output.prompt_logprobs or ()],
    )


def difference(expected: CompletionOutput, got: CompletionOutput) -> str | None:
    """Return where two completions differ: in tokens, in how they end, or in a log-probability by over 1e-4."""
    if list(expected.token_ids) != list(got.token_ids):
        return f"tokens {list(got.token_ids)} instead of {list(expected.token_ids)}"
    if (expected.finish_reason, expected.stop_reason) != (got.finish_reason, got.stop_reason):
        return f"ended by {got.finish_reason} ({got.stop_reason})"
    assert expected.logprobs is not None
    assert got.logprobs is not None
    assert len(expected.logprobs) == len(got.logprobs) == len(expected.token_ids)
    for step, (token, left, right) in enumerate(zip(expected.token_ids, expected.logprobs, got.logprobs, strict=True)):
        values = [{key: value.logprob for key, value in side.items()} for side in (left, right)]
        assert all(token in side and len(side) in (NUM_LOGPROBS, NUM_LOGPROBS + 1) for side in values)
        # Of ids that are equally likely, one side may list the one and the other side the other.
        lowest = [sorted(side.values())[-NUM_LOGPROBS] for side in values]
        for key in values[0].keys() | values[1].keys():
            error = abs(values[0].get(key, lowest[0]) - values[1].get(key, lowest[1]))
            if not error <= TOLERANCE:
                return f"step {step}: the log-probability of {key} is off by {error:.1e}"
    return None


def differences(expected: Sequence[RequestOutput], got: Sequence[RequestOutput]) -> dict[int, str]:
    """Return the differences by the job's index."""
    pairs = [(a.outputs[0], b.outputs[0]) for a, b in zip(expected, got, strict=True)]
    differences = {index: difference(*pair) for index, pair in enumerate(pairs)}
    return {index: text for index, text in differences.items() if text is not None}
