"""Parse an output into reasoning, calls and text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxllm.parsers.incoming import Incoming, Reading
from jaxllm.parsers.marks import held_back
from jaxllm.parsers.pieces import CallStart, Piece, Reasoning, Text, merge
from jaxllm.parsers.reasoning import MarkedReasoning, ReasoningMarks
from jaxllm.parsers.tool_parser import ToolParser


class OutputParser:
    """Parses one output, as a `pieces.StreamParser`.

    Calls are read after the reasoning, and within it from the first mark that opens a call, since models may omit the
    end of their reasoning. A call ends the reasoning; text that is not a call remains reasoning.
    """

    def __init__(self, reasoning: ReasoningMarks | None, tools: ToolParser | None, prompt: str = "") -> None:
        """Read an output after `prompt`: None for `reasoning` or `tools` if there is none."""
        self._marks, self._tools = reasoning, tools
        self._has_begun = None if reasoning is None else reasoning.has_begun(prompt)
        self._splitter: MarkedReasoning | None = None
        if reasoning is not None:
            self._splitter = MarkedReasoning(reasoning, has_begun=self._has_begun)
        self._incoming = Incoming()
        self._pieces: list[Piece] = []
        self._in_call = False
        """Whether the tool parser has shown some of a call, and nothing after it."""
        self._reading = self._read()

    def feed(self, text: str) -> list[Piece]:
        """Add text and return the pieces that became certain."""
        self._incoming.add(text)
        return self._advance()

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the remaining pieces once the output has ended.

        An output that `is_cut` by its token limit may end within a mark, or within a call not yet recognized; neither
        becomes text.
        """
        if is_cut and self._tools is not None:
            pieces = self._tools.finish(is_cut=True)
            self._take(_without_marks(pieces, self._tools.marks, in_call=self._in_call))
            return self._advance()
        self._incoming.is_ended = True
        next(self._reading, None)
        if self._tools is not None:
            self._take(self._tools.finish())
        if self._splitter is not None:
            self._pieces += self._splitter.finish()
        return self._advance()

    def _advance(self) -> list[Piece]:
        next(self._reading, None)
        pieces, self._pieces = merge(self._pieces), []
        return pieces

    def _read(self) -> Reading[None]:
        """Pass text to the reasoning parser, and text that may contain calls to the tool parser."""
        incoming, marks, tools = self._incoming, self._marks, self._tools
        if marks is not None and tools is not None:
            has_begun = self._has_begun
            if has_begun is None and (start := (yield from incoming.take_any_spaced(marks.starts))):
                has_begun = True
                self._split(start)
            if has_begun:
                mark = yield from incoming.until((*marks.ends, *tools.marks[:1]), self._split)
                if mark in marks.ends:
                    self._split(mark)
                elif mark is not None:
                    self._take(tools.feed(mark))
        while (yield from incoming.has(1)):
            text = incoming.rest()
            self._take([Text(text)] if tools is None else tools.feed(text))

    def _take(self, pieces: list[Piece]) -> None:
        """Take the tool parser's pieces; their text may contain reasoning."""
        for piece in pieces:
            self._in_call = not isinstance(piece, Text | Reasoning)
            if isinstance(piece, Text):
                self._split(piece.text)
                continue
            if isinstance(piece, CallStart) and self._marks is not None and self._splitter is not None:
                marks = self._marks
                if self._splitter.is_open:  # a later end mark is not part of the text
                    marks = marks._replace(in_text=(*marks.in_text, *marks.ends))
                self._pieces += self._splitter.finish()
                self._splitter = MarkedReasoning(marks, has_begun=False)
            self._pieces.append(piece)

    def _split(self, text: str) -> None:
        self._pieces += [Text(text)] if self._splitter is None else self._splitter.feed(text)


def _without_marks(pieces: Sequence[Piece], marks: Sequence[str], *, in_call: bool) -> list[Piece]:
    """Return the last pieces of a cut output, without text from a mark or partial mark on.

    Text right after a call's pieces is dropped too: it may be the call's end, or another call.
    """
    kept, pieces = list[Piece](), merge(pieces)
    for i, piece in enumerate(pieces):
        if not isinstance(piece, Text | Reasoning):
            kept.append(piece)
            in_call = True
        elif not in_call:
            text, is_last = piece.text, i == len(pieces) - 1
            end = min((text.index(mark) for mark in marks if mark in text), default=len(text))
            end -= held_back(text[:end], marks) if is_last and end == len(text) else 0
            if end == len(text) or not text[:end].isspace():
                kept.append(dataclasses.replace(piece, text=text[:end]))
    return kept
