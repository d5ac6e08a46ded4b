"""Qwen 3 Coder and Qwen 3.5: functions and parameters in tags like XML's, with values as they are."""

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
            if (yield from self._arguments(name)):
                yield from incoming.take_spaced(END)

    def _arguments(self, name: str) -> Reading[bool]:
        """Read the parameters up to the function's end; False where they are malformed."""
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
                return False
            pieces = list[str]()
            if (yield from incoming.until((PARAMETER_END,), pieces.append)) is None:
                arguments.cut(key, "".join(pieces).removeprefix("\n"), f"\n{PARAMETER_END}")
                return False
            arguments.add(key, "".join(pieces).removeprefix("\n").removesuffix("\n"))
        is_whole = yield from incoming.take_spaced(FUNCTION_END)
        if is_whole or not incoming.is_ended:
            arguments.close()
        return is_whole

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
