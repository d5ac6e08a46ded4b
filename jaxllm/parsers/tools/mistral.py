"""Mistral: calls follow [TOOL_CALLS], as a JSON list in older models, each by itself in newer ones."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any

from jaxllm.parsers import formats
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Reading
from jaxllm.parsers.json_calls import read_call
from jaxllm.parsers.tool_parser import ToolParser

START, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.:/-]+")
_MAX_NAME = 256


class MistralParser(ToolParser):
    """This reads `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]` and `[TOOL_CALLS]name[ARGS]{...}`."""

    marks = (START, ID, ARGUMENTS)

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call with an id of nine letters and digits: the chat templates refuse any other."""
        super().start_call(name, call_id or uuid.uuid4().hex[:9])

    def read(self) -> Reading[None]:
        """Read text and calls in turns."""
        incoming = self.incoming
        while (yield from incoming.until((START,), self.show_text)):
            start = incoming.trial()
            is_list = yield from incoming.take_spaced("[")
            opened = incoming.settle(start)
            if not is_list:
                yield from self._named()
            elif (yield from self._listed(START + opened)):
                yield from incoming.take_spaced("]")

    def _listed(self, after: str) -> Reading[bool]:
        """Read the calls of a list, which begins `after` a text, up to what closes it."""
        while (yield from read_call(self, after=after)):
            after = ","
            if not (yield from self.incoming.take_spaced(after)):
                return True
        return False

    def _named(self) -> Reading[None]:
        """Read a call whose name stands before its arguments."""
        incoming = self.incoming
        start = incoming.trial()
        yield from incoming.skip_space()
        name = yield from incoming.take_while(_NAME, _MAX_NAME)
        call_id = None
        if (yield from incoming.take(ID)):
            call_id = yield from incoming.take_while(_NAME, _MAX_NAME)
        yield from incoming.take(ARGUMENTS)
        yield from incoming.skip_space()
        is_call = bool(name) and (yield from incoming.next_is("{"))
        text = incoming.settle(start)
        if not is_call:
            self.show_text(START + text)
            return
        self.start_call(name, call_id)
        yield from incoming.json_value(self.show_arguments)

    @classmethod
    def grammar(cls, tools: Sequence[FunctionTool], *, at_least_one: bool, parallel: bool) -> dict[str, Any]:
        """Return the format of outputs with calls, as `ToolParser.grammar` says: the newer one."""
        tags = [formats.tag(f"{START}{tool.name}{ARGUMENTS}", formats.json_schema(tool.schema), "") for tool in tools]
        return formats.calls(tags, START, separator="", at_least_one=at_least_one, parallel=parallel)
