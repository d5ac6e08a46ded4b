"""The outputs of requests that run: text, log-probabilities, n outputs in one `RequestOutput`, or a pooled output."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from jaxllm.core_messages import EngineCoreOutput, HiddenStates, Pooled, PromptMedia
from jaxllm.engine.front.input_processor import ProcessedRequest
from jaxllm.engine.front.late_chunks import chunk_embeddings
from jaxllm.outputs import (
    AnyOutput,
    BlamedReason,
    CompletionOutput,
    PlaceholderRange,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    RequestStateStats,
)
from jaxllm.pooling_params import TOKEN_TASKS
from jaxllm.sampling_params import RequestOutputKind
from jaxllm.text.detokenizer import make_detokenizer
from jaxllm.text.logprobs import LogprobsCollector, PromptCollector
from jaxllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np


class TextReader(Protocol):
    """A reader that can take a stream's plain text as it comes, without an output around it."""

    def text_writer(self) -> Callable[[str, int], None] | None:
        """Return what takes the text of new tokens, often "", and their number; None if an output has to bring them,
        as while the reader has something left to read.
        """
        ...


class _NoReader:
    """The reader of texts that are only shown whole, at their end."""

    def text_writer(self) -> Callable[[str, int], None]:
        return self._ignore

    def _ignore(self, text: str, num_tokens: int) -> None:
        pass


_NO_READER = _NoReader()


class GrowingSequence:
    """One output of a request, which grows."""

    __slots__ = (
        "_shown_text",
        "_shown_tokens",
        "detokenizer",
        "engine_index",
        "finish_reason",
        "index",
        "logprobs",
        "num_cached_tokens",
        "owner",
        "pooled",
        "stats",
        "stop_reason",
        "text_reader",
    )

    def __init__(self, owner: GrowingRequest, index: int, tokenizer: Tokenizer | None) -> None:
        request = owner.request.core
        params = request.sampling_params
        self.owner = owner
        self.index = index
        self.engine_index = 0
        """The replica that computes it, from its first output on."""
        self.detokenizer = make_detokenizer(tokenizer, request.prompt_token_ids, params)
        shown_by = tokenizer if params.detokenize else None
        self.logprobs = None if params.num_logprobs is None else LogprobsCollector(params, shown_by)
        self.stats = RequestStateStats(arrival_time=request.arrival_time)
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_cached_tokens: int | None = None
        self.pooled: Pooled | None = None
        self.text_reader: TextReader | None = None
        """The reader of a text whose steps show the text of their tokens and nothing else, but for the first and the
        last step. Several streamed sequences have none: their texts are better joined in one output.
        """
        self._shown_tokens = 0
        self._shown_text = 0

    def update(self, output: EngineCoreOutput) -> bool:
        """Take in a step; return whether a stop string ended the sequence."""
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
        self.pooled = output.pooled
        self.finish_reason = "stop" if stop is not None else output.finish_reason
        self.stop_reason = stop if stop is not None else output.stop_reason
        if self.finish_reason == "error" and output.error is not None:
            message, parameter = output.error.message, output.error.parameter
            self.stop_reason = message if parameter is None else BlamedReason.of(message, parameter)
        return stop is not None

    def push(self, new_token_ids: list[int]) -> str:
        """Take in the tokens of a step of a plain text and return the text to show, instead of a `completion`."""
        text = self.detokenizer.push(new_token_ids)
        self._shown_tokens = len(self.detokenizer.token_ids)
        self._shown_text += len(text)
        return text

    def is_due(self, stream_interval: int) -> bool:
        """Return whether there is something to show: the first token, the end, or `stream_interval` new tokens."""
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


