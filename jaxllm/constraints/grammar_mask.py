"""Follow one request's output through its grammar. The matcher runs on the grammar compiler's thread while the device
computes; the engine's thread only asks for the result.
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
    """No token can follow. The message has the reason; `parameter` names the argument to blame."""

    def __init__(self, message: str, parameter: str = "structured_outputs") -> None:
        super().__init__(message)
        self.parameter = parameter


class GrammarState(NamedTuple):
    """The state of an output in its grammar."""

    matcher: Matcher
    """The matcher; only the compiler's thread may use it."""
    bits_w: np.ndarray
    """The ids that the grammar allows next, int32. Read-only."""
    is_complete: bool
    """True if only the end may follow."""


class GrammarMask:
    """Follows one output through its grammar. Only `state` and `check_compiled` raise, and only DeadEndError."""

    def __init__(self, grammars: GrammarCompiler, params: StructuredOutputsParams, vocab_size: int) -> None:
        self._grammars = grammars
        self._num_words = bits.num_words(vocab_size)
        self.compiled = _attempt(partial(grammars.start, params))
        self._state: Future[GrammarState] | None = None
        """The state after the accepted tokens; None until the grammar is compiled and the state is requested."""

    @property
    def is_ready(self) -> bool:
        """Return whether compiling is over, with success or not."""
        return self.compiled.done()

    def prepare(self) -> Future[GrammarState]:
        """Start to make the mask of the first token, unless that has been done."""
        if self._state is None:
            begin = partial(_begin, self.compiled, self._num_words)
            self._state = _attempt(lambda: self._grammars.submit(begin))
        return self._state

    def accept(self, token_ids: Sequence[int]) -> None:
        """Append output tokens and start to make the next mask."""
        job = partial(_advance, self.prepare(), tuple(token_ids), self._num_words)
        self._state = _attempt(lambda: self._grammars.submit(job))

    def fork(self) -> GrammarMask:
        """Return a mask with the same state, for other tokens to follow."""
        fork, before = copy.copy(self), self.prepare()
        fork._state = _attempt(lambda: self._grammars.submit(lambda: _fork(before)))
        return fork

    def state(self) -> GrammarState:
        """Wait until all accepted tokens are processed and return the state. Raises DeadEndError if no token can
        follow.
        """
        state = self.prepare()
        error = state.exception()
        if error is None:
            return state.result()
        if isinstance(error, DeadEndError):
            raise error
        raise DeadEndError(f"structured_outputs failed: {_said(error)}") from error

    def check_compiled(self) -> None:
        """Wait until compiling is over. Raises DeadEndError if it failed."""
        error = self.compiled.exception()
        if error is not None:
            parameter = getattr(error, "parameter", None) or "structured_outputs"
            raise DeadEndError(f"structured_outputs did not compile: {_said(error)}", parameter) from error


def _begin(compiled: Future[Grammar], num_words: int) -> GrammarState:
    return _look(compiled.result().matcher(), num_words)


def _fork(before: Future[GrammarState]) -> GrammarState:
    state = before.result()
    return state._replace(matcher=state.matcher.fork())


def _advance(before: Future[GrammarState], token_ids: Sequence[int], num_words: int) -> GrammarState:
    state = before.result()  # done: jobs run in order
    matcher = state.matcher
    for token_id in token_ids:
        if matcher.is_complete:
            break  # only the end follows a complete output
        if not matcher.accept(token_id):
            raise DeadEndError(f"structured_outputs does not let token {token_id} follow: {matcher.error}")
    return _look(matcher, num_words)


def _look(matcher: Matcher, num_words: int) -> GrammarState:
    """Make the mask of the next token. Raises DeadEndError if no token may follow an incomplete output."""
    bits_w = np.zeros(num_words, np.int32)
    if not matcher.is_complete:
        matcher.fill(bits_w)
        if matcher.error is not None:
            raise DeadEndError(f"structured_outputs came to an end: {matcher.error}")
    is_complete = matcher.is_complete or (bits.is_empty(bits_w) and matcher.may_end)
    if not is_complete and bits.is_empty(bits_w):
        raise DeadEndError("structured_outputs came to an end: no token can follow, and the output is not complete")
    return GrammarState(matcher, bits_w, is_complete)


def _attempt[T](start: Callable[[], Future[T]]) -> Future[T]:
    """Start some work; if it cannot start, return a failed future."""
    try:
        return start()
    except Exception as error:  # noqa: BLE001 - a compiler that was shut down must not end the engine's loop
        failed: Future[T] = Future()
        failed.set_exception(error)
        return failed


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
