"""Find the tokens that may follow each beam of a search by its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.constraints import bits
from jaxllm.constraints.matcher import Grammar, Matcher

if TYPE_CHECKING:
    from jaxllm.constraints.compiler import GrammarCompiler
    from jaxllm.params.structured_outputs import StructuredOutputsParams


type Mask = np.ndarray
"""One bit per token, packed into int32 words."""
type Masks = Sequence[Mask | None]
"""The tokens that may follow each beam: a mask, or None where none may."""


class BeamGrammar:
    """Follows the live beams of one search through their grammar."""

    def __init__(
        self, grammars: GrammarCompiler, params: StructuredOutputsParams, vocab_size: int, end_id: int | None
    ) -> None:
        """Compile what `params` ask for. Of the tokens that the model ends at, `end_id` alone may end a sequence."""
        self._grammars = grammars
        self._compiled = grammars.start(params)
        self._vocab_size = vocab_size
        self._end_id = end_id
        self._other_ends = [each for each in grammars.eos_token_ids if each != end_id and each < vocab_size]
        self._matchers: list[Matcher] = []
        """The matcher of each live beam."""

    def begin(self) -> Future[Masks]:
        """Return what may come first, for the one beam that a search begins with.

        The future fails with VLLMValidationError if the grammar does not compile.
        """
        first: Future[Masks] = Future()
        first.set_running_or_notify_cancel()  # a compilation that has begun cannot be cancelled
        self._compiled.add_done_callback(partial(self._when_compiled, first))
        return first

    def advance(self, grown: Sequence[tuple[int, int]]) -> Future[Masks]:
        """Return what may follow each new live beam, given the index of the one it grew from and its last token."""
        return self._grammars.submit(partial(self._advance, grown))

    def _when_compiled(self, first: Future[Masks], compiled: Future[Grammar]) -> None:
        error = compiled.exception()
        if error is None:
            try:
                begun = self._grammars.submit(partial(self._begin, compiled.result()))
            except RuntimeError as no_thread:
                error = no_thread
            else:
                begun.add_done_callback(partial(_pass_on, first))
        if error is not None:
            first.set_exception(error)

    def _begin(self, grammar: Grammar) -> Masks:
        self._matchers = [grammar.matcher()]
        return [self._mask(self._matchers[0])]

    def _advance(self, grown: Sequence[tuple[int, int]]) -> Masks:
        before = self._matchers
        self._matchers = [before[parent].fork() for parent, _ in grown]
        return [
            self._mask(matcher) if token_id != self._end_id and matcher.accept(token_id) else None
            for matcher, (_, token_id) in zip(self._matchers, grown, strict=True)
        ]

    def _mask(self, matcher: Matcher) -> Mask | None:
        if matcher.is_complete:
            return None if self._end_id is None else bits.only([self._end_id], self._vocab_size)
        bits_w = np.empty(bits.num_words(self._vocab_size), np.int32)
        matcher.fill(bits_w)
        bits_w = bits.without(bits_w, self._other_ends, self._vocab_size)
        return None if bits.is_empty(bits_w) else bits_w


def _pass_on(target: Future[Masks], source: Future[Masks]) -> None:
    """Give one future the result or the error of the other."""
    error = source.exception()
    if error is not None:
        target.set_exception(error)
    else:
        target.set_result(source.result())
