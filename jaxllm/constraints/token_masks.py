"""Combine all rules of each request into one row of packed bits on the host: the tokens that may be sampled next.

The rules are ANDed. min_tokens yields if it would leave no token, and a complete grammar ends the request despite all
other rules.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import numpy as np

from jaxllm.constraints import bits
from jaxllm.constraints.bad_words import BadWords
from jaxllm.constraints.bits import RowMask
from jaxllm.constraints.compiler import GrammarCompiler
from jaxllm.constraints.grammar_mask import DeadEndError, GrammarMask, GrammarState
from jaxllm.constraints.thinking import ThinkingState, ThinkingTokens
from jaxllm.core_messages import EngineCoreRequest, RequestError
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.structured_outputs import StructuredOutputsParams

_NO_TOKENIZER = RequestError(
    "invalid", "structured_outputs need a tokenizer, which this engine does not have", "structured_outputs"
)


class TokenMasks:
    """The rules of every request that has some. For use by one thread; no method raises because of a request."""

    def __init__(self, vocab_size: int, grammars: GrammarCompiler | None, thinking: ThinkingTokens | None) -> None:
        """Without `grammars`, structured outputs end with an error; without `thinking`, budgets have no effect."""
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._thinking = thinking
        self._rules: dict[str, _Rules] = {}
        self._compiling: dict[str, GrammarMask] = {}
        self._dead_ends: dict[str, RequestError] = {}
        self._completed: dict[str, None] = {}

    def check(self, constraint: StructuredOutputsParams, seconds: float | None = None) -> None:
        """Raise VLLMValidationError if a grammar does not compile; one that takes longer than `seconds` passes."""
        if self._grammars is None:
            raise VLLMValidationError(f"{_NO_TOKENIZER.message}.", parameter=_NO_TOKENIZER.parameter)
        self._grammars.check(constraint, seconds)

    def add(self, request: EngineCoreRequest) -> None:
        """Add a request and start compiling its grammar."""
        request_id, params = request.request_id, request.sampling_params
        self.remove([request_id])
        grammar = None
        if params.structured_outputs is not None:
            if self._grammars is None:
                self._dead_ends[request_id] = _NO_TOKENIZER
                return
            grammar = GrammarMask(self._grammars, params.structured_outputs, self._vocab_size)
            self._compiling[request_id] = grammar
        thinking, budget = None, params.thinking_token_budget
        if budget is not None and self._thinking is not None:
            thinking = ThinkingState(self._thinking, request.prompt_token_ids, budget)
        if (
            grammar
            or thinking
            or params.min_tokens
            or params.bad_words_token_ids
            or params.allowed_token_ids is not None
        ):
            try:
                self._rules[request_id] = _Rules(request, self._vocab_size, grammar, thinking)
            except DeadEndError as end:
                self._dead_ends[request_id] = _invalid(end)

    def is_ready(self, request_id: str) -> bool:
        """Return whether rows can be requested: False while the grammar compiles, and at a dead end."""
        grammar = self._compiling.get(request_id)
        if grammar is not None and grammar.is_ready:
            del self._compiling[request_id]
            try:
                grammar.check_compiled()
            except DeadEndError as end:
                self._dead_ends[request_id] = _invalid(end)
            else:
                grammar.prepare()
        return request_id not in self._compiling and request_id not in self._dead_ends

    def wait(self, timeout: float) -> None:
        """Wait until a grammar or a late mask is done, or for `timeout` seconds; not at all if none is due."""
        awaited: list[Future[Any]] = [grammar.compiled for grammar in self._compiling.values()]
        awaited += self._late_masks().values()
        wait(awaited, timeout, FIRST_COMPLETED)

    def late(self) -> set[str]:
        """Return the requests whose next mask is not made yet."""
        return {request_id for request_id, mask in self._late_masks().items() if not mask.done()}

    def _late_masks(self) -> dict[str, Future[GrammarState]]:
        """Return the masks in progress.

        Masks whose grammar still compiles are not started: they would block the matchers' thread, which all requests
        share.
        """
        return {
            request_id: mask
            for request_id, rules in self._rules.items()
            if request_id not in self._compiling and (mask := rules.late_mask) is not None
        }

    @property
    def is_empty(self) -> bool:
        """Return whether no request has rules."""
        return not (self._rules or self._compiling or self._dead_ends or self._completed)

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Append committed output tokens; the next mask starts in the background."""
        rules = self._rules.get(request_id)
        if rules is not None:
            rules.accept(token_ids)

    def row(self, request_id: str, num_output_tokens: int) -> RowMask | None:
        """Return the allowed tokens after num_output_tokens outputs, including those in flight; None for all.

        Waits for the background work. A request at its end appears in `dead_ends` or `completed` from now on, and its
        sample of this step must be dropped.
        """
        rules = self._rules.get(request_id)
        if rules is None or request_id in self._dead_ends or request_id in self._completed:
            return None
        try:
            if not rules.are_at_end():
                return rules.row(num_output_tokens)
            self._completed[request_id] = None
        except DeadEndError as end:
            self._dead_ends[request_id] = _invalid(end)
        return None

    def cut_drafts(self, request_id: str, num_output_tokens: int, drafts: array[int]) -> array[int]:
        """Return the leading drafts of a request that its rules allow and after which the output continues.

        There are num_output_tokens outputs before them. Waits for the background work.
        """
        rules = self._rules.get(request_id)
        if rules is None or request_id in self._dead_ends or request_id in self._completed:
            return drafts
        return drafts[: len(rules.rows_after(num_output_tokens, drafts))]

    def rows(self, request_id: str, num_output_tokens: int, drafts: array[int]) -> list[RowMask | None]:
        """Return the allowed tokens before each draft that `cut_drafts` has left, and after the last."""
        first, rules = self.row(request_id, num_output_tokens), self._rules.get(request_id)
        if rules is None or request_id in self._dead_ends or request_id in self._completed:
            return [None] * (len(drafts) + 1)
        return [first, *rules.rows_after(num_output_tokens, drafts)]

    def dead_ends(self) -> dict[str, RequestError]:
        """Return {request id: why no token may follow}, kept until the requests are removed. Does not wait."""
        for request_id in list(self._compiling):
            self.is_ready(request_id)
        return dict(self._dead_ends)

    def completed(self) -> list[str]:
        """List the requests whose grammar is complete and that EOS cannot end, as it is ignored, banned or unknown.

        They stay listed until they are removed. Does not wait.
        """
        return list(self._completed)

    def remove(self, request_ids: Iterable[str]) -> None:
        """Remove requests; unknown ids are ignored."""
        for request_id in request_ids:
            for table in (self._rules, self._compiling, self._dead_ends, self._completed):
                table.pop(request_id, None)


