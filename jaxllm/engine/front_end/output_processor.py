"""The core's outputs become what users see: text, log-probabilities, n outputs in one `RequestOutput`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxllm.engine.front_end.input_processor import ProcessedRequest
from jaxllm.engine.front_end.metrics import EngineMetrics
from jaxllm.exceptions import VLLMValidationError
from jaxllm.messages import EngineCoreOutput, EngineCoreOutputs, RequestError, sequence_ids
from jaxllm.outputs import CompletionOutput, RequestOutput, RequestStateStats
from jaxllm.sampling_params import RequestOutputKind
from jaxllm.text.detokenizer import make_detokenizer
from jaxllm.text.logprobs import LogprobsCollector, PromptCollector
from jaxllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxllm.engine.front_end.tracing import RequestTracer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessedOutputs:
    """The outputs of one step, and what else became of requests in it."""

    outputs: list[RequestOutput]
    aborts: list[str]
    """The sequences that the core must stop: a stop string or a failure ended them."""
    refusals: dict[str, RequestError]
    """The errors of requests that the core has refused, by the users' ids; each has an output too."""
    admitted: list[str]
    """The users' ids of requests with structured outputs that the core has found good."""
    started: list[str]
    """The users' ids of requests one of whose sequences has got its first tokens, whether or not they are shown."""


