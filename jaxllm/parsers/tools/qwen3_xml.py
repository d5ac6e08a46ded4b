"""Qwen 3 Coder and Qwen 3.5: functions and parameters in tags like XML's, with plain values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jaxllm.parsers import formats
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Reading
from jaxllm.parsers.tagged_arguments import TaggedArguments, argument_formats
from jaxllm.parsers.tool_parser import ToolParser

START, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_OWN = (PARAMETER, PARAMETER_END, FUNCTION_END, END, FUNCTION, START)
_AFTER_VALUE = (PARAMETER, FUNCTION_END, END)
"""The marks that may follow a value whose end is missing. Within a call the marks of a call are text."""
_NAME = re.compile(r"[^<>\n]+")
_WRITTEN_NAME = re.compile(r"[^<>\s]([^<>\n]*[^<>\s])?")
_MAX_NAME = 256


class Qwen3XmlParser(ToolParser):
    """Reads `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

    marks = (START, END, FUNCTION)

    def read(self) -> Reading[None]:
        """Read text and calls in turns; some models omit the outermost tag."""
        incoming = self.incoming
        while mark := (yield from incoming.until((START, FUNCTION), self.show_text)):
            start = incoming.trial()
            is_call = mark == FUNCTION or (yield from incoming.take_spaced(FUNCTION))
            name = (yield from incoming.take_while(_NAME, _MAX_NAME)).strip()
            is_call = is_call and name != "" and (yield from self._ends_name())
            text = incoming.settle(start)
            if not is_call:
                self.show_text(mark + text)
                continue
            self.start_call(name)
            yield from self._arguments(name)

    def _ends_name(self) -> Reading[bool]:
        """Read the end of a function's name, which models may omit before the next mark."""
        if (yield from self.incoming.take(">")):
            return True
        yield from self.incoming.skip_space()
        for mark in _OWN:
            if (yield from self.incoming.next_is(mark)):
                return True
        return False

    def _arguments(self, name: str) -> Reading[None]:
        """Read the parameters up to the call's end. Other text in between follows the call."""
        incoming, arguments, stray = self.incoming, TaggedArguments(self, name, on_lines=True), list[str]()
        while (mark := (yield from incoming.until(_OWN, stray.append))) in (PARAMETER, PARAMETER_END):
            key = (yield from incoming.take_while(_NAME, _MAX_NAME)) if mark == PARAMETER else ""
            if not (key.strip() and (yield from incoming.take(">"))):
                stray.append(f" {key} ")
                continue
            read = arguments.read(incoming, key.strip(), PARAMETER_END, _AFTER_VALUE, following=PARAMETER)
            if (yield from read) is None:
                arguments.close(stray, is_cut=True)
                return
            stray.append(" ")
        if mark == FUNCTION_END:
            yield from incoming.take_spaced(END)
        elif mark in (FUNCTION, START):
            incoming.unread(mark)
        arguments.close(stray, is_cut=mark is None and self.is_cut)

    @classmethod
    def grammar(cls, tools: Sequence[FunctionTool], *, at_least_one: bool, parallel: bool) -> dict[str, Any]:
        """Return the format of outputs with calls, as `ToolParser.grammar` defines."""
        tags = [
            formats.tag(
                f"{START}\n{FUNCTION}{tool.name}>\n",
                argument_formats(tool, _WRITTEN_NAME, lambda key: f"{PARAMETER}{key}>\n", f"\n{PARAMETER_END}\n"),
                f"{FUNCTION_END}\n{END}",
            )
            for tool in tools
        ]
        return formats.calls(tags, START, separator="\n", at_least_one=at_least_one, parallel=parallel)
