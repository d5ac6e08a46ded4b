"""GLM 4.5 to 4.7: the function's name, then keys and values in tags."""

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
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_AFTER_VALUE = (KEY, VALUE, END)
"""The marks that may follow a value whose end is missing. Within a call the mark of a call is text."""
_NAME = re.compile(r"[^<>\s{}\"]+")
_KEY = re.compile(r"[^<>\n]+")
_WRITTEN_KEY = re.compile(r"[^<>\s]([^<>\n]*[^<>\s])?")
_MAX_NAME = 256


class Glm45Parser(ToolParser):
    """Reads `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

    marks = (START, END, KEY, KEY_END, VALUE, VALUE_END)

    def read(self) -> Reading[None]:
        """Read text and calls in turns."""
        incoming = self.incoming
        while (yield from incoming.until((START,), self.show_text)):
            start = incoming.trial()
            yield from incoming.skip_space()
            name = yield from incoming.take_while(_NAME, _MAX_NAME)
            yield from incoming.skip_space()
            is_call = name != "" and (yield from self._ends_name(name))
            text = incoming.settle(start)
            if not is_call:
                self.show_text(START + text)
                continue
            self.start_call(name)
            yield from self._arguments(name)

    def _ends_name(self, name: str) -> Reading[bool]:
        """Return whether the text after a name makes it a call's: a tool's name may be the output's last word."""
        incoming = self.incoming
        if not (yield from incoming.has(1)):
            return name in self.tools and not self.is_cut
        return (yield from incoming.next_is(KEY)) or (yield from incoming.next_is(END))

    def _arguments(self, name: str) -> Reading[None]:
        """Read keys and values up to the call's end. Other text in between follows the call."""
        incoming, arguments, stray = self.incoming, TaggedArguments(self, name), list[str]()
        while (mark := (yield from incoming.until(self.marks, stray.append))) not in (None, END, START):
            key = (yield from incoming.take_while(_KEY, _MAX_NAME)) if mark == KEY else ""
            is_key = bool(key.strip()) and (yield from incoming.take(KEY_END))
            if not (is_key and (yield from incoming.take_spaced(VALUE))):
                stray.append(f" {key} ")
                continue
            if (yield from arguments.read(incoming, key.strip(), VALUE_END, _AFTER_VALUE)) is None:
                arguments.close(stray, is_cut=True)
                return
            stray.append(" ")
        if mark == START:
            incoming.unread(START)
        arguments.close(stray, is_cut=mark is None and self.is_cut)

    @classmethod
    def grammar(cls, tools: Sequence[FunctionTool], *, at_least_one: bool, parallel: bool) -> dict[str, Any]:
        """Return the format of outputs with calls, as `ToolParser.grammar` defines."""
        tags = [
            formats.tag(
                f"{START}{tool.name}\n",
                argument_formats(tool, _WRITTEN_KEY, lambda key: f"{KEY}{key}{KEY_END}\n{VALUE}", f"{VALUE_END}\n"),
                END,
            )
            for tool in tools
        ]
        return formats.calls(tags, START, separator="\n", at_least_one=at_least_one, parallel=parallel)
