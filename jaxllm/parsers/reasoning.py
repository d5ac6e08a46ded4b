"""Reasoning parsers: models mark the part of an output in which they reason, most of them with a text at each end."""

from __future__ import annotations

from typing import NamedTuple

from jaxllm.parsers.marks import held_back
from jaxllm.parsers.pieces import Piece, Reasoning, Text


class ReasoningMarks(NamedTuple):
    """The texts around a model's reasoning."""

    start: str
    end: str


MARKS = {
    "qwen3": ReasoningMarks("<think>", "</think>"),
    "deepseek_r1": ReasoningMarks("<think>", "</think>"),
    "glm45": ReasoningMarks("<think>", "</think>"),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
}
"""The marks by the names of parsers."""
HARMONY = "openai_gptoss"
"""The parser of gpt-oss, whose reasoning and calls are channels: it is in tools/openai.py, and reads both."""
REASONING_PARSERS = (*MARKS, HARMONY)


class MarkedReasoning:
    """This splits an output that may begin with reasoning between two marks, as `pieces.StreamParser` says.

    White space around the reasoning is nobody's: neither the reasoning's nor the text's.
    """

    def __init__(self, marks: ReasoningMarks, prompt: str) -> None:
        """Read what follows `prompt`: its end says whether reasoning has begun there, or is over."""
        self._marks = marks
        self._pending = ""
        """Text that has come and is in no piece yet."""
        self._space: list[str] = []
        """White space before that, which is shown if what follows it belongs to the same."""
        tail = prompt.rstrip()
        self._read = self._before
        if tail.endswith(marks.start):
            self._read = self._opening
        elif tail.endswith(marks.end):
            self._read = self._after

    def feed(self, text: str) -> list[Piece]:
        """Add text and return the pieces that became certain."""
        self._pending += text
        return self._read()

    def finish(self) -> list[Piece]:
        """Return what is left once the output has ended."""
        is_reasoning = self._read in (self._opening, self._inside)
        rest, self._pending = self._pending, ""
        return self._shown(rest) if is_reasoning else [Text("".join(self._space) + rest)]

    def _before(self) -> list[Piece]:
        """Look for reasoning at the beginning; anywhere else its mark is text like any other."""
        start, seen = self._marks.start, self._pending.lstrip()
        self._space.append(self._pending[: len(self._pending) - len(seen)])
        self._pending = seen
        if len(seen) < len(start) and start.startswith(seen):
            return []
        if not seen.startswith(start):
            self._space, self._pending, self._read = [], "".join(self._space) + seen, self._after
            return self._after()
        self._space, self._pending, self._read = [], seen[len(start) :], self._opening
        return self._opening()

    def _opening(self) -> list[Piece]:
        """Leave out the white space that reasoning begins with."""
        self._pending = self._pending.lstrip()
        if not self._pending:
            return []
        self._read = self._inside
        return self._inside()

    def _inside(self) -> list[Piece]:
        """Give the reasoning out, but for what may be its end."""
        reasoning, mark, rest = self._pending.partition(self._marks.end)
        if mark:
            shown = self._shown(reasoning)
            self._space, self._pending, self._read = [], rest, self._closing
            return shown + self._closing()
        end = len(reasoning) - held_back(reasoning, (self._marks.end,))
        self._pending = reasoning[end:]
        return self._shown(reasoning[:end])

    def _shown(self, reasoning: str) -> list[Piece]:
        """Give reasoning out, but for the white space at its end."""
        kept = reasoning.rstrip()
        if not kept:
            self._space.append(reasoning)
            return []
        text, self._space = "".join(self._space) + kept, [reasoning[len(kept) :]]
        return [Reasoning(text)]

    def _closing(self) -> list[Piece]:
        """Leave out the white space between reasoning and text."""
        self._pending = self._pending.lstrip()
        if not self._pending:
            return []
        self._read = self._after
        return self._after()

    def _after(self) -> list[Piece]:
        text, self._pending = self._pending, ""
        return [Text(text)]
