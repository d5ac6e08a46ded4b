"""The parts of a transcript, and how they are read from a clip's tokens."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxllm.speech.tokens import SpeechTokens


class Word(NamedTuple):
    """A word with the marks around it."""

    word: str
    """Its text, mostly with the space before it."""
    start: float
    end: float
    """The times of its beginning and its end in seconds, from the beginning of what its segment's are from."""
    probability: float
    """The mean of its tokens' probabilities."""


class Span(NamedTuple):
    """A piece of a clip, by the timestamps around it."""

    start: float
    """Seconds from the clip's beginning."""
    end: float
    ids: list[int]
    """The tokens of its text, with the timestamps around it."""
    first: int
    """The place of the first one among the clip's tokens."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a transcript. The figures without a time are of all segments of its clip together."""

    start: float
    """Seconds from the sound's beginning."""
    end: float
    text: str
    """As the tokenizer has it, mostly with a space at its beginning."""
    token_ids: list[int]
    """The text's tokens, with the timestamps around it."""
    clip_start: float
    """The time at which its clip begins."""
    temperature: float
    avg_logprob: float
    """The mean log-probability of a token, the end among them."""
    compression_ratio: float
    """The length of the clip's text, by that of its compressed form."""
    no_speech_prob: float | None
    """The probability that nobody speaks in the clip; None if it is not known."""
    words: list[Word] | None = None


def read_spans(ids: Sequence[int], tokens: SpeechTokens, seconds: float) -> list[Span]:
    """Return the pieces of a clip of some seconds, from its tokens without the last one if that ends the text.

    A piece that lacks the timestamp before or after it begins where the one before it ends, and ends with the clip.
    Pieces without a text, and those that last no time within the clip, are left out: they are imagined.
    """
    spans: list[Span] = []
    start, last_end, taken, first, has_text = 0.0, 0.0, list[int](), 0, False

    def close(end: float) -> None:
        end = min(end, seconds)
        if start < end and tokens.text(taken).strip():
            spans.append(Span(start, end, taken, first))

    for index, token_id in enumerate(ids):
        time = tokens.seconds(token_id)
        if time is None:
            if not has_text and not taken:
                start, first = last_end, index
            taken.append(token_id)
            has_text = has_text or token_id < tokens.end
        elif has_text:
            taken.append(token_id)
            close(time)
            last_end, taken, has_text = time, [], False
        else:
            start, taken, first = time, [token_id], index
    if has_text:
        close(seconds)
    return spans


def compression_ratio(text: str) -> float:
    """Return how many times shorter a text is when it is compressed: that is high for a text that repeats itself."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))
