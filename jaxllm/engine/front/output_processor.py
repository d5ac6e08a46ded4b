"""Turn the core's outputs into the outputs that users get."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxllm.core_messages import EngineCoreOutput, EngineCoreOutputs, RequestError, sequence_ids
from jaxllm.engine.front.front_metrics import FrontMetrics
from jaxllm.engine.front.growing_request import (
    GrowingRequest,
    GrowingSequence,
    PooledRequest,
    TextReader,
    merge_stats,
)
from jaxllm.engine.front.input_processor import ProcessedRequest
from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import AnyOutput
from jaxllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxllm.engine.front.tracing import RequestTracer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessedOutputs:
    """The outputs of one step, and the failures, admissions and starts of requests in it."""

    outputs: list[AnyOutput]
    aborts: list[str]
    """The sequences that the core must stop: a stop string or a failure ended them."""
    refusals: dict[str, RequestError]
    """The errors of requests that the core has found invalid, by the users' ids; each has an output too."""
    admitted: list[str]
    """The users' ids of requests with structured outputs that the core has found good."""
    started: list[str]
    """The users' ids of requests one of whose sequences has got its first tokens, whether or not they are shown."""


class _Taken:
    """What one step of the core has brought so far."""

    __slots__ = (
        "aborts",
        "admitted",
        "engine_index",
        "failed",
        "gaps",
        "now",
        "num_new_tokens",
        "outputs",
        "started",
        "timestamp",
    )

    def __init__(self, timestamp: float, engine_index: int) -> None:
        self.timestamp, self.engine_index, self.now = timestamp, engine_index, time.time()
        self.num_new_tokens = 0
        self.gaps: dict[float, int] = {}
        """The numbers of sequences that have a token again, by the times of the tokens before."""
        self.failed: dict[str, RequestError] = {}
        """The errors of requests that have failed before their first token, by the users' ids."""
        self.outputs: list[AnyOutput] = []
        self.aborts: list[str] = []
        self.admitted: list[str] = []
        self.started: list[str] = []

    def note(self, sequence: GrowingSequence, output: EngineCoreOutput) -> None:
        """Note the replica of a sequence, its start, and its failure before that."""
        sequence.engine_index = self.engine_index
        request_id = sequence.owner.request.request_id
        if sequence.detokenizer.token_ids:
            return
        if output.error is not None and sequence.index == 0:
            self.failed[request_id] = output.error
        if output.new_token_ids:
            self.started.append(request_id)

    def processed(self) -> ProcessedOutputs:
        """Return all."""
        refusals = {request_id: error for request_id, error in self.failed.items() if error.kind == "invalid"}
        return ProcessedOutputs(self.outputs, self.aborts, refusals, self.admitted, self.started)


