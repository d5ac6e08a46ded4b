"""Find the words of a transcript and the times at which they are spoken.

Each token gets a time by dynamic time warping: the way through all tokens and frames, forwards in both, on which tokens
attend to their frames the most. Tokens are then joined to words.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.core_messages import Alignment
from jaxllm.speech.segments import Word

FRAME_SECONDS = 0.02
"""The time of one frame of a clip."""
_SPACELESS = frozenset(
    {"chinese", "japanese", "thai", "lao", "myanmar", "cantonese", "zh", "ja", "th", "lo", "my", "yue"}
)
"""The languages, and their codes, that do not put spaces between words: each character is a word."""
_BEFORE = "\"'“¡¿([{-"
"""Marks that belong to the word after them."""
_AFTER = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001 - those of Chinese are meant
"""Marks that belong to the word before them."""
_CUT = "\ufffd"
"""The character that stands for bytes of an incomplete one."""


class TimedToken(NamedTuple):
    """A token of a transcript, with its times in seconds."""

    token_id: int
    start: float
    end: float
    probability: float


def time_tokens(token_ids: Sequence[int], alignment: Alignment) -> list[TimedToken]:
    """Return the tokens that were aligned with their times.

    A token lasts from the time at which the one before it was heard, or from 0, until it is heard itself.
    """
    heard_tf = np.frombuffer(alignment.heard, np.float32).reshape(len(token_ids), -1)
    ends = (warp(-heard_tf) * FRAME_SECONDS).round(2).tolist()
    probabilities = np.exp(np.minimum(alignment.logprobs, 0)).tolist()
    return list(map(TimedToken, token_ids, [0.0, *ends], ends, probabilities))


def warp(costs_tf: np.ndarray) -> np.ndarray:
    """Return the first frame of each token [t] on the cheapest way from the first token and frame to the last ones.

    A step goes to the next token, the next frame, or both. Costs that differ by rounding alone may swap two ways; where
    two steps cost the same, the way comes from the frame before.
    """
    num_tokens, num_frames = costs_tf.shape
    num_steps = num_tokens + num_frames - 1
    # A row for each diagonal: the costs of tokens i at frames step - i, infinite where there is no such frame.
    flat = np.full((num_tokens, num_steps + 1), np.inf, np.float32)
    flat[:, :num_frames] = costs_tf
    costs_st = np.ascontiguousarray(flat.reshape(-1)[: num_tokens * num_steps].reshape(num_tokens, num_steps).T)
    both_st, next_token_st = np.zeros((2, num_steps, num_tokens), bool)
    # The sums on the last two diagonals, after a token before the first.
    before = np.full(num_tokens + 1, np.inf, np.float32)
    last = before.copy()
    before[0] = 0
    for step in range(num_steps):
        both, next_token, next_frame = before[:-1], last[:-1], last[1:]
        both_st[step] = takes_both = (both < next_token) & (both < next_frame)
        next_token_st[step] = takes_token = (next_token < both) & (next_token < next_frame)
        sums = np.where(takes_both, both, np.where(takes_token, next_token, next_frame)) + costs_st[step]
        before = last
        last = np.concatenate(([np.float32(np.inf)], sums))
    return _walk_back(both_st, next_token_st)


def _walk_back(both_st: np.ndarray, next_token_st: np.ndarray) -> np.ndarray:
    """Return the first frame of each token on the way that ends at the last token and frame."""
    step, token = both_st.shape[0] - 1, both_st.shape[1] - 1
    firsts = np.zeros(token + 1, np.int64)
    while step >= 0:
        firsts[token] = step - token
        is_both, is_token = both_st[step, token], next_token_st[step, token]
        token -= int(is_both or is_token)
        step -= 2 if is_both else 1
    return firsts


def find_words(tokens: Sequence[TimedToken], decode: Callable[[list[int]], str], language: str | None) -> list[Word]:
    """Return the words of tokens of text, without special ones and timestamps.

    `decode` returns the text of some token ids, with U+FFFD for incomplete characters. `language` is a name or a code.
    """
    pieces = _split_characters([token.token_id for token in tokens], decode)
    if language not in _SPACELESS:
        pieces = _join_at_spaces(pieces)
    pieces = _join_marks(pieces)
    words, first = [], 0
    for text, length in pieces:
        of_word = tokens[first : first + length]
        probability = sum(token.probability for token in of_word) / length
        words.append(Word(text, of_word[0].start, of_word[-1].end, probability))
        first += length
    return words


class _Piece(NamedTuple):
    """The text of consecutive tokens."""

    text: str
    num_tokens: int


def _split_characters(token_ids: list[int], decode: Callable[[list[int]], str]) -> list[_Piece]:
    """Return the shortest runs of tokens with whole characters.

    Where the whole text has U+FFFD itself, it counts as one. Tokens at the end that make no character are dropped.
    """
    whole, pieces, start, length = decode(token_ids), [], 0, 0
    for end in range(1, len(token_ids) + 1):
        text = decode(token_ids[start:end])
        cut = text.find(_CUT)
        if cut < 0 or whole[length + cut : length + cut + 1] in ("", _CUT):
            pieces.append(_Piece(text, end - start))
            start, length = end, length + len(text)
    return pieces


def _join_at_spaces(pieces: list[_Piece]) -> list[_Piece]:
    """Return words: each begins with a space or is a mark, and takes the pieces after it."""
    words: list[_Piece] = []
    for piece in pieces:
        if words and not piece.text.startswith(" ") and piece.text.strip() not in string.punctuation:
            piece = _Piece(words[-1].text + piece.text, words.pop().num_tokens + piece.num_tokens)
        words.append(piece)
    return words


def _join_marks(pieces: list[_Piece]) -> list[_Piece]:
    """Return words with the marks that belong to them."""
    forwards: list[_Piece] = []
    for piece in reversed(pieces):
        is_mark = piece.text.startswith(" ") and piece.text.strip() in _BEFORE
        if forwards and is_mark:
            after = forwards.pop()
            piece = _Piece(piece.text + after.text, piece.num_tokens + after.num_tokens)
        forwards.append(piece)
    words: list[_Piece] = []
    for piece in reversed(forwards):
        if words and not words[-1].text.endswith(" ") and piece.text in _AFTER:
            before = words.pop()
            piece = _Piece(before.text + piece.text, before.num_tokens + piece.num_tokens)
        words.append(piece)
    return words
