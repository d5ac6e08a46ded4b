"""Hermes, Qwen, Granite, Jamba, Phi 4 mini, InternLM, Command, Apertus: JSON objects after a mark, or lists of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from jaxllm.parsers import formats
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Reading
from jaxllm.parsers.json_calls import read_call, read_calls
from jaxllm.parsers.tool_parser import ToolParser


class HermesParser(ToolParser):
    """Reads `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; a subclass names other marks and keys."""

    marks = ("<tool_call>", "</tool_call>")
    starts: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    """The texts that begin calls. Grammars write the first."""
    end: ClassVar[str] = "</tool_call>"
    """The text after calls, which models may omit."""
    gap: ClassVar[str] = "\n"
    """What grammars write after a start, before an end, and between calls."""
    dropped: ClassVar[tuple[str, ...]] = ()
    """Marks that are left out of the text."""
    is_list: ClassVar[bool] = False
    """Whether calls are in a list after one start."""
    name_key: ClassVar[str] = "name"
    arguments_key: ClassVar[str] = "arguments"
    """The key of the arguments in grammars; outputs may have `arguments` or `parameters`."""

    def read(self) -> Reading[None]:
        """Read text and calls in turns."""
        incoming, ends = self.incoming, (self.end,) if self.end else self.starts
        while mark := (yield from incoming.until((*self.starts, *self.dropped), self.show_text)):
            if mark in self.dropped:
                continue
            attempt = self.attempt(mark)
            read = read_calls if self.is_list and (yield from incoming.take_spaced("[")) else read_call
            is_call = yield from read(self, attempt, name_key=self.name_key, ends=ends)
            if is_call and self.end:
                yield from incoming.take_spaced(self.end)

    @classmethod
    def grammar(cls, tools: Sequence[FunctionTool], *, at_least_one: bool, parallel: bool) -> dict[str, Any]:
        """Return the format of outputs with calls, as `ToolParser.grammar` defines."""
        start, end = cls.starts[0] + cls.gap, cls.gap + cls.end if cls.end else ""
        begin, close = ("", "") if cls.is_list else (start, end)
        tags = [
            formats.tag(
                begin + cls.opening(formats.quoted(tool.name)),
                formats.json_schema(tool.schema),
                f"}}{close}",
            )
            for tool in tools
        ]
        if not cls.is_list:
            return formats.calls(tags, cls.starts[0], separator=cls.gap, at_least_one=at_least_one, parallel=parallel)
        return formats.listed_calls(
            tags, (f"{start}[", f"]{end}"), cls.starts[0], separator=", ", at_least_one=at_least_one, parallel=parallel
        )

    @classmethod
    def opening(cls, name: str) -> str:
        """Return what grammars write before the arguments; `name` is quoted."""
        return f'{{"{cls.name_key}": {name}, "{cls.arguments_key}": '


class GraniteParser(HermesParser):
    """Granite 3: reads `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, also after `<tool_call>`."""

    marks = ("<|tool_call|>", "<tool_call>")
    starts = marks
    end, gap, is_list = "", "", True


class JambaParser(HermesParser):
    """Reads `<tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>`."""

    marks = ("<tool_calls>", "</tool_calls>")
    starts, end, is_list = marks[:1], marks[1], True


class Phi4MiniParser(HermesParser):
    """Reads `functools[{"name": ..., "arguments": {...}}, ...]`, and a list between `<|tool_call|>` marks."""

    marks = ("functools", "<|tool_call|>", "<|/tool_call|>")
    starts = marks[:2]
    end, gap, is_list = "", "", True
    dropped = ("<|/tool_call|>",)


class InternLMParser(HermesParser):
    """Reads `<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>`."""

    marks = ("<|action_start|><|plugin|>", "<|action_start|>", "<|plugin|>", "<|action_end|>")
    starts, end, arguments_key = marks[:1], marks[-1], "parameters"


class CohereParser(HermesParser):
    """Command R7B, Command A and newer: reads `<|START_ACTION|>[{"tool_name": ..., "parameters": {...}}, ...]`.

    The marks of an answer's text are left out.
    """

    marks = (
        *("<|START_ACTION|>", "<|END_ACTION|>"),
        *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    )
    starts, end, dropped = marks[:1], marks[1], marks[2:]
    gap, is_list, name_key, arguments_key = "", True, "tool_name", "parameters"


class ApertusParser(HermesParser):
    """Reads `<|tools_prefix|>[{NAME: {...}}, ...]<|tools_suffix|>`."""

    marks = ("<|tools_prefix|>", "<|tools_suffix|>")
    starts, end, gap, is_list, name_key = marks[:1], marks[1], "", True, ""

    @classmethod
    def opening(cls, name: str) -> str:
        """Return what grammars write before the arguments."""
        return f"{{{name}: "
