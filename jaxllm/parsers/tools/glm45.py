"""GLM 4.5 to 4.7, Hunyuan 3: the function's name, then keys and values in tags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from jaxllm.parsers import formats
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Reading
from jaxllm.parsers.mark_suffix import add_suffix
from jaxllm.parsers.tagged_arguments import TaggedArguments, argument_formats
from jaxllm.parsers.tool_parser import ToolParser

_SECTION = ("<tool_calls>", "</tool_calls>")
"""The marks around all calls of Hunyuan 3."""
_NAME = re.compile(r"[^<>\s{}\"]+")
_KEY = re.compile(r"[^<>\n]+")
_WRITTEN_KEY = re.compile(r"[^<>\s]([^<>\n]*[^<>\s])?")
_MAX_NAME = 256


class _Marks(NamedTuple):
    """The marks of a call and of its arguments."""

    start: str = "<tool_call>"
    end: str = "</tool_call>"
    key: str = "<arg_key>"
    key_end: str = "</arg_key>"
    value: str = "<arg_value>"
    value_end: str = "</arg_value>"

    @property
    def after_value(self) -> tuple[str, ...]:
        """Return the marks that may follow a value without an end. Within a call the mark of a call is text."""
        return self.key, self.value, self.end


class Glm45Parser(ToolParser):
    """Reads `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

    call_marks: ClassVar[_Marks] = _Marks()
    marks = call_marks
    section: ClassVar[tuple[str, str] | None] = None
    """The marks around all calls, which the model may omit."""
    separator: ClassVar[str] = ""
    """The mark after the name, which the model may omit."""

    def read(self) -> Reading[None]:
        """Read text and calls in turns."""
        incoming, section, call_marks = self.incoming, self.section, self.call_marks
        while mark := (yield from incoming.until((call_marks.start, *(section or ())[:1]), self.show_text)):
            start = incoming.trial()
            is_call = mark == call_marks.start or (yield from incoming.take_spaced(call_marks.start))
            yield from incoming.skip_space()
            name = yield from incoming.take_while(_NAME, _MAX_NAME)
            yield from incoming.skip_space()
            is_call = is_call and name != "" and (yield from self._ends_name(name))
            text = incoming.settle(start)
            if not is_call:
                self.show_text(mark + text)
                continue
            self.start_call(name)
            yield from self._arguments(name)
            if section:
                yield from incoming.take_spaced(section[1])

    def _ends_name(self, name: str) -> Reading[bool]:
        """Return whether the text after a name makes it a call's: a tool's name may be the output's last word."""
        incoming = self.incoming
        if self.separator and (yield from incoming.take(self.separator)):
            return True
        if not (yield from incoming.has(1)):
            return name in self.tools and not self.is_cut
        return (yield from incoming.next_is(self.call_marks.key)) or (yield from incoming.next_is(self.call_marks.end))

    def _arguments(self, name: str) -> Reading[None]:
        """Read keys and values up to the call's end. Other text in between follows the call."""
        incoming, arguments, call_marks = self.incoming, TaggedArguments(self, name), self.call_marks
        stray, ends = list[str](), (None, call_marks.end, call_marks.start)
        while (mark := (yield from incoming.until(call_marks, stray.append))) not in ends:
            key = (yield from incoming.take_while(_KEY, _MAX_NAME)) if mark == call_marks.key else ""
            is_key = bool(key.strip()) and (yield from incoming.take(call_marks.key_end))
            if not (is_key and (yield from incoming.take_spaced(call_marks.value))):
                stray.append(f" {key} ")
                continue
            if (yield from arguments.read(incoming, key.strip(), call_marks.value_end, call_marks.after_value)) is None:
                arguments.close(stray, is_cut=True)
                return
            stray.append(" ")
        if mark == call_marks.start:
            incoming.unread(call_marks.start)
        arguments.close(stray, is_cut=mark is None and self.is_cut)

    @classmethod
    def grammar(cls, tools: Sequence[FunctionTool], *, at_least_one: bool, parallel: bool) -> dict[str, Any]:
        """Return the format of outputs with calls, as `ToolParser.grammar` defines."""
        section, call_marks = cls.section, cls.call_marks

        def before(key: str, _: object) -> str:
            return f"{call_marks.key}{key}{call_marks.key_end}\n{call_marks.value}"

        tags = [
            formats.tag(
                f"{call_marks.start}{tool.name}{cls.separator}\n",
                argument_formats(tool, _WRITTEN_KEY, before, f"{call_marks.value_end}\n"),
                f"{call_marks.end}\n" if section else call_marks.end,
            )
            for tool in tools
        ]
        if section is None:
            return formats.calls(tags, call_marks.start, separator="\n", at_least_one=at_least_one, parallel=parallel)
        ends = (f"{section[0]}\n", section[1])
        return formats.listed_calls(tags, ends, section[0], separator="", at_least_one=at_least_one, parallel=parallel)


class HunyuanV3Parser(Glm45Parser):
    """Reads `<tool_calls><tool_call>NAME<tool_sep>...</tool_call></tool_calls>`, with keys and values as in GLM."""

    section = _SECTION
    separator = "<tool_sep>"
    marks = (_SECTION[0], *_Marks(), separator, _SECTION[1])

    @classmethod
    def with_suffix(cls, suffix: str) -> type[ToolParser]:
        """Return the class that reads `<tool_call:x>` and so on, for the suffix ":x" of a checkpoint's marks."""
        call_marks = _Marks(*(add_suffix(mark, suffix) for mark in cls.call_marks))
        start, separator, end = (add_suffix(mark, suffix) for mark in (_SECTION[0], cls.separator, _SECTION[1]))
        marks = (start, *call_marks, separator, end)
        fields = {"call_marks": call_marks, "section": (start, end), "separator": separator, "marks": marks}
        return type(cls.__name__, (cls,), {"__doc__": cls.__doc__, **fields})
