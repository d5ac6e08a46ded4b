"""`LLM.beam_search` runs searches on an engine, with vLLM's results.

Each step of a search is one ordinary request per live beam, for one token and its most likely rivals. It forks the
request that its beam grew from, so that beams share the KV blocks of what they have in common.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from jaxllm.beam_search import BeamSearchOutput, BeamSearchSequence
from jaxllm.constraints import bits
from jaxllm.engine.beam.beams import Beam, BeamSearch, Step
from jaxllm.engine.beam.grammar import BeamGrammar, Mask, Masks
from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.engine.front.input_processor import ProcessedRequest, mix
from jaxllm.exceptions import VLLMValidationError
from jaxllm.logprobs import Logprob
from jaxllm.outputs import RequestOutput, RequestStateStats
from jaxllm.params.checks import INT32_MAX, check_int, shown
from jaxllm.sampling_params import BeamSearchParams, SamplingParams
from jaxllm.text.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class _Running:
    """A prompt's search, with the requests of its present step."""

    request: ProcessedRequest
    search: BeamSearch
    grammar: BeamGrammar | None
    allowed: Collection[int] | None
    """The only tokens that may follow; None if all may."""
    num_steps: int = 0
    request_ids: list[str | None] = field(default_factory=list)
    """The request of each live beam; None for a beam that nothing can follow."""
    parent_ids: list[str | None] = field(default_factory=list)
    """The requests of the step before, while they are needed."""
    masks: Masks = ()
    """The masks of the tokens that may follow each live beam; empty without a grammar."""
    tops: dict[str, Mapping[int, Logprob]] = field(default_factory=dict)
    """The outputs of the requests so far."""
    is_aborted: bool = False

    @property
    def is_step_complete(self) -> bool:
        """Return whether all requests of the step have ended."""
        return len(self.tops) == len(_known(self.request_ids))

    def advance(self) -> None:
        """Do the step that is complete."""
        if self.is_aborted:
            self.search.abort()
        else:
            self.search.advance([self._step(index) for index in range(len(self.request_ids))])

    def _step(self, index: int) -> Step | None:
        request_id = self.request_ids[index]
        if request_id is None:
            return None
        top, mask_w = self.tops[request_id], self.masks[index] if self.masks else None
        if self.allowed is not None:
            top = {each: top[each] for each in top if each in self.allowed}
        return Step(top, top if mask_w is None else [each for each in top if bits.has(mask_w, each)])


class _BeamEngine(Protocol):
    """The calls that a search makes of an engine; none of them waits."""

    def enqueue(self, request: ProcessedRequest) -> None:
        """Queue a request that is complete."""
        ...

    def abort_request(self, request_ids: Iterable[str]) -> None:
        """End requests without further output; unknown ids are ignored."""
        ...

    def release(self, request_ids: Iterable[str]) -> None:
        """Give up the blocks that ended requests have kept for forks; unknown ids are ignored."""
        ...


