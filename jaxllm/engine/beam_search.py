"""Beam search: `LLM.beam_search` under vLLM's names, with the results of Hugging Face's `generate(num_beams=...)`.

Each step of a search is one ordinary request per live beam, for one token and its most likely rivals. It forks the
request that its beam grew from, so that beams share the KV blocks of what they have in common.
"""

from __future__ import annotations

import contextlib
import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from jaxllm.beam_search import BeamSearchOutput, BeamSearchSequence
from jaxllm.engine.input_processor import ProcessedRequest
from jaxllm.engine.interrupts import deferred_interrupts
from jaxllm.engine.progress import Progress
from jaxllm.exceptions import VLLMValidationError
from jaxllm.logprobs import Logprob
from jaxllm.outputs import RequestOutput
from jaxllm.params.checks import INT32_MAX, check_int, shown
from jaxllm.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from jaxllm.engine.llm_engine import LLMEngine
    from jaxllm.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence in the making."""

    token_ids: list[int]
    """Generated ones only."""
    cum_logprob: float
    logprobs: list[Mapping[int, Logprob]]
    parent: int
    """Its index among the live beams of the step before."""


class BeamSearch:
    """The search for one prompt, without an engine: log-probabilities in, the beams to go on with out.

    As in Hugging Face: an end of sequence counts only among the step's `width` best candidates; scores divide by the
    number of generated tokens, that end included; once `width` sequences have ended, the search ends as soon as its
    best live beam, scored at its present length, is no better than the worst of them.
    """

    def __init__(self, width: int, max_tokens: int, length_penalty: float, end_ids: frozenset[int]) -> None:
        self.live = [Beam([], 0.0, [], 0)]
        """The beams to go on with, best first; none when the search has ended."""
        self._ended: list[tuple[float, Beam]] = []
        self._num_tokens = 0
        self._width = width
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._end_ids = end_ids

    @property
    def found(self) -> list[Beam]:
        """The best sequences that have ended so far, best first."""
        return [beam for _, beam in self._ended]

    def advance(self, tops: Sequence[Mapping[int, Logprob]]) -> None:
        """Take each live beam's most likely next tokens, at least `num_candidates` of them, and do one step."""
        self._num_tokens += 1
        is_last = self._num_tokens == self._max_tokens
        live: list[Beam] = []
        for place, (cum_logprob, parent, token_id) in enumerate(self._best_candidates(tops)):
            before = self.live[parent]
            beam = Beam([*before.token_ids, token_id], cum_logprob, [*before.logprobs, tops[parent]], parent)
            if not is_last and token_id not in self._end_ids:
                live.append(beam)
            elif place < self._width:
                self._ended.append((self._score(cum_logprob), beam))
        self._ended.sort(key=_first, reverse=True)
        del self._ended[self._width :]
        self.live = live[: self._width] if self._can_improve(live) else []

    def _best_candidates(self, tops: Sequence[Mapping[int, Logprob]]) -> list[tuple[float, int, int]]:
        """Return (cumulative log-probability, parent, token id) of the best continuations, best first."""
        candidates = (
            (beam.cum_logprob + entry.logprob, parent, token_id)
            for parent, (beam, top) in enumerate(zip(self.live, tops, strict=True))
            for token_id, entry in top.items()
            if entry.logprob > -math.inf
        )
        return heapq.nlargest(num_candidates(self._width, self._end_ids), candidates, key=_first)

    def _score(self, cum_logprob: float) -> float:
        return cum_logprob / self._num_tokens**self._length_penalty

    def _can_improve(self, live: list[Beam]) -> bool:
        if len(self._ended) < self._width or not live:
            return True
        return self._score(live[0].cum_logprob) > self._ended[-1][0]


def num_candidates(width: int, end_ids: frozenset[int]) -> int:
    """Return how many continuations a step looks at: enough for `width` to go on if all others end."""
    return width * max(2, 1 + len(end_ids))


def _first(pair: tuple[float, *tuple[Any, ...]]) -> float:
    return pair[0]


@dataclass(slots=True)
class _Running:
    """A prompt's search with the requests of its present step."""

    request: ProcessedRequest
    search: BeamSearch
    num_steps: int = 0
    request_ids: list[str] = field(default_factory=list)
    """One per live beam."""
    parent_ids: list[str] = field(default_factory=list)
    """The requests of the step before, while they are needed."""
    tops: dict[str, Mapping[int, Logprob]] = field(default_factory=dict)
    """What has come back of them."""


