"""GLM 4.5 to 4.7: the function's name, then keys and values in tags."""

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
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_OWN = (KEY, KEY_END, VALUE, END, START)
"""What may follow a value that has no end of its own."""
_NAME = re.compile(r"[^<>\s{}\"]+")
_KEY = re.compile(r"[^<>\n]+")
_MAX_NAME = 256


class Glm45Parser(ToolParser):
    """This reads `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

    marks = (START, END, KEY, KEY_END, VALUE, VALUE_END)

    def read(self) -> Reading[None]:
        """Read text and calls in turns."""
        incoming = self.incoming
        while (yield from incoming.until((START,), self.show_text)):
            start = incoming.trial()
            yield from incoming.skip_space()
            name = yield from incoming.take_while(_NAME, _MAX_NAME)
            yield from incoming.skip_space()
            is_call = bool(name) and ((yield from incoming.next_is(KEY)) or (yield from incoming.next_is(END)))
            text = incoming.settle(start)
            if not is_call:
                self.show_text(START + text)
                continue
            self.start_call(name)
            yield from self._arguments(name)

    def _arguments(self, name: str) -> Reading[None]:
        """Read keys and values up to the call's end."""
        incoming, arguments = self.incoming, TaggedArguments(self, name)
        while True:
            start = incoming.trial()
            key = None
            if (yield from incoming.take_spaced(KEY)):
                key = yield from incoming.take_while(_KEY, _MAX_NAME)
                is_whole = (yield from incoming.take(KEY_END)) and (yield from incoming.take_spaced(VALUE))
                key = key if is_whole else ""
            text = incoming.settle(start)
            if not key:
                break
            value, mark = yield from read_value(incoming, VALUE_END, _OWN)
            if mark is None:
                arguments.cut(key.strip(), value, (VALUE_END, *_OWN))
                return
            arguments.add(key.strip(), value if mark == VALUE_END else value.removesuffix("\n"))
        if key == "":
            arguments.close()
            self.show_text(text)
        elif (yield from incoming.take_spaced(END)) or (yield from incoming.has_more()):
            arguments.close()

    @classmethod
    def grammar(cls, tools: Sequence[FunctionTool], *, at_least_one: bool, parallel: bool) -> dict[str, Any]:
        """Return the format of outputs with calls, as `ToolParser.grammar` says."""
        tags = [
            formats.tag(
                f"{START}{tool.name}\n",
                argument_formats(tool, _KEY, lambda key: f"{KEY}{key}{KEY_END}\n{VALUE}", f"{VALUE_END}\n"),
                END,
            )
            for tool in tools
        ]
        return formats.calls(tags, START, separator="\n", at_least_one=at_least_one, parallel=parallel)
