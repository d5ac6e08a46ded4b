"""`LLM.beam_search` runs searches on an engine, with vLLM's results.

Each step of a search is one ordinary request per live beam, for one token and its most likely rivals. It forks the
request that its beam grew from, so that beams share the KV blocks of what they have in common.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from jaxllm.beam_search import BeamSearchOutput, BeamSearchSequence
from jaxllm.constraints import bits
from jaxllm.constraints.beam_grammar import BeamGrammar
from jaxllm.engine.beams import Beam, BeamSearch, Step
from jaxllm.engine.input_processor import ProcessedRequest, mix
from jaxllm.engine.interrupts import deferred_interrupts
from jaxllm.engine.progress import Progress
from jaxllm.exceptions import VLLMValidationError
from jaxllm.logprobs import Logprob
from jaxllm.outputs import RequestOutput
from jaxllm.params.checks import INT32_MAX, check_int, shown
from jaxllm.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from jaxllm.engine.llm_engine import LLMEngine
    from jaxllm.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Running:
    """A prompt's search, with the requests of its present step."""

    request: ProcessedRequest
    search: BeamSearch
    grammar: BeamGrammar | None
    num_steps: int = 0
    request_ids: list[str | None] = field(default_factory=list)
    """The request of each live beam; None for a beam that nothing can follow."""
    parent_ids: list[str | None] = field(default_factory=list)
    """The requests of the step before, while they are needed."""
    masks: Sequence[np.ndarray | None] = ()
    """What the grammar lets follow each live beam; empty without a grammar."""
    tops: dict[str, Mapping[int, Logprob]] = field(default_factory=dict)
    """What the requests have given so far."""
    is_aborted: bool = False

    @property
    def is_step_complete(self) -> bool:
        """Say whether all requests of the step have ended."""
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
        return Step(top, top if mask_w is None else [each for each in top if bits.has(mask_w, each)])


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
        num_candidates = _check_params(engine, params)
        self._limit = len(prompts) if concurrency_limit is None else concurrency_limit
        if concurrency_limit is not None:
            self._limit = check_int("concurrency_limit", concurrency_limit, 1, INT32_MAX)
        self._engine = engine
        self._params = params
        self._end_id = _end_id(engine)
        sampling = SamplingParams(
            temperature=params.temperature,
            max_tokens=params.max_tokens,
            logprobs=num_candidates,
            structured_outputs=params.structured_outputs,
            ignore_eos=True,
            detokenize=False,
        )
        requests = engine.process_requests(request_ids, prompts, [sampling] * len(prompts)) if prompts else []
        self._searches = [self._begin(each) for each in requests]
        self._pending = deque(self._searches)
        self._active: list[_Running] = []
        self._owners: dict[str, _Running] = {}
        """The searches, by the ids of their requests that have not ended."""

    def run(self, step: Callable[[], list[RequestOutput]], use_tqdm: bool | Callable[..., Any]) -> None:
        """Step until every search has ended. Ctrl-C and errors leave neither requests nor blocks behind."""
        try:
            with (
                deferred_interrupts() as raise_if_interrupted,
                contextlib.closing(Progress(use_tqdm, len(self._searches))) as progress,
            ):
                self._start(progress)
                while self._active:
                    if not self._engine.has_unfinished_requests():
                        self._end_aborted(progress)
                        continue
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
        constraint, grammars = request.params.structured_outputs, self._engine.front.grammars
        if constraint is None or grammars is None:
            return _Running(request, search, None)
        vocab_size = self._engine.front.ready.vocab_size
        return _Running(request, search, BeamGrammar(grammars, constraint, vocab_size, self._end_id))

    def _start(self, progress: Progress) -> None:
        """Begin as many searches as may run at once."""
        while self._pending and len(self._active) < self._limit:
            running = self._pending.popleft()
            self._active.append(running)
            self._go_on(running, progress)

    def _take(self, output: RequestOutput, progress: Progress) -> None:
        """Take in an output of the engine, ours or not; a search whose step is complete goes on or ends."""
        running = self._owners.pop(output.request_id, None)
        if running is None:
            return
        completion = output.outputs[0]
        if completion.finish_reason == "abort":
            running.is_aborted = True
        elif not completion.logprobs:
            raise RuntimeError(f"a step of a beam search ended without a token, by {completion.finish_reason!r}")
        running.tops[output.request_id] = completion.logprobs[0] if completion.logprobs else {}
        if running.is_step_complete:
            running.advance()
            self._go_on(running, progress)

    def _end_aborted(self, progress: Progress) -> None:
        """End the searches whose requests the engine does not know any more: somebody has aborted them."""
        self._owners.clear()
        for running in list(self._active):
            running.search.abort()
            self._go_on(running, progress)

    def _abort(self) -> None:
        self._engine.abort_request(list(self._owners))
        for running in self._active:
            self._engine.release(_known(running.parent_ids + running.request_ids))

    def _go_on(self, running: _Running, progress: Progress) -> None:
        """Queue a search's next step; one that has ended makes room for another."""
        self._submit(running)
        if running.search.live and not _known(running.request_ids):  # the grammar lets nothing follow any beam
            running.advance()
            self._submit(running)
        if not running.search.live:
            found = running.search.found
            progress.count(len(running.request.prompt_token_ids), sum(len(beam.token_ids) for beam in found))
            self._active.remove(running)
            self._start(progress)

    def _submit(self, running: _Running) -> None:
        """Queue one request per live beam, each a fork of its parent's, and let go of the parents."""
        parents = running.parent_ids = running.request_ids
        running.request_ids, running.tops = [], {}
        running.masks = self._masks(running)
        for index, beam in enumerate(running.search.live):
            mask_w = running.masks[index] if running.masks else None
            if running.masks and mask_w is None:
                running.request_ids.append(None)
                continue
            request = self._request(running, index, beam, parents[beam.parent] if parents else None, mask_w)
            self._engine.enqueue(request)
            running.request_ids.append(request.request_id)
            self._owners[request.request_id] = running
        running.num_steps += 1
        self._engine.release(_known(parents))
        running.parent_ids = []

    def _masks(self, running: _Running) -> Sequence[np.ndarray | None]:
        """Return what the grammar lets follow each live beam; nothing without a grammar."""
        if running.grammar is None or not running.search.live:
            return ()
        if not running.num_steps:
            return running.grammar.begin()
        return running.grammar.advance([(beam.parent, beam.token_ids[-1]) for beam in running.search.live])

    def _request(
        self, running: _Running, index: int, beam: Beam, fork_of: str | None, mask_w: np.ndarray | None
    ) -> ProcessedRequest:
        """Make a live beam's request for its next token, one of the mask's."""
        base = running.request.core
        params = copy.copy(base.sampling_params)
        params.structured_outputs = None
        params.allowed_token_ids = None if mask_w is None else bits.ids(mask_w)
        core = msgspec.structs.replace(
            base,
            request_id=f"{base.request_id}.{running.num_steps}.{index}",
            prompt_token_ids=base.prompt_token_ids + beam.token_ids,
            sampling_params=params,
            max_tokens=1,
            seed=mix(base.seed, index),
            fork_of=fork_of,
            keeps_blocks=True,
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
            cum_logprob=beam.cum_logprob,
            text=None if tokenizer is None else self._text(tokens, ends, tokenizer),
            finish_reason=beam.finish_reason,
            stop_reason=self._end_id if ends else None,
        )

    def _text(self, tokens: list[int], ends: bool, tokenizer: Tokenizer) -> str:
        """Return a sequence's text, with the end of sequence if that is asked for, special or not."""
        skip = self._params.skip_special_tokens
        text = tokenizer.backend.decode(tokens, skip_special_tokens=skip)
        keeps_end = ends and self._params.include_stop_str_in_output
        is_left_out = keeps_end and not tokenizer.backend.decode(tokens[-1:], skip_special_tokens=skip)
        return text + tokenizer.token_string(tokens[-1]) if is_left_out else text


