"""What every tool parser is: a reader of calls, and the grammar of what it reads."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Incoming, Reading
from jaxllm.parsers.pieces import CallArguments, CallStart, Piece, Reasoning, Text, new_call_id


class ToolParser(abc.ABC):
    """This takes the text of one answer apart into text and calls, as `pieces.StreamParser` says.

    A call begins as soon as its name is certain, and its arguments follow as they come. What turns out to be no call
    is text; where a call that has begun turns out to be malformed it ends, and what follows is text. So nothing but
    the marks of well-formed calls is ever dropped, and nothing raises.
    """

    marks: ClassVar[tuple[str, ...]] = ()
    """The marks of calls. Those that are special tokens of the tokenizer must not be left out of the text."""

    def __init__(self, tools: Sequence[FunctionTool] = ()) -> None:
        """Read calls of these tools. Calls of others are read too, unless nothing but its name tells a call."""
        self.tools = {tool.name: tool for tool in tools}
        self.incoming = Incoming()
        self._pieces: list[Piece] = []
        self._num_calls = 0
        self._space: list[str] | None = []
        """White space at the beginning, or after a call, which is shown if text follows; None within text."""
        self._reading = self._read_all()

    @abc.abstractmethod
    def read(self) -> Reading[None]:
        """Read `incoming`, and show what it holds as it becomes certain. What is left unread at the end is text."""

    @classmethod
    @abc.abstractmethod
    def grammar(cls, tools: Sequence[FunctionTool], *, at_least_one: bool, parallel: bool) -> dict[str, Any]:
        """Return a format of structural tags (`constraints/structural_tag.py`) that outputs with calls match.

        Each call is of one of the tools, with arguments that match its schema. With `at_least_one` there is no text
        beside the calls, else text may stand before them or in their place. Unless `parallel` there is one call at
        most. Whatever matches is read by this parser without loss.
        """

    def feed(self, text: str) -> list[Piece]:
        """Add text and return the pieces that became certain."""
        self.incoming.add(text)
        return self._advance()

    def finish(self) -> list[Piece]:
        """Return what is left once the output has ended."""
        self.incoming.is_ended = True
        return self._advance()

    def show_text(self, text: str) -> None:
        """Show text of the answer."""
        if self._space is not None:
            if not text or text.isspace():
                self._space.append(text)
                return
            text, self._space = "".join(self._space) + text, None
        self._pieces.append(Text(text))

    def show_reasoning(self, text: str) -> None:
        """Show reasoning."""
        self._pieces.append(Reasoning(text))

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """Begin the next call, with an id of its own unless the model has given it one."""
        self._pieces.append(CallStart(self._num_calls, name, call_id or new_call_id()))
        self._num_calls += 1
        self._space = []

    def show_arguments(self, text: str) -> None:
        """Go on with the arguments of the last call."""
        self._pieces.append(CallArguments(self._num_calls - 1, text))

    def _advance(self) -> list[Piece]:
        next(self._reading, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read_all(self) -> Reading[None]:
        yield from self.read()
        while (yield from self.incoming.has(1)):
            self.show_text(self.incoming.rest())
        if self._space and not self._num_calls:
            self._pieces.append(Text("".join(self._space)))
