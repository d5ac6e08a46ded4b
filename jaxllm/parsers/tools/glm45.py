"""GLM 4.5 to 4.7, Hunyuan 3: the function's name, then keys and values in tags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from jaxllm.parsers import formats
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Reading
from jaxllm.parsers.tagged_arguments import TaggedArguments, argument_formats
from jaxllm.parsers.tool_parser import ToolParser

START, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_OWN = (START, END, KEY, KEY_END, VALUE, VALUE_END)
_AFTER_VALUE = (KEY, VALUE, END)
"""The marks that may follow a value whose end is missing. Within a call the mark of a call is text."""
_NAME = re.compile(r"[^<>\s{}\"]+")
_KEY = re.compile(r"[^<>\n]+")
_WRITTEN_KEY = re.compile(r"[^<>\s]([^<>\n]*[^<>\s])?")
_MAX_NAME = 256


class Glm45Parser(ToolParser):
    """Reads `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

    marks = _OWN
    section: ClassVar[tuple[str, str] | None] = None
    """The marks around all calls, which the model may omit."""
    separator: ClassVar[str] = ""
    """The mark after the name, which the model may omit."""

    def read(self) -> Reading[None]:
        """Read text and calls in turns."""
        incoming, section = self.incoming, self.section
        while mark := (yield from incoming.until((START, *(section or ())[:1]), self.show_text)):
            start = incoming.trial()
            is_call = mark == START or (yield from incoming.take_spaced(START))
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
        return (yield from incoming.next_is(KEY)) or (yield from incoming.next_is(END))

    def _arguments(self, name: str) -> Reading[None]:
        """Read keys and values up to the call's end. Other text in between follows the call."""
        incoming, arguments, stray = self.incoming, TaggedArguments(self, name), list[str]()
        while (mark := (yield from incoming.until(_OWN, stray.append))) not in (None, END, START):
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
        section = cls.section
        tags = [
            formats.tag(
                f"{START}{tool.name}{cls.separator}\n",
                argument_formats(tool, _WRITTEN_KEY, lambda key, _: f"{KEY}{key}{KEY_END}\n{VALUE}", f"{VALUE_END}\n"),
                f"{END}\n" if section else END,
            )
            for tool in tools
        ]
        if section is None:
            return formats.calls(tags, START, separator="\n", at_least_one=at_least_one, parallel=parallel)
        ends = (f"{section[0]}\n", section[1])
        return formats.listed_calls(tags, ends, section[0], separator="", at_least_one=at_least_one, parallel=parallel)


class HunyuanV3Parser(Glm45Parser):
    """Reads `<tool_calls><tool_call>NAME<tool_sep>...</tool_call></tool_calls>`, with keys and values as in GLM."""

    section = ("<tool_calls>", "</tool_calls>")
    separator = "<tool_sep>"
    marks = (section[0], *_OWN, separator, section[1])