class BeamSearcher:
    """Searches for many prompts at once, on an engine that may do other work too.

    The caller, which runs the engine, calls `start`, then `take` with the engine's outputs until `is_done`. With a
    grammar a search waits for `masks` between its steps, and `resume` continues the searches with finished masks. If a
    call raises, or the caller stops early, `abort` leaves neither requests nor blocks behind.
    """

    def __init__(
        self, engine: _BeamEngine, front: FrontEnd, params: BeamSearchParams, concurrency_limit: int | None
    ) -> None:
        """Check the params. Raises VLLMValidationError for those that this engine cannot search by."""
        num_candidates = _check_params(front, params)
        self._limit = concurrency_limit
        if concurrency_limit is not None:
            self._limit = check_int("concurrency_limit", concurrency_limit, 1, INT32_MAX)
        self.sampling_params = SamplingParams(
            temperature=params.temperature,
            max_tokens=params.max_tokens,
            logprobs=None if params.allowed_token_ids else num_candidates,
            logprob_token_ids=params.allowed_token_ids,
            structured_outputs=params.structured_outputs,
            ignore_eos=True,
            detokenize=False,
        )
        """The params with which each prompt is to become a request for `start`."""
        self._engine = engine
        self._front = front
        self._params = params
        self._end_id = _end_id(front)
        self._on_end: Callable[[int, int], None] = _ignore
        self._searches: list[_Running] = []
        self._pending: deque[_Running] = deque()
        self._active: list[_Running] = []
        self._owners: dict[str, _Running] = {}
        """The searches, by the ids of their requests that have not ended."""
        self._masks: dict[Future[Masks], _Running] = {}
        """The searches that wait for what a grammar lets follow, in the order in which they began to."""

    @property
    def is_done(self) -> bool:
        """Return whether every search has ended."""
        return not self._active

    @property
    def masks(self) -> list[Future[Masks]]:
        """Return the masks that searches wait for before their next step."""
        return list(self._masks)

    def start(self, requests: Sequence[ProcessedRequest], on_end: Callable[[int, int], None] | None = None) -> None:
        """Begin one search per prompt, at most `concurrency_limit` at once; the requests themselves are not run.

        `on_end` is called at the end of each with the numbers of tokens of its prompt and of its sequences.
        """
        self._on_end = on_end or _ignore
        self._searches = [self._begin(each) for each in requests]
        self._pending.extend(self._searches)
        self._fill()

    def take(self, output: RequestOutput) -> None:
        """Take in an output of the engine, ours or not; a search whose step is complete goes on or ends."""
        running = self._owners.pop(output.request_id, None)
        if running is None:
            return
        completion = output.outputs[0]
        if completion.finish_reason == "abort":
            running.is_aborted = True
        elif not completion.logprobs:
            reason = f"{completion.finish_reason!r}: {completion.stop_reason}"
            raise RuntimeError(f"a step of a beam search ended without a token, by {reason}")
        running.tops[output.request_id] = completion.logprobs[0] if completion.logprobs else {}
        if running.is_step_complete:
            running.advance()
            self._go_on(running)

    def resume(self, *, wait: bool) -> None:
        """Continue the searches with finished masks; with `wait`, wait for masks until no search needs any.

        Raises VLLMValidationError for a grammar that does not compile.
        """
        while future := next((each for each in self._masks if wait or each.done()), None):
            masks = future.result()
            running = self._masks.pop(future)
            self._submit(running, masks)
            if not _known(running.request_ids):  # the grammar lets nothing follow any beam
                running.advance()
                self._go_on(running)

    def end_lost(self) -> None:
        """End the searches whose requests the engine does not know any more: somebody has aborted them."""
        self._owners.clear()
        for running in [each for each in self._active if each not in self._masks.values()]:
            running.search.abort()
            self._go_on(running)

    def stop(self) -> None:
        """End all searches where they are; what they have so far counts as found."""
        for running in self._active:
            running.search.abort()
        self.abort()

    def abort(self) -> None:
        """End all searches where they are."""
        owners, active = list(self._owners), self._active
        for running in (*active, *self._pending):
            self._trace(running)
        self._pending.clear()
        self._masks.clear()
        self._owners, self._active = {}, []
        self._engine.abort_request(owners)
        for running in active:
            self._engine.release(_known(running.parent_ids + running.request_ids))

    def outputs(self) -> list[BeamSearchOutput]:
        """Return the sequences found, in the prompts' order; text only with a tokenizer."""
        return [
            BeamSearchOutput([self._sequence(running, beam, self._front.tokenizer) for beam in running.search.complete])
            for running in self._searches
        ]

    def _begin(self, request: ProcessedRequest) -> _Running:
        """Make a prompt's search; its requests carry masks of the grammar, not the grammar."""
        params, max_tokens = self._params, request.core.max_tokens
        search = BeamSearch(
            len(request.prompt_token_ids),
            params.beam_width,
            max_tokens,
            params.length_penalty,
            self._end_id,
            ignore_eos=params.ignore_eos,
        )
        constraint = request.params.structured_outputs
        grammars = None if constraint is None else self._front.grammars
        if constraint is None or grammars is None:
            allowed = params.allowed_token_ids
            return _Running(request, search, None, None if allowed is None else frozenset(allowed))
        grammar = BeamGrammar(grammars, constraint, self._front.ready.vocab_size, self._end_id)
        return _Running(request, search, grammar, None)

    def _fill(self) -> None:
        """Begin as many searches as may run at once."""
        while self._pending and (self._limit is None or len(self._active) < self._limit):
            running = self._pending.popleft()
            self._active.append(running)
            self._go_on(running)

    def _go_on(self, running: _Running) -> None:
        """Queue a search's next step, or wait for its masks; an ended search makes room for another."""
        if not running.search.live:
            self._engine.release(_known(running.request_ids))
            self._active.remove(running)
            self._trace(running)
            beams = running.search.complete
            self._on_end(len(running.request.prompt_token_ids), sum(len(beam.token_ids) for beam in beams))
            self._fill()
        elif running.grammar is None:
            self._submit(running, ())
        elif not running.num_steps:
            self._masks[running.grammar.begin()] = running
        else:
            grown = [(beam.parent, beam.token_ids[-1]) for beam in running.search.live]
            self._masks[running.grammar.advance(grown)] = running

    def _trace(self, running: _Running) -> None:
        """Trace a search that ends as one request: its steps have no spans."""
        if self._front.tracer is None:
            return
        beams = running.search.complete
        num_tokens = sum(len(beam.token_ids) for beam in beams)
        stats = RequestStateStats(num_tokens, arrival_time=running.request.core.arrival_time)
        reasons = [beam.finish_reason or "abort" for beam in beams] or ["abort"]
        self._front.tracer.on_end(running.request, stats, reasons, time.time())

    def _submit(self, running: _Running, masks: Masks) -> None:
        """Queue one request per live beam, each a fork of its parent's, and let go of the parents."""
        parents = running.parent_ids = running.request_ids
        running.request_ids, running.tops, running.masks = [], {}, masks
        for index, beam in enumerate(running.search.live):
            mask_w = masks[index] if masks else None
            if masks and mask_w is None:
                running.request_ids.append(None)
                continue
            request = self._request(running, index, beam, parents[beam.parent] if parents else None, mask_w)
            self._engine.enqueue(request)
            running.request_ids.append(request.request_id)
            self._owners[request.request_id] = running
        running.num_steps += 1
        self._engine.release(_known(parents))
        running.parent_ids = []

    def _request(
        self, running: _Running, index: int, beam: Beam, fork_of: str | None, mask_w: Mask | None
    ) -> ProcessedRequest:
        """Make a live beam's request for its next token, one of the mask's."""
        base = running.request.core
        params = copy.copy(base.sampling_params)
        params.structured_outputs = None
        params.allowed_token_ids = None if mask_w is None else bits.ids(mask_w)
        core = msgspec.structs.replace(
            base,
            # The engine has the user's requests too; the front end's own id makes these ids unique among them.
            request_id=f"{base.request_id}.{running.num_steps}.{index}.beam",
            prompt_token_ids=base.prompt_token_ids + beam.token_ids,
            sampling_params=params,
            max_tokens=1,
            seed=mix(base.seed, index),
            fork_of=fork_of,
            keeps_blocks=True,
            num_seats=1 if running.num_steps else self._params.beam_width,
        )
        return ProcessedRequest(core.request_id, None, core)

    def _sequence(self, running: _Running, beam: Beam, tokenizer: Tokenizer | None) -> BeamSearchSequence:
        request, base = running.request, running.request.core
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": request.prompt_token_ids}
        prompt |= {} if request.prompt is None else {"prompt": request.prompt}
        prompt |= {} if base.cache_salt is None else {"cache_salt": base.cache_salt}
        ends = beam.finish_reason == "stop" and beam.token_ids[-1] == self._end_id
        tokens = request.prompt_token_ids + beam.token_ids
        return BeamSearchSequence(
            orig_prompt=prompt,
            tokens=tokens,
            logprobs=[_with_strings(top, beam.token_ids[:i], tokenizer) for i, top in enumerate(beam.logprobs)],
            lora_request=base.lora,
            cum_logprob=beam.cum_logprob,
            text=None if tokenizer is None else self._text(tokens, ends, tokenizer),
            finish_reason=beam.finish_reason,
            stop_reason=self._end_id if ends else None,
        )

    def _text(self, tokens: list[int], ends: bool, tokenizer: Tokenizer) -> str:
        """Return a sequence's text, with the end of sequence if that is asked for, special or not."""
        skip = self._params.skip_special_tokens
        text = tokenizer.decode(tokens, skip_special_tokens=skip)
        keeps_end = ends and self._params.include_stop_str_in_output
        is_left_out = keeps_end and not tokenizer.decode(tokens[-1:], skip_special_tokens=skip)
        return text + tokenizer.token_string(tokens[-1]) if is_left_out else text