class _Sequence:
    """A sequence is one of a request's outputs, growing."""

    __slots__ = (
        "_shown_text",
        "_shown_tokens",
        "detokenizer",
        "finish_reason",
        "index",
        "logprobs",
        "num_cached_tokens",
        "owner",
        "stats",
        "stop_reason",
    )

    def __init__(self, owner: _Request, index: int, tokenizer: Tokenizer | None) -> None:
        request = owner.request.core
        params = request.sampling_params
        self.owner = owner
        self.index = index
        self.detokenizer = make_detokenizer(tokenizer, request.prompt_token_ids, params)
        shown_by = tokenizer if params.detokenize else None
        self.logprobs = None if params.num_logprobs is None else LogprobsCollector(params, shown_by)
        self.stats = RequestStateStats(arrival_time=request.arrival_time)
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_cached_tokens: int | None = None
        self._shown_tokens = 0
        self._shown_text = 0

    def update(self, output: EngineCoreOutput) -> bool:
        """Take in a step; say whether a stop string ended the sequence."""
        detokenizer = self.detokenizer
        num_before = len(detokenizer.token_ids)
        stop = detokenizer.update(
            output.new_token_ids,
            finished=output.finish_reason is not None,
            ends_in_stop_token=output.finish_reason == "stop",
        )
        num_new = len(detokenizer.token_ids) - num_before
        if self.logprobs is not None and output.new_logprobs is not None:
            for position in output.new_logprobs[:num_new]:
                self.logprobs.append(position)
        if self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
        self.finish_reason = "stop" if stop is not None else output.finish_reason
        self.stop_reason = stop if stop is not None else output.stop_reason
        if self.finish_reason == "error" and output.error is not None:
            self.stop_reason = output.error.message
        return stop is not None

    def is_due(self, stream_interval: int) -> bool:
        """Say whether there is something to show: the first token, the end, or `stream_interval` new tokens."""
        if self.finish_reason is not None:
            return True
        num_tokens = len(self.detokenizer.token_ids)
        return num_tokens - self._shown_tokens >= (stream_interval if self._shown_tokens else 1)

    def completion(self, delta: bool) -> CompletionOutput:
        """Return the output so far, or what is new since the last call."""
        detokenizer, logprobs = self.detokenizer, self.logprobs
        visible = detokenizer.visible_length(finished=self.finish_reason is not None)
        first_token = self._shown_tokens if delta else 0
        text = detokenizer.text[self._shown_text if delta else 0 : visible]
        self._shown_tokens, self._shown_text = len(detokenizer.token_ids), max(visible, self._shown_text)
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=detokenizer.token_ids[first_token:],
            cumulative_logprob=None if logprobs is None else logprobs.cumulative,
            logprobs=None if logprobs is None else logprobs.take() if delta else logprobs.copy(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class _Request:
    """This is a user's request with its n sequences."""

    __slots__ = ("kind", "num_unfinished", "prompt_logprobs", "request", "sequences", "stream_interval")

    def __init__(self, request: ProcessedRequest, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.kind = request.params.output_kind
        self.sequences = [_Sequence(self, i, tokenizer) for i in range(request.params.n)]
        self.num_unfinished = len(self.sequences)
        params = request.params
        self.stream_interval = params.stream_interval or 1
        self.prompt_logprobs: PromptCollector | None = None
        """The first sequence alone scores the prompt."""
        if params.first_scored_position is not None:
            shown_by = tokenizer if params.detokenize else None
            self.prompt_logprobs = PromptCollector(params, len(request.prompt_token_ids), shown_by)

    def output(self, changed: Iterable[_Sequence]) -> RequestOutput | None:
        """Return what to show after `changed` sequences went on, if anything."""
        finished = self.num_unfinished == 0
        if self.kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        due = [sequence for sequence in changed if sequence.is_due(self.stream_interval)]
        if not due:
            return None
        delta = self.kind is RequestOutputKind.DELTA
        if len(due) > 1:
            due.sort(key=_index)
        output = self._output(due if delta else self.sequences, delta, finished)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.show(output, delta=delta)
        return output

    def failed_output(self, reason: str) -> RequestOutput:
        """Return the last output of a request whose outputs cannot be made, without anything that may fail again."""
        ends = [CompletionOutput(i, "", [], None, None, None, "error", reason) for i in range(len(self.sequences))]
        request = self.request
        return RequestOutput(request.request_id, request.prompt, request.prompt_token_ids, None, ends, finished=True)

    def _output(self, shown: list[_Sequence], delta: bool, finished: bool) -> RequestOutput:
        request, sequences = self.request, self.sequences
        return RequestOutput(  # one is made for every token: keywords, which are looked at there, would take a while
            request.request_id,
            request.prompt,
            request.core.prompt_token_ids,
            None,
            [sequence.completion(delta) for sequence in shown],
            finished,
            _merge_stats([sequence.stats for sequence in sequences]),
            num_cached_tokens=sequences[0].num_cached_tokens,
        )


class OutputProcessor:
    """This holds every unfinished request's output."""

    def __init__(self, tokenizer: Tokenizer | None, metrics: EngineMetrics, tracer: RequestTracer | None) -> None:
        self._tokenizer = tokenizer
        self._metrics, self._tracer = metrics, tracer
        self._requests: dict[str, _Request] = {}
        self._sequences: dict[str, _Sequence] = {}

    @property
    def num_unfinished_requests(self) -> int:
        """Return how many requests are not finished; n outputs count once."""
        return len(self._requests)

    def prompt_of(self, request_id: str) -> tuple[str, int]:
        """Return the first sequence of a request and the length of its prompt; ("", 0) if it has ended."""
        state = self._requests.get(request_id)
        return ("", 0) if state is None else (state.request.core.request_id, len(state.request.prompt_token_ids))

    def add_request(self, request: ProcessedRequest) -> None:
        """Expect outputs for a request. Raises VLLMValidationError if its id is in use."""
        if request.request_id in self._requests:
            raise id_in_use(request.request_id)
        state = _Request(request, self._tokenizer)
        self._requests[request.request_id] = state
        self._sequences.update(zip(sequence_ids(request.core), state.sequences, strict=True))

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """End requests without an output; return the sequences that the core must stop. Unknown ids are ignored."""
        return [each for request_id in request_ids for each in self._end(request_id, "abort")]

    def end_aborted(self, request_id: str) -> tuple[RequestOutput | None, list[str]]:
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

    def _end(self, request_id: str, reason: str, problem: str | None = None) -> dict[str, _Sequence]:
        """End what still runs of a request, if it is known, and return that, by the core's ids."""
        state, now = self._requests.get(request_id), time.time()
        if state is None:
            return {}
        running = {each: self._sequences[each] for each in sequence_ids(state.request.core) if each in self._sequences}
        for sequence_id, sequence in running.items():
            sequence.finish_reason, sequence.stop_reason = reason, problem
            self._finish(sequence_id, sequence, now)
        return running

    def _drop(self, owner: _Request, problem: str) -> list[str]:
        """End a request of which a part of a step cannot be taken in, without what may fail again."""
        dropped = [each for each in sequence_ids(owner.request.core) if self._sequences.pop(each, None) is not None]
        self._metrics.on_dropped_sequences(len(dropped))
        if self._requests.pop(owner.request.request_id, None) is not None and self._tracer is not None:
            for sequence in owner.sequences:
                sequence.finish_reason, sequence.stop_reason = "error", problem
            self._trace(self._tracer, owner, time.time())
        return dropped

    def process_outputs(self, step: EngineCoreOutputs) -> ProcessedOutputs:
        """Take in one step of the core; sequences that are not known (any more) are ignored.

        What fails while one request's part is taken in ends that request, with an "error".
        """
        parts: dict[_Request, list[tuple[_Sequence, EngineCoreOutput]]] = {}
        num_new_tokens = 0
        refusals: dict[str, RequestError] = {}
        admitted: list[str] = []
        started: list[str] = []
        outputs: list[RequestOutput] = []
        aborts: list[str] = []
        for output in step.outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is None:
                continue
            request_id = sequence.owner.request.request_id
            if output.is_admitted:
                admitted.append(request_id)
                continue
            if output.error is not None and sequence.index == 0 and not sequence.detokenizer.token_ids:
                refusals[request_id] = output.error
            if output.new_token_ids and not sequence.detokenizer.token_ids:
                started.append(request_id)
            parts.setdefault(sequence.owner, []).append((sequence, output))
            num_new_tokens += len(output.new_token_ids)
        now = time.time()
        for request, part in parts.items():
            refusal = refusals.get(request.request.request_id)
            if refusal is not None:
                aborts += self._refuse_others(request, part, refusal)
            try:
                for sequence, each in part:
                    if self._take(sequence, each, step.timestamp, now):
                        aborts.append(each.request_id)
                shown = request.output({sequence for sequence, _ in part})
            except Exception as error:
                request_id, problem = request.request.request_id, f"{type(error).__name__}: {error}"
                logger.exception("the output of request %s cannot be made", request_id)
                aborts += {*self._drop(request, problem), *(each.request_id for _, each in part)}
                shown = request.failed_output(problem)
            if shown is not None:
                outputs.append(shown)
        self._metrics.on_evictions(step.evictions)
        self._metrics.on_step(step.stats, num_new_tokens, step.num_deferred_reqs)
        return ProcessedOutputs(outputs, aborts, refusals, admitted, started)

    def _refuse_others(
        self, request: _Request, part: list[tuple[_Sequence, EngineCoreOutput]], error: RequestError
    ) -> list[str]:
        """End the sequences of a refused request that its core says nothing of; return their ids."""
        ended = {sequence for sequence, output in part if output.finish_reason is not None}
        others: list[str] = []
        for sequence_id in sequence_ids(request.request.core):
            sequence = self._sequences.get(sequence_id)
            if sequence is not None and sequence not in ended:
                part.append((sequence, EngineCoreOutput(request_id=sequence_id, finish_reason="error", error=error)))
                others.append(sequence_id)
        return others

    def _take(self, sequence: _Sequence, output: EngineCoreOutput, timestamp: float, now: float) -> bool:
        """Take in one sequence's part of a step; say whether the core must stop it, for a stop string ended it."""
        if output.new_prompt_logprobs is not None and sequence.owner.prompt_logprobs is not None:
            sequence.owner.prompt_logprobs.add(output.new_prompt_logprobs)
        is_stopped = sequence.update(output) and output.finish_reason is None
        self._record_tokens(sequence, output, timestamp, now)
        if sequence.finish_reason is not None:
            self._finish(output.request_id, sequence, now)
        return is_stopped

    def _record_tokens(self, sequence: _Sequence, output: EngineCoreOutput, timestamp: float, now: float) -> None:
        stats = sequence.stats
        stats.num_preemptions = output.num_preemptions
        if not output.new_token_ids:
            return
        if stats.num_generation_tokens == 0:
            stats.queued_ts, stats.scheduled_ts = output.queued_ts, output.scheduled_ts
            stats.first_token_ts = timestamp
            stats.first_token_latency = now - stats.arrival_time
            num_prompt_tokens = len(sequence.owner.request.prompt_token_ids)
            self._metrics.on_first_token(stats.first_token_latency, num_prompt_tokens, output.num_cached_tokens)
        else:
            self._metrics.on_next_token(timestamp - stats.last_token_ts)
        stats.last_token_ts = timestamp
        stats.num_generation_tokens = len(sequence.detokenizer.token_ids)

    def _finish(self, request_id: str, sequence: _Sequence, now: float) -> None:
        owner = sequence.owner
        del self._sequences[request_id]
        owner.num_unfinished -= 1
        request = owner.request
        self._metrics.on_finished_sequence(
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
            self._metrics.on_finished_request(request.params.n, most_tokens)
            if self._tracer is not None:
                self._trace(self._tracer, owner, now)

    def _trace(self, tracer: RequestTracer, owner: _Request, now: float) -> None:
        reasons = [each.finish_reason or "" for each in owner.sequences]
        problem = next((str(each.stop_reason) for each in owner.sequences if each.finish_reason == "error"), None)
        tracer.on_end(owner.request, _merge_stats([each.stats for each in owner.sequences]), reasons, now, problem)


def id_in_use(request_id: str) -> VLLMValidationError:
    """Make the error for an id that an unfinished request has."""
    message = f"request_id {request_id!r} is in use by an unfinished request; choose another."
    return VLLMValidationError(message, parameter="request_id", value=request_id)


def _index(sequence: _Sequence) -> int:
    return sequence.index


def _merge_stats(stats: list[RequestStateStats]) -> RequestStateStats:
    """Return a copy: of several sequences the earliest beginning, the latest end, and all tokens."""
    if len(stats) == 1:
        return _copy(stats[0])
    started = [each for each in stats if each.num_generation_tokens] or stats[:1]
    merged = _copy(min(started, key=lambda each: each.first_token_ts))
    merged.num_generation_tokens = sum(each.num_generation_tokens for each in started)
    merged.num_preemptions = sum(each.num_preemptions for each in stats)
    merged.last_token_ts = max(each.last_token_ts for each in started)
    return merged


def _copy(stats: RequestStateStats) -> RequestStateStats:
    # One is made per output: dataclasses.replace would take ten times as long.
    return RequestStateStats(
        stats.num_generation_tokens,
        stats.num_preemptions,
        stats.arrival_time,
        stats.queued_ts,
        stats.scheduled_ts,
        stats.first_token_ts,
        stats.last_token_ts,
        stats.first_token_latency,
    )
