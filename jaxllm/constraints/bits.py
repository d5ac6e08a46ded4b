"""Packed bits over the vocabulary: int32 words of 32 ids each, id i at bit i % 32 of word i // 32; 1 = may be sampled.

Bits at or beyond the vocabulary's size are 0. No function changes its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class RowMask(NamedTuple):
    """The allowed ids for one row of logits. The arrays are read-only."""

    allowed_w: np.ndarray
    """int32, the ids that all rules allow."""
    grammar_w: np.ndarray | None
    """int32, the ids that the grammar alone allows; raw log-probabilities are taken over them. None without a grammar.
    """


def num_words(vocab_size: int) -> int:
    """Count the words that vocab_size bits take."""
    return -(-vocab_size // 32)


def all_ids(vocab_size: int) -> np.ndarray:
    """Return int32 [w] with every id of the vocabulary set."""
    bits_w = np.full(num_words(vocab_size), 0xFFFFFFFF, np.uint32)
    if vocab_size % 32:
        bits_w[-1] = (1 << vocab_size % 32) - 1
    return bits_w.view(np.int32)


def only(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Return int32 [w] with only these ids set. Raises IndexError for an id outside the vocabulary."""
    words, masks = _places(token_ids, vocab_size)
    bits_w = np.zeros(num_words(vocab_size), np.uint32)
    np.bitwise_or.at(bits_w, words, masks)
    return bits_w.view(np.int32)


def without(bits_w: np.ndarray, token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """Return a copy of bits_w with these ids cleared. Raises IndexError for an id outside the vocabulary."""
    words, masks = _places(token_ids, vocab_size)
    cleared_w = bits_w.view(np.uint32).copy()
    np.bitwise_and.at(cleared_w, words, ~masks)
    return cleared_w.view(np.int32)


def has(bits_w: np.ndarray, token_id: int) -> bool:
    """Return whether an id is set."""
    return bool(int(bits_w[token_id // 32]) >> token_id % 32 & 1)


def ids(bits_w: np.ndarray) -> list[int]:
    """List the ids that are set."""
    return np.flatnonzero(np.unpackbits(bits_w.view(np.uint8), bitorder="little")).tolist()


def is_empty(bits_w: np.ndarray) -> bool:
    """Return whether no id is set."""
    return not bits_w.any()


def _places(token_ids: Iterable[int], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each id's word index and, as uint32, its bit in the word."""
    ids = np.asarray(token_ids if isinstance(token_ids, Sequence) else list(token_ids), np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise IndexError(f"token ids must lie in [0, {vocab_size}), got {ids.min()} to {ids.max()}")
    return ids >> 5, np.left_shift(np.uint32(1), (ids & 31).astype(np.uint32))
