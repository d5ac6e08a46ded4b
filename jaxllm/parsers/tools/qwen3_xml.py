"""Qwen 3 Coder, Seed-OSS, MiniMax M2, DeepSeek V3.2 and others: functions and parameters in tags like XML's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from jaxllm.parsers import formats
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Reading
from jaxllm.parsers.tagged_arguments import TaggedArguments, argument_formats
from jaxllm.parsers.tool_parser import ToolParser

_NAME = re.compile(r"[^<>\n]+")
_QUOTED = re.compile(r"""\s*(["']?)(?P<name>.*?)\1(\s+string=(["'])(?P<is_text>true|false)\4)?\s*""")
_DSML = ("<｜DSML｜", "</｜DSML｜", "｜DSML｜")
"""What the tags of DeepSeek V3.2 begin with, and the token in it."""
_MAX_NAME = 256


class Qwen3XmlParser(ToolParser):
    """Reads `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

    A subclass names other marks.
    """

    start, end = "<tool_call>", "</tool_call>"
    function, function_end = "<function=", "</function>"
    parameter, parameter_end = "<parameter=", "</parameter>"
    marks = (start, end, function)
    name_format: ClassVar[str] = "%s"
    """How names of functions are written."""
    key_formats: ClassVar[tuple[str, str]] = ("%s", "%s")
    """How names of parameters are written: those of strings, and others."""
    written_name: ClassVar[re.Pattern[str]] = re.compile(r"[^<>\s]([^<>\n]*[^<>\s])?")
    """The names of parameters that can be read."""
    on_lines: ClassVar[bool] = True
    """Whether values have lines of their own."""
    is_section: ClassVar[bool] = False
    """Whether several functions are between the outermost tags."""

    def read(self) -> Reading[None]:
        """Read text and calls in turns; some models omit the outermost tag."""
        incoming = self.incoming
        while mark := (yield from incoming.until((self.start, self.function), self.show_text)):
            start = incoming.trial()
            is_call = mark == self.function or (yield from incoming.take_spaced(self.function))
            name = self._named((yield from incoming.take_while(_NAME, _MAX_NAME)))[0]
            is_call = is_call and name != "" and (yield from self._ends_name())
            text = incoming.settle(start)
            if not is_call:
                self.show_text(mark + text)
                continue
            self.start_call(name)
            yield from self._arguments(name)

    def _named(self, head: str) -> tuple[str, bool | None]:
        """Return the name in a tag, and whether the tag makes its value a string; None if it does not tell."""
        return head.strip(), None

    def _own(self) -> tuple[str, ...]:
        """Return all marks."""
        inner = (self.parameter, self.parameter_end, self.function_end)
        return (*inner, self.end, self.function, self.start)

    def _ends_name(self) -> Reading[bool]:
        """Read the end of a function's name, which models may omit before the next mark."""
        if (yield from self.incoming.take(">")):
            return True
        yield from self.incoming.skip_space()
        for mark in self._own():
            if (yield from self.incoming.next_is(mark)):
                return True
        return False

    def _arguments(self, name: str) -> Reading[None]:
        """Read the parameters up to the call's end. Other text in between follows the call."""
        incoming, arguments = self.incoming, TaggedArguments(self, name, on_lines=self.on_lines)
        marks, stray, parameter = self._own(), list[str](), self.parameter
        # The marks that may follow a value whose end is missing. Within a call the marks of a call are text.
        after_value = (parameter, self.function_end, self.end)
        while (mark := (yield from incoming.until(marks, stray.append))) in (parameter, self.parameter_end):
            head = (yield from incoming.take_while(_NAME, _MAX_NAME)) if mark == parameter else ""
            key, is_text = self._named(head)
            if not (key and (yield from incoming.take(">"))):
                stray.append(f" {head} ")
                continue
            read = arguments.read(incoming, key, self.parameter_end, after_value, following=parameter, is_text=is_text)
            if (yield from read) is None:
                arguments.close(stray, is_cut=True)
                return
            stray.append(" ")
        if mark == self.function_end:
            yield from incoming.take_spaced(self.end)
        elif mark in (self.function, self.start):
            incoming.unread(mark)
        arguments.close(stray, is_cut=mark is None and self.is_cut)

    @classmethod
    def grammar(cls, tools: Sequence[FunctionTool], *, at_least_one: bool, parallel: bool) -> dict[str, Any]:
        """Return the format of outputs with calls, as `ToolParser.grammar` defines."""
        line = "\n" if cls.on_lines else ""
        begin, end = ("", "\n") if cls.is_section else (f"{cls.start}\n", f"\n{cls.end}")
        tags = [
            formats.tag(
                f"{begin}{cls.function}{cls.name_format % tool.name}>\n",
                argument_formats(
                    tool,
                    cls.written_name,
                    lambda key, is_text: f"{cls.parameter}{cls.key_formats[not is_text] % key}>{line}",
                    f"{line}{cls.parameter_end}\n",
                ),
                f"{cls.function_end}{end}",
            )
            for tool in tools
        ]
        if cls.is_section:
            ends = (f"{cls.start}\n", cls.end)
            return formats.listed_calls(
                tags, ends, cls.start, separator="", at_least_one=at_least_one, parallel=parallel
            )
        return formats.calls(tags, cls.start, separator="\n", at_least_one=at_least_one, parallel=parallel)


class MiMoParser(Qwen3XmlParser):
    """MiMo: values are on the lines of their tags."""

    on_lines = False


class SeedOSSParser(MiMoParser):
    """Seed-OSS: its outermost tags are its own."""

    start, end = "<seed:tool_call>", "</seed:tool_call>"
    marks = (start, end, Qwen3XmlParser.function)


class MiniMaxM2Parser(MiMoParser):
    """Reads `<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>...`."""

    start, end = "<minimax:tool_call>", "</minimax:tool_call>"
    function, function_end = "<invoke name=", "</invoke>"
    parameter = "<parameter name="
    marks = (start, end, function)
    name_format = '"%s"'
    key_formats = ('"%s"', '"%s"')
    written_name = re.compile(r"[^<>\s\"']([^<>\n\"]*[^<>\s\"'])?")
    is_section = True

    def _named(self, head: str) -> tuple[str, bool | None]:
        match = _QUOTED.fullmatch(head)
        if match is None:
            return "", None
        return match["name"].strip(), None if match["is_text"] is None else match["is_text"] == "true"


class DeepSeekV32Parser(MiniMaxM2Parser):
    """Reads the form of MiniMax M2 with DeepSeek's marks, where a parameter's tag tells whether it is a string."""

    start, end = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
    function, function_end = "<｜DSML｜invoke name=", "</｜DSML｜invoke>"
    parameter, parameter_end = "<｜DSML｜parameter name=", "</｜DSML｜parameter>"
    key_formats = ('"%s" string="true"', '"%s" string="false"')
    marks = (start, end, function, *_DSML)
    drops_text_after_calls = True

    def _named(self, head: str) -> tuple[str, bool | None]:
        name, is_text = super()._named(head)
        return name, bool(is_text)


class DeepSeekV4Parser(DeepSeekV32Parser):
    """DeepSeek V4: its outermost tags are its own."""

    start, end = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"
    marks = (start, end, DeepSeekV32Parser.function, *_DSML)
