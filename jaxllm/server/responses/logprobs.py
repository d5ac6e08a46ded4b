"""Read an answer token by token, so that each text of a message has the log-probabilities of its tokens."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import NamedTuple

from jaxllm.outputs import CompletionOutput
from jaxllm.parsers.pieces import Piece, Reasoning, Text
from jaxllm.server.openai.logprobs import ChatTokenLogprob, chat_logprobs
from jaxllm.server.openai.turns import AnswerReader

_NEAR = 64
"""A token's text is looked for this many characters ahead: special tokens may show none, broken ones another."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredText(Text):
    """Some of the answer's text, with its tokens."""

    logprobs: list[ChatTokenLogprob]


class _Token(NamedTuple):
    """A token of the answer."""

    text: str
    """The text in context; "" for the beginning of a character."""
    entry: ChatTokenLogprob


class ScoredReader:
    """Reads an answer whose outputs have log-probabilities, and passes its text to the parser token by token.

    A token belongs to the first text that shows some of it. The tokens of reasoning, calls and marks belong to none,
    nor does the one that ends the answer.
    """

    def __init__(self, reader: AnswerReader, num_top: int, *, as_token_ids: bool = False) -> None:
        """Read with `reader`. Each token has `num_top` likely ones, all known for -1; `as_token_ids` shows ids."""
        self._reader, self._num_top, self._as_ids = reader, num_top, as_token_ids
        self._text, self._start = "", 0
        """The text of the last outputs, and the number of its characters that the parser has."""
        self._coming = deque[_Token]()
        """The tokens whose text is not all there: it may be held back for a stop string."""
        self._pending: list[_Token] = []
        """The tokens that the parser has, but no piece."""

    def pieces(self, output: CompletionOutput) -> list[Piece]:
        """Return the pieces that the answer's next output completes. Texts are `ScoredText`."""
        self._add(output)
        is_ended, pieces = output.finish_reason is not None, list[Piece]()
        while self._coming and (is_ended or self._is_there(self._coming[0].text)):
            token = self._coming.popleft()
            self._pending.append(token)
            if read := self._take(token.text):
                pieces += self._scored(self._reader.parse(output.index, read))
        rest = "" if self._coming else self._text[self._start :]
        self._text, self._start = self._text[self._start + len(rest) :], 0
        if rest or is_ended:
            pieces += self._scored(self._reader.parse(output.index, rest, output.finish_reason))
        return [piece for piece in pieces if self._reader.shows_reasoning or not isinstance(piece, Reasoning)]

    def _add(self, output: CompletionOutput) -> None:
        self._text += output.text
        token_ids, positions = output.token_ids, output.logprobs or []
        scored = chat_logprobs(token_ids, positions, self._num_top, as_token_ids=self._as_ids).content
        for token_id, position, entry in zip(token_ids, positions, scored, strict=True):
            self._coming.append(_Token(position[token_id].decoded_token or "", entry))

    def _is_there(self, text: str) -> bool:
        """Return whether a token's text is all there, or will not come."""
        return len(self._text) - self._start >= len(text) or not text.startswith(self._text[self._start :])

    def _take(self, text: str) -> str:
        """Return the unread characters up to the end of a token's text, none if it is not among them."""
        start, end = self._start, self._start
        at = self._text.find(text, start, start + len(text) + _NEAR)
        if at >= 0:
            end = at + len(text)
        elif len(self._text) - start < len(text) and text.startswith(self._text[start:]):  # a stop string has cut it
            end = len(self._text)
        self._start = end
        return self._text[start:end]

    def _scored(self, pieces: list[Piece]) -> list[Piece]:
        """Return pieces with the tokens of their texts."""
        made: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Text):
                made.append(ScoredText(piece.text, self._tokens_of(piece.text)))
            else:
                made.append(piece)
        if pieces and not isinstance(pieces[-1], Text):
            self._pending.clear()
        return made

    def _tokens_of(self, text: str) -> list[ChatTokenLogprob]:
        """Return the pending tokens of a text, and drop those before it, which are of marks.

        The parser may still hold those after it: they begin what it takes for a mark.
        """
        joined = "".join(token.text for token in self._pending)
        start = 0 if joined.startswith(text) else joined.rfind(text)
        start, end = (start, start + len(text)) if start >= 0 else (len(joined) - len(text), len(joined))
        tokens: list[_Token] = []
        begun, at = list[_Token](), 0
        rest: list[_Token] = []
        for token in self._pending:
            first, at = at, at + len(token.text)
            if not token.text:
                begun.append(token)
                continue
            kept = rest if first >= end else tokens if at > start else None
            if kept is not None:
                kept += [*begun, token]
            begun = []
        self._pending = [*rest, *begun]
        return [token.entry for token in tokens]
