"""What every tool parser is: a reader of calls, and the grammar of what it reads."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.pieces import CallArguments, CallStart, Piece, new_call_id


class ToolParser(abc.ABC):
    """This takes the text of one answer apart into text and calls, as `pieces.StreamParser` says.

    A call begins as soon as its name is certain, and its arguments follow as they come. What turns out to be no call
    is text; where a call that has begun turns out to be malformed it ends, and what follows is text. So nothing but
    the marks of well-formed calls is ever dropped, and nothing raises.
    """

    keeps_special_tokens: ClassVar[bool] = False
    """Whether the marks of calls are special tokens of the tokenizer, which must not be left out of the text."""

    def __init__(self, tools: Sequence[FunctionTool] = ()) -> None:
        """Read calls of these tools. Calls of others are read too, unless nothing but its name tells a call."""
        self.tools = {tool.name: tool for tool in tools}
        self._num_calls = 0

    @abc.abstractmethod
    def feed(self, text: str) -> list[Piece]:
        """Add text and return the pieces that became certain."""

    @abc.abstractmethod
    def finish(self) -> list[Piece]:
        """Return what is left once the output has ended."""

    @classmethod
    @abc.abstractmethod
    def grammar(cls, tools: Sequence[FunctionTool], *, at_least_one: bool, parallel: bool) -> dict[str, Any]:
        """Return a format of structural tags (`constraints/structural_tag.py`) that outputs with calls match.

        Each call is of one of the tools, with arguments that match its schema. With `at_least_one` there is no text
        beside the calls, else text may stand before them or in their place. Unless `parallel` there is one call at
        most. Whatever matches is read by this parser without loss.
        """

    def _start(self, name: str, call_id: str | None = None) -> CallStart:
        """Begin the next call."""
        self._num_calls += 1
        return CallStart(self._num_calls - 1, name, call_id or new_call_id())

    def _arguments(self, text: str) -> CallArguments:
        """Go on with the arguments of the last call."""
        return CallArguments(self._num_calls - 1, text)
