"""DeepSeek V3, R1 and V3.1, Kimi K2: a name and JSON arguments between tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from jaxllm.parsers import formats
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Reading
from jaxllm.parsers.named_calls import MAX_NAME, NAME, Head, NamedCallsParser

_SEPARATOR = "<｜tool▁sep｜>"
_BLOCK, _BLOCK_END = "```json", "```"
_PREFIX, _ARGUMENTS = "functions.", "<|tool_call_argument_begin|>"
_NUMBERED = re.compile(r"(?:functions\.)?(.+):[0-9]+")


class DeepSeekV3Parser(NamedCallsParser):
    """Reads `function<｜tool▁sep｜>NAME` with the arguments in a block of code, and the form of V3.1."""

    start, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    call, call_end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    marks = (start, end, call, _SEPARATOR, call_end)
    drops_text_after_calls = True
    gap: ClassVar[str] = "\n"
    """What grammars write between calls."""

    def head(self) -> Reading[Head | None]:
        """Read the name, after a type if the arguments are in a block of code."""
        incoming = self.incoming
        name = yield from incoming.take_while(NAME, MAX_NAME)
        if not (name and (yield from incoming.take(_SEPARATOR))):
            return None
        if (yield from incoming.next_is("{")):
            return Head(name)
        name = yield from incoming.take_while(NAME, MAX_NAME)
        if not (yield from incoming.take_spaced(_BLOCK)):
            return None
        yield from incoming.skip_space()
        return Head(name, tail=_BLOCK_END)

    @classmethod
    def grammar(cls, tools: Sequence[FunctionTool], *, at_least_one: bool, parallel: bool) -> dict[str, Any]:
        """Return the format of outputs with calls, as `ToolParser.grammar` defines."""
        tags, ends = [cls._tag(tool) for tool in tools], (cls.start, cls.end)
        return formats.listed_calls(
            tags, ends, cls.start, separator=cls.gap, at_least_one=at_least_one, parallel=parallel
        )

    @classmethod
    def _tag(cls, tool: FunctionTool) -> dict[str, Any]:
        begin, end = f"{cls.call}function{_SEPARATOR}{tool.name}\n{_BLOCK}\n", f"\n{_BLOCK_END}{cls.call_end}"
        return formats.tag(begin, formats.json_schema(tool.schema), end)


class DeepSeekV31Parser(DeepSeekV3Parser):
    """Reads `NAME<｜tool▁sep｜>` with plain arguments, and the form of V3."""

    gap = ""

    @classmethod
    def _tag(cls, tool: FunctionTool) -> dict[str, Any]:
        return formats.tag(f"{cls.call}{tool.name}{_SEPARATOR}", formats.json_schema(tool.schema), cls.call_end)


class KimiK2Parser(DeepSeekV3Parser):
    """Reads `functions.NAME:0<|tool_call_argument_begin|>` with plain arguments; what is before the mark is the id."""

    start, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call, call_end = "<|tool_call_begin|>", "<|tool_call_end|>"
    marks = (start, end, call, _ARGUMENTS, call_end)
    drops_text_after_calls = False
    gap = ""

    def __init__(self, tools: Sequence[FunctionTool] = ()) -> None:
        """Read calls of these tools, and of others."""
        super().__init__(tools)
        self._ids = set[str]()

    def head(self) -> Reading[Head | None]:
        """Read the id, and find the name in it. A repeated id is replaced, since results refer to it."""
        incoming = self.incoming
        yield from incoming.skip_space()
        call_id = yield from incoming.take_while(NAME, MAX_NAME)
        if not (call_id and (yield from incoming.take_spaced(_ARGUMENTS))):
            return None
        yield from incoming.skip_space()
        match = _NUMBERED.fullmatch(call_id)
        if match is None:
            return Head(call_id.removeprefix(_PREFIX))
        head = Head(match[1], None if call_id in self._ids else call_id)
        self._ids.add(call_id)
        return head

    @classmethod
    def _tag(cls, tool: FunctionTool) -> dict[str, Any]:
        arguments = formats.json_schema(tool.schema)
        content = formats.sequence(formats.regex("[0-9]{1,3}"), formats.text(_ARGUMENTS), arguments)
        return formats.tag(f"{cls.call}{_PREFIX}{tool.name}:", content, cls.call_end)
