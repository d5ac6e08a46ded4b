"""Hermes, Qwen 2.5, Qwen 3 and many others: JSON objects between <tool_call> and </tool_call>."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxllm.parsers import formats
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Reading
from jaxllm.parsers.json_calls import read_call
from jaxllm.parsers.tool_parser import ToolParser

START, END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Reads `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    marks = (START, END)

    def read(self) -> Reading[None]:
        """Read text and calls in turns."""
        while (yield from self.incoming.until((START,), self.show_text)):
            if (yield from read_call(self, self.attempt(START), ends=(END,))):
                yield from self.incoming.take_spaced(END)

    @classmethod
    def grammar(cls, tools: Sequence[FunctionTool], *, at_least_one: bool, parallel: bool) -> dict[str, Any]:
        """Return the format of outputs with calls, as `ToolParser.grammar` defines."""
        tags = [
            formats.tag(
                f'{START}\n{{"name": {formats.quoted(tool.name)}, "arguments": ',
                formats.json_schema(tool.schema),
                f"}}\n{END}",
            )
            for tool in tools
        ]
        return formats.calls(tags, START, separator="\n", at_least_one=at_least_one, parallel=parallel)