class OutputProcessor:
    """Holds every unfinished request's output."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        metrics: FrontMetrics,
        tracer: RequestTracer | None,
        cached_block_size: int | None,
    ) -> None:
        """Count, trace, and report what is cached: whole blocks of `cached_block_size` tokens, or nothing with None."""
        self._tokenizer, self._cached_block_size = tokenizer, cached_block_size
        self._metrics, self._tracer = metrics, tracer
        self._requests: dict[str, GrowingRequest] = {}
        self._sequences: dict[str, GrowingSequence] = {}

    @property
    def num_unfinished_requests(self) -> int:
        """Return the number of unfinished requests; n outputs count once."""
        return len(self._requests)

    def adapters(self) -> tuple[list[str], list[str]]:
        """Return the names of the adapters of requests that have no token yet, and of those that have some, sorted."""
        waiting, running = set[str](), set[str]()
        for state in self._requests.values():
            adapter = state.request.core.lora
            if adapter is not None:
                has_begun = any(sequence.detokenizer.token_ids for sequence in state.sequences)
                (running if has_begun else waiting).add(adapter.lora_name)
        return sorted(waiting), sorted(running)

    def prompt_of(self, request_id: str) -> tuple[str, int]:
        """Return the first sequence of a request and the length of its prompt; ("", 0) if it has ended."""
        state = self._requests.get(request_id)
        return ("", 0) if state is None else (state.request.core.request_id, len(state.request.prompt_token_ids))

    def add_request(self, request: ProcessedRequest, text_reader: TextReader | None = None) -> None:
        """Expect outputs for a request. A stream's plain text goes straight to `text_reader` while it takes any.

        Raises VLLMValidationError if its id is in use.
        """
        if request.request_id in self._requests:
            raise id_in_use(request.request_id)
        kind = GrowingRequest if request.core.pooling_params is None else PooledRequest
        state = kind(request, self._tokenizer, self._cached_block_size, text_reader)
        self._requests[request.request_id] = state
        self._sequences.update(zip(sequence_ids(request.core), state.sequences, strict=True))

    def request_ids(self) -> list[str]:
        """Return the ids of the unfinished requests."""
        return list(self._requests)

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """End requests without an output; return the sequences that the core must stop. Unknown ids are ignored."""
        return [each for request_id in request_ids for each in self._end(request_id, "abort")]

    def end_aborted(self, request_id: str) -> tuple[AnyOutput | None, list[str]]:
        """End a request as aborted; return its last output, and the ids of the sequences that the core must stop."""
        state = self._requests[request_id]
        running = self._end(request_id, "abort")
        try:
            return state.output(running.values()), list(running)
        except Exception as error:
            logger.exception("the last output of request %s cannot be made", request_id)
            return state.failed_output(f"{type(error).__name__}: {error}"), list(running)

    def fail_all(self, problem: str) -> list[str]:
        """End all requests without an output; return the sequences that the core must stop."""
        return [each for request_id in list(self._requests) for each in self._end(request_id, "error", problem)]

    def _end(self, request_id: str, reason: str, problem: str | None = None) -> dict[str, GrowingSequence]:
        """End what still runs of a request, if it is known, and return that, by the core's ids."""
        state, now = self._requests.get(request_id), time.time()
        if state is None:
            return {}
        running = {each: self._sequences[each] for each in sequence_ids(state.request.core) if each in self._sequences}
        for sequence_id, sequence in running.items():
            sequence.finish_reason, sequence.stop_reason = reason, problem
            self._finish(sequence_id, sequence, now)
        return running

    def _drop(self, owner: GrowingRequest, problem: str) -> list[str]:
        """End a request after an error in taking in its part of a step, without steps that may fail again."""
        dropped = [each for each in sequence_ids(owner.request.core) if self._sequences.pop(each, None) is not None]
        self._metrics.of(owner.sequences[0].engine_index).on_dropped_sequences(len(dropped))
        if self._requests.pop(owner.request.request_id, None) is not None and self._tracer is not None:
            for sequence in owner.sequences:
                sequence.finish_reason, sequence.stop_reason = "error", problem
            self._trace(self._tracer, owner, time.time())
        return dropped

    def process_outputs(self, step: EngineCoreOutputs) -> ProcessedOutputs:
        """Take in one step of the core; sequences that are not known (any more) are ignored. A text that has gone
        straight to its reader is in none of the outputs.

        What fails while one request's part is taken in ends that request, with an "error".
        """
        taken = _Taken(step.timestamp, step.engine_index)
        parts: dict[GrowingRequest, list[tuple[GrowingSequence, EngineCoreOutput]]] = {}
        for output in step.outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is None:
                continue
            taken.num_new_tokens += len(output.new_token_ids)
            goes_on = output.finish_reason is None and len(output.new_token_ids) > 0
            if goes_on and self._relay(sequence, output.new_token_ids, taken):
                sequence.stats.num_preemptions = output.num_preemptions
                continue
            if output.is_admitted:
                taken.admitted.append(sequence.owner.request.request_id)
                continue
            taken.note(sequence, output)
            parts.setdefault(sequence.owner, []).append((sequence, output))
        for sequence_id, token_id in zip(*step.next_tokens, strict=True):
            sequence = self._sequences.get(sequence_id)
            if sequence is None:
                continue
            taken.num_new_tokens += 1
            if not self._relay(sequence, [token_id], taken):
                output = EngineCoreOutput(request_id=sequence_id, new_token_ids=[token_id])
                taken.note(sequence, output)
                parts.setdefault(sequence.owner, []).append((sequence, output))
        for request, part in parts.items():
            if self._requests.get(request.request.request_id) is request:  # its text has not failed in this step
                self._take_part(request, part, taken)
        metrics = self._metrics.of(step.engine_index)
        for last_token_ts, num_sequences in taken.gaps.items():
            metrics.on_next_tokens(step.timestamp - last_token_ts, num_sequences)
        metrics.on_evictions(step.evictions)
        metrics.on_step(step.stats, taken.num_new_tokens, step.num_deferred_reqs)
        return taken.processed()

    def _relay(self, sequence: GrowingSequence, token_ids: list[int], taken: _Taken) -> bool:
        """Give the text of new tokens straight to its reader; return False if it has to become an output.

        Nearly all tokens of a server's streams go this way. Per token it makes the text, and what the reader makes of
        it: no output, no merged statistics, and no wake-up of the task that reads. That takes 2 us and the reader 2 us,
        beside 5 us in the system, which sends one packet; a task would take 15 us more.
        """
        reader, stats = sequence.text_reader, sequence.stats
        if reader is None or not stats.num_generation_tokens:
            return False
        write = reader.text_writer()
        if write is None:
            return False
        try:
            write(sequence.push(token_ids), len(token_ids))
        except Exception as failure:  # noqa: BLE001 - it ends this request alone
            taken.aborts += self._fail(sequence.owner, failure, taken)
            return True
        gaps, last_token_ts = taken.gaps, stats.last_token_ts
        gaps[last_token_ts] = gaps.get(last_token_ts, 0) + 1
        stats.last_token_ts = taken.timestamp
        stats.num_generation_tokens += len(token_ids)
        return True

    def _take_part(
        self, request: GrowingRequest, part: list[tuple[GrowingSequence, EngineCoreOutput]], taken: _Taken
    ) -> None:
        """Take in one request's part of a step, and make its output if there is one to show."""
        error = taken.failed.get(request.request.request_id)
        if error is not None:
            taken.aborts += self._fail_others(request, part, error)
        try:
            for sequence, output in part:
                if self._take(sequence, output, taken):
                    taken.aborts.append(output.request_id)
            shown = request.output({sequence for sequence, _ in part})
        except Exception as failure:  # noqa: BLE001 - it ends this request alone
            dropped = self._fail(request, failure, taken)
            taken.aborts += {*dropped, *(output.request_id for _, output in part)}
        else:
            if shown is not None:
                taken.outputs.append(shown)

    def _fail(self, request: GrowingRequest, failure: Exception, taken: _Taken) -> list[str]:
        """End a request whose output cannot be made, with an error as its output; return its sequences that still ran.

        Call it while the failure is handled.
        """
        problem = f"{type(failure).__name__}: {failure}"
        logger.exception("the output of request %s cannot be made", request.request.request_id)
        dropped = self._drop(request, problem)
        taken.outputs.append(request.failed_output(problem))
        return dropped

    def _fail_others(
        self, request: GrowingRequest, part: list[tuple[GrowingSequence, EngineCoreOutput]], error: RequestError
    ) -> list[str]:
        """End the sequences of a request without a token that its core says nothing of; return their ids."""
        ended = {sequence for sequence, output in part if output.finish_reason is not None}
        others: list[str] = []
        for sequence_id in sequence_ids(request.request.core):
            sequence = self._sequences.get(sequence_id)
            if sequence is not None and sequence not in ended:
                part.append((sequence, EngineCoreOutput(request_id=sequence_id, finish_reason="error", error=error)))
                others.append(sequence_id)
        return others

    def _take(self, sequence: GrowingSequence, output: EngineCoreOutput, taken: _Taken) -> bool:
        """Take in one sequence's part of a step; return True if a stop string ended it: the core must stop it."""
        if output.new_prompt_logprobs is not None and sequence.owner.prompt_logprobs is not None:
            sequence.owner.prompt_logprobs.add(output.new_prompt_logprobs)
        if output.new_hidden_states is not None:
            sequence.owner.add_hidden_states(output.new_hidden_states)
        is_stopped = sequence.update(output) and output.finish_reason is None
        self._record_tokens(sequence, output, taken)
        if sequence.finish_reason is not None:
            self._finish(output.request_id, sequence, taken.now)
        return is_stopped

    def _record_tokens(self, sequence: GrowingSequence, output: EngineCoreOutput, taken: _Taken) -> None:
        stats = sequence.stats
        stats.num_preemptions = max(stats.num_preemptions, output.num_preemptions)
        if not output.new_token_ids and output.pooled is None:
            return
        if stats.num_generation_tokens == 0:
            stats.queued_ts, stats.scheduled_ts = output.queued_ts, output.scheduled_ts
            stats.first_token_ts = taken.timestamp
            stats.first_token_latency = taken.now - stats.arrival_time
            num_prompt_tokens = len(sequence.owner.request.prompt_token_ids)
            metrics = self._metrics.of(sequence.engine_index)
            metrics.on_first_token(stats.first_token_latency, num_prompt_tokens, output.num_cached_tokens)
        else:
            taken.gaps[stats.last_token_ts] = taken.gaps.get(stats.last_token_ts, 0) + 1
        stats.last_token_ts = taken.timestamp
        stats.num_generation_tokens = len(sequence.detokenizer.token_ids)

    def _finish(self, request_id: str, sequence: GrowingSequence, now: float) -> None:
        owner = sequence.owner
        del self._sequences[request_id]
        owner.num_unfinished -= 1
        request, metrics = owner.request, self._metrics.of(sequence.engine_index)
        metrics.on_finished_sequence(
            sequence.finish_reason or "",
            sequence.stats,
            now,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=sequence.num_cached_tokens or 0,
            max_tokens=request.params.max_tokens or request.core.max_tokens,
        )
        if owner.num_unfinished == 0:
            del self._requests[request.request_id]
            most_tokens = max(each.stats.num_generation_tokens for each in owner.sequences)
            metrics.on_finished_request(request.params.n, most_tokens)
            if self._tracer is not None:
                self._trace(self._tracer, owner, now)

    def _trace(self, tracer: RequestTracer, owner: GrowingRequest, now: float) -> None:
        reasons = [each.finish_reason or "" for each in owner.sequences]
        problem = next((str(each.stop_reason) for each in owner.sequences if each.finish_reason == "error"), None)
        tracer.on_end(owner.request, merge_stats([each.stats for each in owner.sequences]), reasons, now, problem)


def id_in_use(request_id: str) -> VLLMValidationError:
    """Make the error for an id that an unfinished request has."""
    message = f"request_id {request_id!r} is in use by an unfinished request; choose another."
    return VLLMValidationError(message, parameter="request_id", value=request_id)
