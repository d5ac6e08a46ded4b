"""Qwen 3 Coder and Qwen 3.5: functions and parameters in tags like XML's, with values as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jaxllm.parsers import formats
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Reading
from jaxllm.parsers.tagged_arguments import TaggedArguments, argument_formats, read_value
from jaxllm.parsers.tool_parser import ToolParser

START, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_OWN = (PARAMETER, FUNCTION_END, END, FUNCTION, START)
"""What may follow a value that has no end of its own."""
_VALUE_ENDS = [f"{space}{mark}" for space in ("", "\n") for mark in (PARAMETER_END, *_OWN)]
_NAME = re.compile(r"[^<>\n]+")
_MAX_NAME = 256


class Qwen3XmlParser(ToolParser):
    """This reads `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

    marks = (START, END)

    def read(self) -> Reading[None]:
        """Read text and calls in turns; some models leave the outermost tag out."""
        incoming = self.incoming
        while mark := (yield from incoming.until((START, FUNCTION), self.show_text)):
            start = incoming.trial()
            is_call = mark == FUNCTION or (yield from incoming.take_spaced(FUNCTION))
            name = yield from incoming.take_while(_NAME, _MAX_NAME)
            is_call = is_call and name != "" and (yield from incoming.take(">"))
            text = incoming.settle(start)
            if not is_call:
                self.show_text(mark + text)
                continue
            self.start_call(name)
            yield from self._arguments(name)

    def _arguments(self, name: str) -> Reading[None]:
        """Read the parameters up to the call's end, or to where they are malformed."""
        incoming, arguments = self.incoming, TaggedArguments(self, name)
        while True:
            start = incoming.trial()
            is_next = yield from incoming.take_spaced(PARAMETER)
            key = (yield from incoming.take_while(_NAME, _MAX_NAME)) if is_next else ""
            is_whole = key != "" and (yield from incoming.take(">"))
            text = incoming.settle(start)
            if not is_next:
                break
            if not is_whole:
                arguments.close()
                self.show_text(text)
                return
            value, mark = yield from read_value(incoming, PARAMETER_END, _OWN, PARAMETER)
            if mark is None:
                arguments.cut(key, value.removeprefix("\n"), _VALUE_ENDS)
                return
            arguments.add(key, value.removeprefix("\n").removesuffix("\n"))
        is_closed = yield from incoming.take_spaced(FUNCTION_END)
        is_closed = (yield from incoming.take_spaced(END)) or is_closed
        if is_closed or (yield from incoming.has_more()):
            arguments.close()

    @classmethod
    def grammar(cls, tools: Sequence[FunctionTool], *, at_least_one: bool, parallel: bool) -> dict[str, Any]:
        """Return the format of outputs with calls, as `ToolParser.grammar` says."""
        tags = [
            formats.tag(
                f"{START}\n{FUNCTION}{tool.name}>\n",
                argument_formats(tool, _NAME, lambda key: f"{PARAMETER}{key}>\n", f"\n{PARAMETER_END}\n"),
                f"{FUNCTION_END}\n{END}",
            )
            for tool in tools
        ]
        return formats.calls(tags, START, separator="\n", at_least_one=at_least_one, parallel=parallel)