def _known(request_ids: Collection[str | None]) -> list[str]:
    return [each for each in request_ids if each is not None]


def _with_strings(top: Mapping[int, Logprob], before: Sequence[int], tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Return one step's log-probabilities with the tokens' texts as they read after the tokens `before`."""
    if tokenizer is None:
        return dict(top)
    strings = tokenizer.token_strings(list(top), before)
    entries = zip(top.items(), strings, strict=True)
    return {token_id: Logprob(entry.logprob, entry.rank, string) for (token_id, entry), string in entries}


def _check_params(engine: LLMEngine, params: Any) -> int:
    """Refuse what cannot be searched; return how many of the most likely tokens each step asks for."""
    if not isinstance(params, BeamSearchParams):
        message = f"params must be BeamSearchParams, got {shown(params)} ({type(params).__name__})."
        raise VLLMValidationError(message, parameter="params", value=params)
    _check_mode(engine)
    # So many that the width is left if each beam's likeliest token is the end of sequence.
    wanted = min(2 * params.beam_width, engine.front.ready.vocab_size)
    if wanted > engine.model_config.max_logprobs:
        message = (
            f"beam_width={params.beam_width} needs the {wanted} most likely tokens of each step, but "
            f"max_logprobs={engine.model_config.max_logprobs}; start the engine with max_logprobs={wanted} or more."
        )
        raise VLLMValidationError(message, parameter="beam_width", value=params.beam_width)
    return wanted


def _check_mode(engine: LLMEngine) -> None:
    """Refuse engines whose logprobs are not what the model says of a sequence."""
    mode = engine.model_config.logprobs_mode
    if mode.endswith("logits"):
        message = (
            f"beam search adds up log-probabilities, which this engine, started with logprobs_mode={mode!r}, lacks."
        )
        raise VLLMValidationError(message, parameter="logprobs_mode", value=mode)
    if engine.front.ready.has_logits_processors and mode != "processed_logprobs":
        message = (
            "beam search sees what logits_processors do only in an engine started with "
            "logprobs_mode='processed_logprobs'."
        )
        raise VLLMValidationError(message, parameter="logits_processors", value=mode)


def _end_id(engine: LLMEngine) -> int | None:
    """Return the tokenizer's end of sequence, or without a tokenizer the first of the generation config."""
    if engine.front.tokenizer is not None:
        end_id = engine.front.tokenizer.eos_token_id
    else:
        given = engine.front.ready.generation_config.get("eos_token_id")
        end_id = given[0] if isinstance(given, list) and given else given
    return end_id if isinstance(end_id, int) and end_id < engine.front.ready.vocab_size else None
