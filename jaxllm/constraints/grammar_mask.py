"""One request's place in its grammar. The matcher works on the grammar compiler's thread while the device runs; the
engine's thread only asks for the outcome.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import numpy as np

from jaxllm.constraints import bits
from jaxllm.constraints.compiler import GrammarCompiler
from jaxllm.constraints.matcher import Grammar, Matcher
from jaxllm.params.structured_outputs import StructuredOutputsParams


class DeadEndError(Exception):
    """No token may follow; the message says why, and `parameter` names the argument that is to blame, if one is."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class Place(NamedTuple):
    """The place of an output in its grammar."""

    matcher: Matcher
    """The matcher, for the compiler's thread alone."""
    bits_w: np.ndarray
    """The ids that the grammar lets follow, int32. Not to be written to."""
    is_complete: bool
    """True if nothing but the end may follow."""


class GrammarMask:
    """Follows one output through its grammar. Nothing here raises but `place`, and that a DeadEndError only."""

    def __init__(self, grammars: GrammarCompiler, params: StructuredOutputsParams, vocab_size: int) -> None:
        self._grammars = grammars
        self._num_words = bits.num_words(vocab_size)
        self.compiled = _attempt(partial(grammars.start, params))
        self._place: Future[Place] | None = None
        """The place that the accepted tokens have led to; None until the grammar is compiled and someone asks."""

    @property
    def is_ready(self) -> bool:
        """Say whether compiling is over, well or not."""
        return self.compiled.done()

    def prepare(self) -> Future[Place]:
        """Start to make the mask of the first token, if that has not been done."""
        if self._place is None:
            begin = partial(_begin, self.compiled, self._num_words)
            self._place = _attempt(lambda: self._grammars.submit(begin))
        return self._place

    def accept(self, token_ids: Sequence[int]) -> None:
        """Append output tokens and start to make the next mask."""
        job = partial(_advance, self.prepare(), tuple(token_ids), self._num_words)
        self._place = _attempt(lambda: self._grammars.submit(job))

    def fork(self) -> GrammarMask:
        """Return a mask at the same place, for other tokens to follow."""
        fork, before = copy.copy(self), self.prepare()
        fork._place = _attempt(lambda: self._grammars.submit(lambda: _fork(before)))
        return fork

    def place(self) -> Place:
        """Wait until all accepted tokens are worked in. Raises DeadEndError where the grammar has no way on."""
        place = self.prepare()
        error = place.exception()
        if error is None:
            return place.result()
        if isinstance(error, DeadEndError):
            raise error
        raise DeadEndError(f"structured_outputs failed: {_said(error)}") from error

    def check_compiled(self) -> None:
        """Wait until compiling is over. Raises DeadEndError if it failed."""
        error = self.compiled.exception()
        if error is not None:
            parameter = getattr(error, "parameter", None) or "structured_outputs"
            raise DeadEndError(f"structured_outputs did not compile: {_said(error)}", parameter) from error


def _begin(compiled: Future[Grammar], num_words: int) -> Place:
    return _look(compiled.result().matcher(), num_words)


def _fork(before: Future[Place]) -> Place:
    place = before.result()
    return place._replace(matcher=place.matcher.fork())


def _advance(before: Future[Place], token_ids: Sequence[int], num_words: int) -> Place:
    place = before.result()  # done: jobs run in order
    matcher = place.matcher
    for token_id in token_ids:
        if matcher.is_complete:
            break  # what follows a complete output is its end
        if not matcher.accept(token_id):
            raise DeadEndError(f"structured_outputs does not let token {token_id} follow: {matcher.error}")
    return _look(matcher, num_words)


def _look(matcher: Matcher, num_words: int) -> Place:
    """Make the mask of what may follow. Raises DeadEndError if nothing may though the output is not complete."""
    bits_w = np.zeros(num_words, np.int32)
    if not matcher.is_complete:
        matcher.fill(bits_w)
        if matcher.error is not None:
            raise DeadEndError(f"structured_outputs came to an end: {matcher.error}")
    is_complete = matcher.is_complete or (bits.is_empty(bits_w) and matcher.may_end)
    if not is_complete and bits.is_empty(bits_w):
        raise DeadEndError("structured_outputs came to an end: no token can follow, and the output is not complete")
    return Place(matcher, bits_w, is_complete)


def _attempt[T](start: Callable[[], Future[T]]) -> Future[T]:
    """Start some work; if it cannot be started, the future says so."""
    try:
        return start()
    except Exception as error:  # noqa: BLE001 - a compiler that was shut down must not end the engine's loop
        failed: Future[T] = Future()
        failed.set_exception(error)
        return failed


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