class BeamSearcher:
    """Searches for many prompts at once, on an engine that may do other work too."""

    def __init__(
        self,
        engine: LLMEngine,
        request_ids: Sequence[str],
        prompts: Sequence[Any],
        params: BeamSearchParams,
        concurrency_limit: int | None,
    ) -> None:
        """Check everything, without queueing anything."""
        end_ids = _check_params(engine, params)
        self._limit = len(prompts) if concurrency_limit is None else concurrency_limit
        if concurrency_limit is not None:
            self._limit = check_int("concurrency_limit", concurrency_limit, 1, INT32_MAX)
        self._engine = engine
        self._params = params
        self._end_ids = end_ids
        width, vocab_size = params.beam_width, engine.model_config.vocab_size
        sampling = SamplingParams(
            temperature=0,
            max_tokens=params.max_tokens,
            logprobs=min(num_candidates(width, end_ids), vocab_size),
            ignore_eos=True,
            detokenize=False,
        )
        requests = engine.process_requests(request_ids, prompts, [sampling] * len(prompts)) if prompts else []
        self._searches = [
            _Running(each, BeamSearch(width, each.sequences[0].max_tokens, params.length_penalty, end_ids))
            for each in requests
        ]
        self._pending = deque(self._searches)
        self._active: list[_Running] = []
        self._owners: dict[str, _Running] = {}
        """By the ids of the requests that are not finished."""

    def run(self, step: Callable[[], list[RequestOutput]], use_tqdm: bool | Callable[..., Any]) -> None:
        """Step until every search has ended. Ctrl-C and errors leave neither requests nor blocks behind."""
        try:
            with (
                deferred_interrupts() as raise_if_interrupted,
                contextlib.closing(Progress(use_tqdm, len(self._searches))) as progress,
            ):
                self._start()
                while self._active:
                    if not self._engine.has_unfinished_requests():
                        raise RuntimeError("the requests of a beam search were aborted")
                    for output in step():
                        self._take(output, progress)
                    raise_if_interrupted()
        except BaseException:
            with deferred_interrupts():
                self._abort()
            raise

    def outputs(self, tokenizer: Tokenizer | None) -> list[BeamSearchOutput]:
        """Return what was found, in the prompts' order; text only with a tokenizer."""
        return [
            BeamSearchOutput([self._sequence(running, beam, tokenizer) for beam in running.search.found])
            for running in self._searches
        ]

    def _start(self) -> None:
        """Begin as many searches as may run at once."""
        while self._pending and len(self._active) < self._limit:
            running = self._pending.popleft()
            self._active.append(running)
            self._submit(running)

    def _take(self, output: RequestOutput, progress: Progress) -> None:
        """Take in an output of the engine, ours or not; a search whose step is complete goes on or ends."""
        running = self._owners.pop(output.request_id, None)
        if running is None:
            return
        logprobs = output.outputs[0].logprobs
        if not logprobs:
            raise RuntimeError(f"a step of a beam search ended without a token, by {output.outputs[0].finish_reason!r}")
        running.tops[output.request_id] = logprobs[0]
        if len(running.tops) < len(running.request_ids):
            return
        running.search.advance([running.tops[each] for each in running.request_ids])
        self._submit(running)
        if not running.search.live:
            found = running.search.found
            progress.count(len(running.request.prompt_token_ids), sum(len(beam.token_ids) for beam in found))
            self._active.remove(running)
            self._start()

    def _abort(self) -> None:
        self._engine.abort_request(list(self._owners))
        for running in self._active:
            self._engine.release(running.parent_ids + running.request_ids)

    def _submit(self, running: _Running) -> None:
        """Queue one request per live beam, each a fork of its parent's, and let go of the parents."""
        parents = running.parent_ids = running.request_ids
        running.request_ids, running.tops = [], {}
        base = running.request.sequences[0]
        for index, beam in enumerate(running.search.live):
            request_id = f"{base.request_id}.{running.num_steps}.{index}"
            core = msgspec.structs.replace(
                base,
                request_id=request_id,
                prompt_token_ids=base.prompt_token_ids + beam.token_ids,
                max_tokens=1,
                fork_of=parents[beam.parent] if parents else None,
                keeps_blocks=True,
            )
            request = ProcessedRequest(
                request_id, None, core.prompt_token_ids, core.sampling_params, core.arrival_time, (core,)
            )
            self._engine.enqueue(request)
            running.request_ids.append(request_id)
            self._owners[request_id] = running
        running.num_steps += 1
        self._engine.release(parents)
        running.parent_ids = []

    def _sequence(self, running: _Running, beam: Beam, tokenizer: Tokenizer | None) -> BeamSearchSequence:
        request, last = running.request, beam.token_ids[-1]
        base = request.sequences[0]
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": request.prompt_token_ids}
        prompt |= {} if request.prompt is None else {"prompt": request.prompt}
        prompt |= {} if base.cache_salt is None else {"cache_salt": base.cache_salt}
        tokens = request.prompt_token_ids + beam.token_ids
        ends = last in self._end_ids
        text = None
        if tokenizer is not None:
            shown_tokens = tokens[:-1] if ends and not self._params.include_stop_str_in_output else tokens
            text = tokenizer.backend.decode(shown_tokens, skip_special_tokens=False)
        return BeamSearchSequence(
            orig_prompt=prompt,
            tokens=tokens,
            logprobs=[_with_strings(top, tokenizer) for top in beam.logprobs],
            cum_logprob=beam.cum_logprob,
            text=text,
            finish_reason="stop" if ends else "length",
            stop_reason=last if ends else None,
        )


