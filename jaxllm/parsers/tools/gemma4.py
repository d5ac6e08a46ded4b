"""Gemma 4: a name and arguments in a notation like JSON's, with bare keys and a mark around strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxllm.parsers import formats
from jaxllm.parsers.bare_values import QUOTE, arguments_format
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Reading
from jaxllm.parsers.named_calls import MAX_NAME, NAME, Head, NamedCallsParser


class Gemma4Parser(NamedCallsParser):
    """Reads `<|tool_call>call:NAME{KEY:<|"|>VALUE<|"|>,KEY:42}<tool_call|>`."""

    call, call_end, quote = "<|tool_call>", "<tool_call|>", QUOTE
    marks = (call, call_end, QUOTE)

    def head(self) -> Reading[Head | None]:
        """Read the name, before which models may omit the word."""
        incoming = self.incoming
        yield from incoming.take_spaced("call")
        if not (yield from incoming.take(":")):
            return None
        return Head((yield from incoming.take_while(NAME, MAX_NAME)))

    @classmethod
    def grammar(cls, tools: Sequence[FunctionTool], *, at_least_one: bool, parallel: bool) -> dict[str, Any]:
        """Return the format of outputs with calls, as `ToolParser.grammar` defines."""
        tags = [formats.tag(f"{cls.call}call:{tool.name}", arguments_format(tool), cls.call_end) for tool in tools]
        return formats.calls(tags, cls.call, separator="", at_least_one=at_least_one, parallel=parallel)