def _ignore(_num_in: int, _num_out: int) -> None:
    pass


def _known(request_ids: Collection[str | None]) -> list[str]:
    return [each for each in request_ids if each is not None]


def _with_strings(top: Mapping[int, Logprob], before: Sequence[int], tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Return one step's log-probabilities with the tokens' texts as they read after the tokens `before`."""
    if tokenizer is None:
        return dict(top)
    strings = tokenizer.token_strings(list(top), before)
    entries = zip(top.items(), strings, strict=True)
    return {token_id: Logprob(entry.logprob, entry.rank, string) for (token_id, entry), string in entries}


def _check_params(front: FrontEnd, params: Any) -> int:
    """Refuse what cannot be searched; return the number of likely tokens that each step asks for."""
    if not isinstance(params, BeamSearchParams):
        message = f"params must be BeamSearchParams, got {shown(params)} ({type(params).__name__})."
        raise VLLMValidationError(message, parameter="params", value=params)
    _check_mode(front)
    model_config = front.ready.vllm_config.model_config
    # Enough that the width is left if each beam's likeliest token is the end of sequence.
    wanted = min(2 * params.beam_width, front.ready.vocab_size)
    if params.allowed_token_ids is None and wanted > model_config.max_logprobs:
        message = (
            f"beam_width={params.beam_width} needs the {wanted} most likely tokens of each step, but "
            f"max_logprobs={model_config.max_logprobs}; start the engine with max_logprobs={wanted} or more."
        )
        raise VLLMValidationError(message, parameter="beam_width", value=params.beam_width)
    most = front.ready.vllm_config.scheduler_config.max_num_seqs
    if params.beam_width > max(most, model_config.max_logprobs // 2):
        message = (
            f"beam_width={params.beam_width} is more than the {most} sequences that run at once; start the engine with "
            f"max_num_seqs={params.beam_width} or more."
        )
        raise VLLMValidationError(message, parameter="beam_width", value=params.beam_width)
    return wanted


def _check_mode(front: FrontEnd) -> None:
    """Refuse engines that return logits, or log-probabilities without the effect of their logits processors."""
    mode = front.ready.vllm_config.model_config.logprobs_mode
    if mode.endswith("logits"):
        message = (
            f"beam search adds up log-probabilities, which this engine, started with logprobs_mode={mode!r}, lacks."
        )
        raise VLLMValidationError(message, parameter="logprobs_mode", value=mode)
    if front.ready.has_logits_processors and mode != "processed_logprobs":
        message = (
            "beam search sees what logits_processors do only in an engine started with "
            "logprobs_mode='processed_logprobs'."
        )
        raise VLLMValidationError(message, parameter="logits_processors", value=mode)


def _end_id(front: FrontEnd) -> int | None:
    """Return the tokenizer's end of sequence, or without a tokenizer the first of the generation config."""
    if front.tokenizer is not None:
        end_id = front.tokenizer.eos_token_id
    else:
        eos = front.ready.generation_config.get("eos_token_id")
        end_id = eos[0] if isinstance(eos, list) and eos else eos
    return end_id if isinstance(end_id, int) and end_id < front.ready.vocab_size else None
