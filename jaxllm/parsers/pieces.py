"""The pieces of a parsed output, in the model's order."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """Some of the answer's text."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Reasoning:
    """Some of the text that the model reasons in before it answers."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of a tool call. All of its arguments come before the next call."""

    index: int
    """The number of the call in its output, from 0."""
    name: str
    id: str
    """The id that the tool's result will refer to."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallArguments:
    """Some of the JSON text of a call's arguments."""

    index: int
    text: str


type Piece = Text | Reasoning | CallStart | CallArguments


class StreamParser(Protocol):
    """Parses one output as it comes.

    The pieces depend only on the text, not on how it was split; a whole output is a stream of one text.
    """

    def feed(self, text: str) -> list[Piece]:
        """Add text and return the pieces that became certain."""
        ...

    def finish(self) -> list[Piece]:
        """Return the remaining pieces once the output has ended."""
        ...


@dataclasses.dataclass(slots=True)
class _ToolCall:
    """A whole call; `arguments` is JSON text, unless the output was cut short or malformed."""

    id: str
    name: str
    arguments: str


@dataclasses.dataclass(slots=True)
class ParsedOutput:
    """A whole parsed output."""

    text: str = ""
    reasoning: str = ""
    calls: list[_ToolCall] = dataclasses.field(default_factory=list)


def gather(pieces: Iterable[Piece]) -> ParsedOutput:
    """Return the whole output from its pieces."""
    parsed = ParsedOutput()
    for piece in pieces:
        match piece:
            case Text(text):
                parsed.text += text
            case Reasoning(text):
                parsed.reasoning += text
            case CallStart(_, name, call_id):
                parsed.calls.append(_ToolCall(call_id, name, ""))
            case CallArguments(index, text):
                parsed.calls[index].arguments += text
    return parsed


def merge(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces with neighbours of one kind joined, and without empty ones."""
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        match piece, last:
            case ((Text("") | Reasoning("") | CallArguments(_, "")), _):
                continue
            case Text(text), Text(before):
                merged[-1] = Text(before + text)
            case Reasoning(text), Reasoning(before):
                merged[-1] = Reasoning(before + text)
            case CallArguments(index, text), CallArguments(_, before):
                merged[-1] = CallArguments(index, before + text)
            case _:
                merged.append(piece)
    return merged


def new_call_id() -> str:
    """Return an id that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"
