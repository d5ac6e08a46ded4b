"""Llama 3.1 to 3.3, xLAM: JSON objects anywhere in the answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from jaxllm.parsers import formats
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Reading
from jaxllm.parsers.json_calls import JsonCall
from jaxllm.parsers.tool_parser import Attempt, ToolParser

_FENCE = "```"
_LANGUAGE = re.compile(r"\w+")
_MAX_LANGUAGE = 20
_TRIGGER = '{"name"'


class Llama3JsonParser(ToolParser):
    """Reads `{"name": ..., "parameters": {...}}` anywhere in an answer, also in a list or a block of code.

    A call may have any name only after the tag. Elsewhere it must name a tool of the request, since nothing else tells
    a call from JSON that the user asked for.
    """

    marks = ("<|python_tag|>",)
    tags: ClassVar[tuple[str, ...]] = marks
    """The texts after which a call may have any name."""
    end: ClassVar[str] = ""
    """The text after calls that follow a tag, which models may omit."""
    key: ClassVar[str] = "parameters"
    """The key of the arguments in grammars; outputs may have `arguments` or `parameters`."""
    brackets: ClassVar[tuple[str, str, str]] = ("", "; ", "")
    """What grammars write before, between and after calls."""

    def read(self) -> Reading[None]:
        """Read text and calls in turns."""
        incoming = self.incoming
        while mark := (yield from incoming.until((*self.tags, _FENCE, "[", "{"), self.show_text)):
            attempt = self.attempt(mark)
            if mark == _FENCE:
                yield from incoming.take_while(_LANGUAGE, _MAX_LANGUAGE)
            elif mark == "{":
                incoming.unread(mark)
            is_list = mark == "[" or (mark != "{" and (yield from incoming.take_spaced("[")))
            if (yield from self._calls(attempt, bool if mark in self.tags else self.tools.__contains__)):
                if is_list:
                    yield from incoming.take_spaced("]")
                end = _FENCE if mark == _FENCE else self.end if mark in self.tags else ""
                if end:
                    yield from incoming.take_spaced(end)
            elif mark in "[{":
                yield from self._json_as_text()
            else:
                yield from incoming.take(mark)
                self.show_text(mark)

    def _calls(self, attempt: Attempt, takes: Callable[[str], bool]) -> Reading[bool]:
        """Read calls with an optional semicolon or comma between them, and return whether there are any."""
        incoming, num_calls = self.incoming, 0
        while (yield from self._call(attempt, takes)):
            num_calls += 1
            attempt = self.attempt()
            if not (yield from incoming.take_spaced(";")):
                yield from incoming.take_spaced(",")
        return num_calls > 0

    def _call(self, attempt: Attempt, takes: Callable[[str], bool]) -> Reading[bool]:
        """Read a call and conclude the attempt, or unread its text; return whether it was a call."""
        call = JsonCall(self, takes=takes)
        yield from self.incoming.skip_space()
        is_whole = yield from call.read()
        is_shown = is_whole or (call.has_begun and self.keeps_parts)
        if not is_shown:
            self.give_up(attempt)
            return False
        if not call.has_arguments:
            yield from self.malformed_arguments(self.tags)
        return self.conclude(attempt, is_call=True)

    def _json_as_text(self) -> Reading[None]:
        """Show a JSON value verbatim, complete or not; anything like a call within it is not a call."""
        start = self.incoming.trial()

        def show(_: str) -> None:
            nonlocal start
            self.show_text(self.incoming.settle(start))
            start = self.incoming.trial()

        yield from self.incoming.json_value(show)
        self.show_text(self.incoming.settle(start))

    @classmethod
    def grammar(cls, tools: Sequence[FunctionTool], *, at_least_one: bool, parallel: bool) -> dict[str, Any]:
        """Return the format of outputs with calls, as `ToolParser.grammar` defines."""
        before, separator, after = cls.brackets
        tags = [
            formats.tag(f'{{"name": {formats.quoted(tool.name)}, "{cls.key}": ', formats.json_schema(tool.schema), "}")
            for tool in tools
        ]
        calls = formats.calls(tags, _TRIGGER, separator=separator, at_least_one=True, parallel=parallel)
        calls = formats.tag(before, calls, after) if before else calls
        if at_least_one:
            return calls
        free = formats.calls(tags, _TRIGGER, separator="", at_least_one=False, parallel=parallel)
        return formats.either(calls, formats.sequence(formats.regex(cls._text_begins()), free), formats.regex(r"\s*"))

    @classmethod
    def _text_begins(cls) -> str:
        """Return a regular expression for the beginning of an answer that does not begin with calls."""
        return rf"\s*[^\s{{<{re.escape(cls.brackets[0])}]"


class XLAMParser(Llama3JsonParser):
    """xLAM: reads `[{"name": ..., "arguments": {...}}, ...]`, and what `Llama3JsonParser` reads."""

    marks = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]")
    tags = ("<tool_call>", "[TOOL_CALLS]")
    end = "</tool_call>"
    key = "arguments"
    brackets = ("[", ", ", "]")