def _with_strings(top: Mapping[int, Logprob], tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    if tokenizer is None:
        return dict(top)
    return {each: Logprob(entry.logprob, entry.rank, tokenizer.token_string(each)) for each, entry in top.items()}


def _check_params(engine: LLMEngine, params: Any) -> frozenset[int]:
    """Refuse what cannot be searched; return the ids that end a sequence."""
    if not isinstance(params, BeamSearchParams):
        message = f"params must be BeamSearchParams, got {shown(params)} ({type(params).__name__})."
        raise VLLMValidationError(message, parameter="params", value=params)
    if params.temperature:
        message = (
            f"beam search takes temperature=0 only, got {params.temperature}: beams rank by the model's own "
            "log-probabilities; use generate() to sample."
        )
        raise VLLMValidationError(message, parameter="temperature", value=params.temperature)
    if params.structured_outputs is not None:
        message = "structured_outputs is not supported in beam search; use generate(), with n > 1 for several outputs."
        raise VLLMValidationError(message, parameter="structured_outputs", value=params.structured_outputs)
    _check_mode(engine)
    end_ids = frozenset() if params.ignore_eos else _end_ids(engine)
    wanted = min(num_candidates(params.beam_width, end_ids), engine.model_config.vocab_size)
    if wanted > engine.config.max_logprobs:
        message = (
            f"beam_width={params.beam_width} needs the {wanted} most likely tokens of each step, but "
            f"max_logprobs={engine.config.max_logprobs}; start the engine with max_logprobs={wanted} or more."
        )
        raise VLLMValidationError(message, parameter="beam_width", value=params.beam_width)
    return end_ids


def _check_mode(engine: LLMEngine) -> None:
    """Refuse engines whose logprobs are not what the model says of a sequence."""
    mode = engine.config.logprobs_mode
    if mode.endswith("logits"):
        message = (
            f"beam search adds up log-probabilities, which this engine, started with logprobs_mode={mode!r}, lacks."
        )
        raise VLLMValidationError(message, parameter="logprobs_mode", value=mode)
    if engine.config.logits_processors and mode != "processed_logprobs":
        message = (
            "beam search sees what logits_processors do only in an engine started with "
            "logprobs_mode='processed_logprobs'."
        )
        raise VLLMValidationError(message, parameter="logits_processors", value=mode)


def _end_ids(engine: LLMEngine) -> frozenset[int]:
    known = SamplingParams()
    known.update_from_generation_config(
        engine.config.generation_config, engine.tokenizer.eos_token_id if engine.tokenizer is not None else None
    )
    return frozenset(each for each in known.all_stop_token_ids if each < engine.model_config.vocab_size)