class GrowingRequest:
    """A user's request with its n sequences."""

    __slots__ = (
        "hidden_states",
        "kind",
        "num_cacheable_tokens",
        "num_unfinished",
        "prompt_logprobs",
        "request",
        "sequences",
        "stream_interval",
    )

    def __init__(
        self,
        request: ProcessedRequest,
        tokenizer: Tokenizer | None,
        cached_block_size: int | None,
        text_reader: TextReader | None = None,
    ) -> None:
        self.request = request
        num_tokens = len(request.prompt_token_ids)
        self.num_cacheable_tokens = num_tokens - num_tokens % cached_block_size if cached_block_size else 0
        """The number of prompt tokens in whole blocks, which the prefix cache keeps."""
        self.kind = request.params.output_kind
        self.sequences = [GrowingSequence(self, i, tokenizer) for i in range(request.params.n)]
        self.num_unfinished = len(self.sequences)
        self.hidden_states: dict[int, bytes] = {}
        """The hidden states of prompt tokens, by position, which the first sequence alone reports."""
        params = request.params
        self.stream_interval = params.stream_interval or 1
        self.prompt_logprobs: PromptCollector | None = None
        """The first sequence alone scores the prompt."""
        if params.first_scored_position is not None:
            shown_by = tokenizer if params.detokenize else None
            self.prompt_logprobs = PromptCollector(params, len(request.prompt_token_ids), shown_by)
        first = self.sequences[0]
        is_delta = self.kind is RequestOutputKind.DELTA and self.stream_interval == 1 and len(self.sequences) == 1
        if is_delta and self.prompt_logprobs is first.logprobs is None and first.detokenizer.shows_at_once:
            first.text_reader = text_reader
        if self.kind is RequestOutputKind.FINAL_ONLY:
            for sequence in self.sequences:
                is_plain = sequence.logprobs is None and sequence.detokenizer.shows_at_once
                sequence.text_reader = _NO_READER if is_plain else None

    def output(self, changed: Iterable[GrowingSequence]) -> AnyOutput | None:
        """Return the output to show after `changed` sequences went on, if anything."""
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
        if finished and self.hidden_states:
            self._show_hidden_states(output)
        return output

    def add_hidden_states(self, states: HiddenStates) -> None:
        """Take in the hidden states of some prompt tokens."""
        size = len(states.data) // states.num_tokens
        for index in range(states.num_tokens):
            self.hidden_states[states.start + index] = states.data[index * size : (index + 1) * size]

    def _show_hidden_states(self, output: RequestOutput) -> None:
        """Put the hidden states of the prompt into the last output."""
        import numpy as np  # a front end that returns no arrays does without

        states = [self.hidden_states[position] for position in sorted(self.hidden_states)]
        flat_tf, num_layers = np.frombuffer(b"".join(states), np.float32), self.request.num_hidden_layers
        output.prompt_hidden_states = flat_tf.reshape(len(states), num_layers, -1).swapaxes(0, 1).copy()

    def failed_output(self, reason: str) -> AnyOutput:
        """Return the last output of a request whose outputs cannot be made, without anything that may fail again."""
        ends = [CompletionOutput(i, "", [], None, None, None, "error", reason) for i in range(len(self.sequences))]
        request = self.request
        return RequestOutput(request.request_id, request.prompt, request.prompt_token_ids, None, ends, finished=True)

    def _output(self, shown: list[GrowingSequence], delta: bool, finished: bool) -> RequestOutput:
        request, sequences = self.request, self.sequences
        num_cached = sequences[0].num_cached_tokens
        return RequestOutput(  # one is made for every token, and keywords would be slower
            request.request_id,
            request.prompt,
            request.core.prompt_token_ids,
            None,
            [sequence.completion(delta) for sequence in shown],
            finished,
            merge_stats([sequence.stats for sequence in sequences]),
            request.core.lora,
            num_cached_tokens=num_cached,
            multi_modal_placeholders=placeholder_ranges(request.core.media),
            num_cache_creation_tokens=max(0, self.num_cacheable_tokens - (num_cached or 0)),
        )


def placeholder_ranges(media: PromptMedia | None) -> dict[str, list[PlaceholderRange]] | None:
    """Return the runs of a prompt's tokens that stand for its media, by modality; None for a prompt without media."""
    if media is None or media.is_whole_prompt:
        return None
    ranges: dict[str, list[PlaceholderRange]] = {}
    for item in media.items:
        of_item = [PlaceholderRange(span.offset, span.num_rows) for span in item.spans]
        ranges.setdefault(item.modality, []).extend(of_item)
    return ranges


class PooledRequest(GrowingRequest):
    """A request whose prompt is pooled. It has one sequence, and one output, at its end."""

    __slots__ = ()

    def output(self, changed: Iterable[GrowingSequence]) -> AnyOutput | None:
        """Return the output once it has come."""
        del changed
        [sequence] = self.sequences
        if self.num_unfinished:
            return None
        if sequence.pooled is None:
            return self.failed_output(str(sequence.stop_reason or sequence.finish_reason))
        data, chunks = _to_array(sequence.pooled, self.request), self.request.late_chunking
        if chunks is not None:
            assert self.request.core.pooling_params is not None
            data = chunk_embeddings(data, chunks, self.request.core.pooling_params)
        return self._pooled_output(data, None)

    def failed_output(self, reason: str) -> AnyOutput:
        """Return the output of a request that has ended without one."""
        return self._pooled_output(None, reason)

    def _pooled_output(self, data: Any, error: str | None) -> AnyOutput:
        request = self.request
        num_cached = self.sequences[0].num_cached_tokens or 0
        return PoolingRequestOutput(
            request.request_id,
            PoolingOutput(data),
            request.core.prompt_token_ids,
            num_cached,
            True,
            error,
            None if data is None else request.late_chunking,
            placeholder_ranges(request.core.media),
        )


def _to_array(pooled: Pooled, request: ProcessedRequest) -> np.ndarray:
    """Return the float32 output [o] of a sequence, or [tokens, o]; of tokens with one number [tokens] if it is flat."""
    import numpy as np  # a front end that does not pool does without

    values, params = np.frombuffer(pooled.data, np.float32).copy(), request.core.pooling_params  # users may write to it
    if params is None or params.task not in TOKEN_TASKS or pooled.is_flat:
        return values
    return values.reshape(pooled.num_rows, -1) if pooled.num_rows else values.reshape(0, 0)


def _index(sequence: GrowingSequence) -> int:
    return sequence.index


def merge_stats(stats: list[RequestStateStats]) -> RequestStateStats:
    """Return a copy: of several sequences the earliest beginning, the latest end, and all tokens."""
    if len(stats) == 1:
        return _copy(stats[0])
    started = [each for each in stats if each.num_generation_tokens] or stats[:1]
    merged = _copy(min(started, key=lambda stat: stat.first_token_ts))
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
