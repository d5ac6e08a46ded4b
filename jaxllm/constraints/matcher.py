"""Match one output against a compiled grammar. All code here must run on `GrammarCompiler.submit`'s thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxllm.constraints.bits import all_ids, num_words
from jaxllm.params.limits import MAX_FORCED_BYTES

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_GRAMMAR_BYTES = 200_000
_FORCED_BYTES = 640
"""llguidance looks ahead over all forced bytes; each takes 190 to 610 bytes of memory."""


class Vocabulary:
    """The tokens that grammars use, and the width of the masks."""

    def __init__(self, tokenizer: LLTokenizer, num_tokens: int, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.num_words = num_words(vocab_size)
        self.num_filled_words = num_words(tokenizer.vocab_size)
        known_w = all_ids(min(num_tokens, vocab_size))
        self.known_w = np.pad(known_w, (0, self.num_words - known_w.size))


class Grammar:
    """A compiled grammar and an estimate of its memory: `num_text_bytes` is the part that its text decides."""

    def __init__(self, vocabulary: Vocabulary, start: LLMatcher, num_text_bytes: int) -> None:
        self._vocabulary = vocabulary
        self._start = start
        num_forced = len(start.compute_ff_bytes())
        self.forces_too_much = num_forced > MAX_FORCED_BYTES
        self.num_bytes = _GRAMMAR_BYTES + num_text_bytes + _FORCED_BYTES * num_forced

    def first_error(self) -> str | None:
        """Return why no output matches, or None. The first call makes the first mask for all matchers."""
        bits_w = np.empty(self._vocabulary.num_words, np.int32)
        first = Matcher(self._vocabulary, self._start)
        first.fill(bits_w)
        return first.error or (None if bits_w.any() else "no token can begin it")

    def matcher(self) -> Matcher:
        """Start an output; matchers of one grammar are independent."""
        return Matcher(self._vocabulary, self._start.deep_copy())


class Matcher:
    """Follows the tokens of one output, and tells which may come next."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher

    def fork(self) -> Matcher:
        """Return an independent matcher of the same tokens."""
        return Matcher(self._vocabulary, self._matcher.deep_copy())

    def accept(self, token_id: int) -> bool:
        """Append a token. Returns False if it may not follow; then no other token may either."""
        return self._matcher.consume_token(token_id)

    def fill(self, bits_w: np.ndarray) -> None:
        """Set the bit of every token that may follow and clear the others: int32 [ceil(v/32)], contiguous."""
        vocabulary = self._vocabulary
        fits = vocabulary.num_filled_words == vocabulary.num_words
        filled = bits_w if fits else np.empty(vocabulary.num_filled_words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(filled.ctypes.data, filled.nbytes)
        if self.error is not None:
            bits_w[:] = 0  # llguidance calls for the end in this case, which would make broken output look complete
            return
        if not fits:
            common = min(filled.size, bits_w.size)
            bits_w[:common] = filled[:common]
            bits_w[common:] = 0
        bits_w &= vocabulary.known_w  # a grammar can name any id below the logits' width

    @property
    def may_end(self) -> bool:
        """Return whether the output so far matches the grammar."""
        return self._matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Return whether the output matches the grammar and only its end may follow."""
        return self._matcher.is_stopped() and self._matcher.is_accepting()

    @property
    def error(self) -> str | None:
        """Return why no token can follow an incomplete output, or None. Valid after `accept` or `fill`."""
        if self._matcher.is_error():
            return brief_error(self._matcher.get_error())
        if self._matcher.is_stopped() and not self._matcher.is_accepting():
            return "no text that the grammar allows can follow"
        return None


def brief_error(message: str) -> str:
    """Return llguidance's error message without the dump of its state or its stack."""
    for mark in ("<state>", "<backtrace>", "; no error message"):
        message = message.partition(mark)[0]
    text = " ".join(message.replace("<non-verbose/>", "").split())
    if text.startswith("panic"):
        text = f"make it smaller or simpler: llguidance cannot take it ({text})"
    return text if len(text) <= 400 else f"{text[:400]}..."