class _Rules:
    """One request's rules: static ones as rows made once, and those that change with the output."""

    def __init__(
        self, request: EngineCoreRequest, vocab_size: int, grammar: GrammarMask | None, thinking: ThinkingState | None
    ) -> None:
        params = request.sampling_params
        self._vocab_size = vocab_size
        self._params = params
        self._eos_token_id = request.eos_token_id
        self._ending_ids = _ending_ids(request, vocab_size)
        self._bad_words = BadWords(params.bad_words_token_ids or ())
        self._recent: list[int] = []
        """The last output tokens, as many as the bad words need."""
        self._grammar = grammar
        self._thinking = thinking
        self._grammar_rests = grammar is not None and thinking is not None and thinking.is_open
        """With a thinking budget, the grammar applies only after a thinking section that the prompt has opened."""
        self._static_w = self._static_row()
        self._early_w = self._hold_back(self._static_w) if params.min_tokens else self._static_w
        """The static row while there are fewer than min_tokens outputs."""
        self._end_w = None if grammar is None else self._end_row()
        """The tokens allowed after a complete grammar."""
        self._drafted: tuple[array[int], list[RowMask | None]] = array("i"), []
        """The latest drafts, and the tokens allowed after each."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """Append committed output tokens."""
        self._drafted = array("i"), []
        if self._bad_words.num_recent:
            self._recent += token_ids
            del self._recent[: -self._bad_words.num_recent]
        first = self._accept_thinking(token_ids)
        if self._grammar is not None and first < len(token_ids):
            self._grammar.accept(token_ids[first:])

    def are_at_end(self) -> bool:
        """Return whether the grammar is complete and EOS would not end the request. Waits; raises DeadEndError."""
        state = self._state()
        if state is None or not state.is_complete:
            return False
        return self._end_w is None

    def row(self, num_output_tokens: int) -> RowMask | None:
        """Return `TokenMasks.row` for a request that is not at its end. Raises DeadEndError."""
        state = self._state()
        if state is not None and state.is_complete:
            return None if self._end_w is None else RowMask(self._end_w, self._end_w)
        grammar_w = None if state is None else state.bits_w
        allowed_w = self._allowed(grammar_w, num_output_tokens)
        return None if allowed_w is None else RowMask(allowed_w, grammar_w)

    def rows_after(self, num_output_tokens: int, drafts: array[int]) -> list[RowMask | None]:
        """Return the allowed tokens after each draft, up to the first draft that is forbidden or ends the output.

        Waits for the background work.
        """
        looked_at, rows = self._drafted
        if looked_at[: len(drafts)] != drafts or len(rows) < len(drafts):
            rows = list(self._rows_after(num_output_tokens, drafts))
            self._drafted = drafts, rows
        return rows[: len(drafts)]

    def _rows_after(self, num_output_tokens: int, drafts: array[int]) -> Iterator[RowMask | None]:
        with contextlib.suppress(DeadEndError):  # reported when the output itself gets to the dead end
            if self.are_at_end():
                return
            rules, row = self._fork(), self.row(num_output_tokens)
            for num_tokens, draft in enumerate(drafts, num_output_tokens + 1):
                if row is not None and not bits.has(row.allowed_w, draft):
                    return
                rules.accept([draft])
                if rules.are_at_end():
                    return
                row = rules.row(num_tokens)
                yield row

    def _fork(self) -> _Rules:
        """Return a copy of the rules, for other tokens to follow."""
        fork = copy.copy(self)
        fork._recent = self._recent[:]
        fork._thinking = copy.copy(self._thinking)
        fork._grammar = None if self._grammar is None else self._grammar.fork()
        return fork

    def _allowed(self, grammar_w: np.ndarray | None, num_output_tokens: int) -> np.ndarray | None:
        """Return the tokens that all rules and the grammar allow. Raises DeadEndError if there are none."""
        is_early = num_output_tokens < self._params.min_tokens
        parts = [] if grammar_w is None else [grammar_w]
        parts += self._moving_parts()
        if not parts:
            return self._early_w if is_early else self._static_w
        if self._static_w is not None:
            parts.append(self._static_w)
        bits_w = functools.reduce(np.bitwise_and, parts)
        if bits.is_empty(bits_w):
            raise self._conflict("structured_outputs", "thinking_token_budget", "allowed_token_ids", "bad_words")
        return self._hold_back(bits_w) if is_early else bits_w

    def _accept_thinking(self, token_ids: Sequence[int]) -> int:
        """Follow the thinking sections; return the number of tokens that come before the grammar."""
        num_before = 0
        if self._thinking is not None:
            for token_id in token_ids:
                self._thinking.accept(token_id)
                if self._grammar_rests:
                    num_before += 1
                    self._grammar_rests = self._thinking.is_open
        return num_before

    @property
    def late_mask(self) -> Future[GrammarState] | None:
        """The mask that `row` would wait for, if any."""
        if self._grammar is None or self._grammar_rests:
            return None
        mask = self._grammar.prepare()
        return None if mask.done() else mask

    def _state(self) -> GrammarState | None:
        """Return the output's state in its grammar; None if no grammar applies now. Waits; raises DeadEndError."""
        return None if self._grammar is None or self._grammar_rests else self._grammar.state()

    def _moving_parts(self) -> list[np.ndarray]:
        parts = []
        forced = None if self._thinking is None else self._thinking.forced_token_id
        if forced is not None:
            parts.append(bits.only([forced], self._vocab_size))
        banned = self._bad_words.banned(self._recent)
        if banned:
            parts.append(bits.without(bits.all_ids(self._vocab_size), banned, self._vocab_size))
        return parts

    def _end_row(self) -> np.ndarray | None:
        """Allow only EOS; None if it would not end the request, or is banned."""
        # Other stop ids are not offered: they can be ordinary text, with which the output would then end.
        eos = self._eos_token_id
        if eos is None or eos >= self._vocab_size or (self._static_w is not None and not bits.has(self._static_w, eos)):
            return None
        return bits.only([eos], self._vocab_size)

    def _static_row(self) -> np.ndarray | None:
        """Return the tokens that allowed_token_ids and one-token bad words allow; None for all. Raises DeadEndError."""
        allowed, always = self._params.allowed_token_ids, self._bad_words.always
        if allowed is None and not always:
            return None
        bits_w = bits.all_ids(self._vocab_size) if allowed is None else bits.only(allowed, self._vocab_size)
        bits_w = bits.without(bits_w, always, self._vocab_size)
        if bits.is_empty(bits_w):
            raise self._conflict("allowed_token_ids", "bad_words")
        bits_w.flags.writeable = False
        return bits_w

    def _hold_back(self, bits_w: np.ndarray | None) -> np.ndarray | None:
        """Clear the ids that end the output, unless no id would be left."""
        if not self._ending_ids:
            return bits_w
        all_w = bits.all_ids(self._vocab_size) if bits_w is None else bits_w
        left_w = bits.without(all_w, self._ending_ids, self._vocab_size)
        return bits_w if bits.is_empty(left_w) else left_w

    def _conflict(self, *names: str) -> DeadEndError:
        rules = [name for name in names if getattr(self._params, name) not in (None, [])]
        return DeadEndError(f"{' and '.join(rules)} leave no token that may follow; loosen one of them", rules[0])


def _invalid(end: DeadEndError) -> RequestError:
    return RequestError("invalid", str(end), end.parameter)


def _ending_ids(request: EngineCoreRequest, vocab_size: int) -> tuple[int, ...]:
    """List the ids that min_tokens forbids: EOS, even if it is ignored, and all stop ids."""
    params = request.sampling_params
    ids = {*params.all_stop_token_ids, *(params.stop_token_ids or ())}
    if request.eos_token_id is not None:
        ids.add(request.eos_token_id)
    return tuple(sorted(each for each in ids if each < vocab_size))
