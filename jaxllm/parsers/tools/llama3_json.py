"""Llama 3.1 to 3.3: JSON objects that are the whole answer, with a semicolon between them, maybe after a tag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxllm.parsers import formats
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Reading
from jaxllm.parsers.json_calls import read_call
from jaxllm.parsers.tool_parser import ToolParser

TAG = "<|python_tag|>"
_OTHER_TEXT = r"\s*([^\s{<][\s\S]*)?"


class Llama3JsonParser(ToolParser):
    """This reads `{"name": ..., "parameters": {...}}` at the beginning of an answer, and anywhere after the tag.

    Without the tag nothing but its name tells a call from JSON that was asked for: it has to be a tool of the request.
    """

    marks = (TAG,)

    def read(self) -> Reading[None]:
        """Read what the answer begins with, then what follows a tag."""
        incoming = self.incoming
        if not (yield from incoming.next_is(TAG)):
            yield from self._calls("")
        while (yield from incoming.until((TAG,), self.show_text)):
            yield from self._calls(TAG)

    def _calls(self, tag: str) -> Reading[None]:
        """Read the calls that follow a tag; some models leave the semicolon between them out."""
        takes = bool if tag else self.tools.__contains__
        while (yield from read_call(self, after=tag, takes=takes)):
            tag = ";" if (yield from self.incoming.take_spaced(";")) else ""

    @classmethod
    def grammar(cls, tools: Sequence[FunctionTool], *, at_least_one: bool, parallel: bool) -> dict[str, Any]:
        """Return the format of outputs with calls, as `ToolParser.grammar` says."""
        tags = [
            formats.tag(f'{{"name": {formats.quoted(tool.name)}, "parameters": ', formats.json_schema(tool.schema), "}")
            for tool in tools
        ]
        calls = formats.calls(tags, "{", separator="; ", at_least_one=True, parallel=parallel)
        return calls if at_least_one else formats.either(calls, formats.regex(_OTHER_TEXT))
