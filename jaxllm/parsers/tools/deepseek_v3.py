"""DeepSeek V3, R1 and V3.1: calls between tokens that are written with full-width bars."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jaxllm.parsers import formats
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Reading
from jaxllm.parsers.tool_parser import Attempt, ToolParser

START, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_NAME = re.compile(r"[^<>\s{}`\"]+")
_MAX_NAME = 256


class DeepSeekV3Parser(ToolParser):
    """Reads `function<｜tool▁sep｜>NAME` with the arguments in a block of code, and the form of V3.1."""

    marks = (START, END, CALL, SEPARATOR, CALL_END)
    drops_text_after_calls = True

    def read(self) -> Reading[None]:
        """Read text and calls in turns."""
        incoming = self.incoming
        while mark := (yield from incoming.until((START, CALL), self.show_text)):
            attempt = self.attempt(mark)
            if mark == START and not (yield from incoming.take_spaced(CALL)):
                self.conclude(attempt, is_call=False)
                continue
            is_whole = yield from self._call(attempt)
            while is_whole and not (yield from incoming.take_spaced(END)):
                attempt = self.attempt()
                if not (yield from incoming.take_spaced(CALL)):
                    self.give_up(attempt)
                    break
                is_whole = yield from self._call(attempt)

    def _call(self, attempt: Attempt) -> Reading[bool]:
        """Read a call and conclude the attempt; return whether it is well formed."""
        incoming = self.incoming
        name = yield from incoming.take_while(_NAME, _MAX_NAME)
        is_call = name != "" and (yield from incoming.take(SEPARATOR))
        is_block = is_call and not (yield from incoming.next_is("{"))
        if is_block:
            name = yield from incoming.take_while(_NAME, _MAX_NAME)
            is_call = yield from incoming.take_spaced("```json")
            yield from incoming.skip_space()
        is_whole = False
        if is_call and name != "" and (yield from incoming.next_is("{")):
            self.start_call(name)
            is_whole = (yield from incoming.json_value(self.show_arguments)) or (
                yield from self.malformed_arguments((CALL_END,), "```" if is_block else "")
            )
            if is_block:
                yield from incoming.take_spaced("```")
        self.conclude(attempt, is_call=is_whole)
        return is_whole and (yield from incoming.take_spaced(CALL_END))

    @classmethod
    def grammar(cls, tools: Sequence[FunctionTool], *, at_least_one: bool, parallel: bool) -> dict[str, Any]:
        """Return the format of outputs with calls, as `ToolParser.grammar` defines."""
        calls = formats.calls(
            [
                formats.tag(cls._head(tool.name), formats.json_schema(tool.schema), cls._tail() + CALL_END)
                for tool in tools
            ],
            CALL,
            separator="\n" if cls._tail() else "",
            at_least_one=True,
            parallel=parallel,
        )
        listed = formats.tag(START, calls, END)
        if at_least_one:
            return listed
        return formats.calls([listed], START, separator="", at_least_one=False, parallel=False)

    @classmethod
    def _head(cls, name: str) -> str:
        return f"{CALL}function{SEPARATOR}{name}\n```json\n"

    @classmethod
    def _tail(cls) -> str:
        return "\n```"


class DeepSeekV31Parser(DeepSeekV3Parser):
    """Reads `NAME<｜tool▁sep｜>` with plain arguments, and the form of V3."""

    @classmethod
    def _head(cls, name: str) -> str:
        return f"{CALL}{name}{SEPARATOR}"

    @classmethod
    def _tail(cls) -> str:
        return ""
