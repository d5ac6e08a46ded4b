"""Mistral: calls follow [TOOL_CALLS], as a JSON list in older models, each by itself in newer ones."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any

from jaxllm.parsers import formats
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Reading
from jaxllm.parsers.json_calls import read_call, read_calls
from jaxllm.parsers.tool_parser import Attempt, ToolParser

START, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.:/-]+")
_MAX_NAME = 256
_LIST = "[{"
"""The beginnings of a list that does not directly follow the mark."""


class MistralParser(ToolParser):
    """Reads `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]` and `[TOOL_CALLS]name[ARGS]{...}`.

    A mark that is doubled counts once, the list may be a single object, and `[ARGS]` may be left out or be another
    `[TOOL_CALLS]`. A tool's name may stand alone, or before the mark.
    """

    marks = (START, ID, ARGUMENTS)
    drops_text_after_calls = True

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call with an id of nine letters and digits: the chat templates refuse any other."""
        super().start_call(name, call_id or uuid.uuid4().hex[:9])

    def read(self) -> Reading[None]:
        """Read text and calls in turns."""
        incoming = self.incoming
        names = {name + START: name for name in self.tools}
        marks = (START, *names)
        after_failure = (*marks, _LIST)
        has_failed = False
        while mark := (yield from incoming.until(after_failure if has_failed else marks, self.show_text)):
            attempt = self.attempt(mark)
            if mark == _LIST:
                incoming.unread("{")
                is_call = yield from self._listed(attempt)
            elif mark == START:
                is_call = yield from self._marked(attempt)
            else:
                is_call = yield from self._before_mark(attempt, names[mark])
            has_failed = not is_call

    def _marked(self, attempt: Attempt) -> Reading[bool]:
        """Read the text after the mark, and conclude the attempt; return whether there is a call."""
        incoming = self.incoming
        while (yield from incoming.take_spaced(START)):
            pass
        yield from incoming.skip_space()
        if (yield from incoming.take("[")):
            return (yield from self._listed(attempt))
        if (yield from incoming.next_is("{")):
            return (yield from self._object(attempt))
        return (yield from self._named(attempt))

    def _before_mark(self, attempt: Attempt, name: str) -> Reading[bool]:
        """Read a call with its name before the mark, or unread the mark; return whether there is a call."""
        incoming = self.incoming
        yield from incoming.skip_space()
        start = incoming.trial()
        is_object = yield from incoming.take("{")
        yield from incoming.skip_space()
        is_call = is_object and not (yield from incoming.next_is('"name"'))
        incoming.rewind(start)
        if not is_call:
            self.give_up(attempt)
            yield from incoming.take(name)
            self.show_text(name)
            return False
        self.start_call(name)
        if not (yield from incoming.json_value(self.show_arguments)):
            yield from self.malformed_arguments((START,))
        return self.conclude(attempt, is_call=True)

    def _listed(self, attempt: Attempt) -> Reading[bool]:
        """Read the calls of a list up to its closing bracket; return whether it begins with a call."""
        return (yield from read_calls(self, attempt, default="{}", ends=(START,)))

    def _object(self, attempt: Attempt) -> Reading[bool]:
        """Read a call that is an object, and conclude the attempt."""
        return (yield from read_call(self, attempt, default="{}", ends=(START,)))

    def _named(self, attempt: Attempt) -> Reading[bool]:
        """Read a call with its name before its arguments, and conclude the attempt."""
        incoming = self.incoming
        name = yield from incoming.take_while(_NAME, _MAX_NAME)
        call_id = None
        if name and (yield from incoming.take(ID)):
            call_id = yield from incoming.take_while(_NAME, _MAX_NAME)
        is_marked = name != "" and (yield from incoming.take(ARGUMENTS))
        again = incoming.trial()
        if not is_marked:
            yield from incoming.take(START)
        yield from incoming.skip_space()
        is_call, is_alone = name != "" and (yield from incoming.next_is("{")), False
        if is_call:
            incoming.settle(again)
        else:
            incoming.rewind(again)
            yield from incoming.skip_space()
            is_alone = not (yield from incoming.has(1)) or (yield from incoming.next_is(START))
            is_call = is_marked or (is_alone and name in self.tools)
        if is_call:
            self.start_call(name, call_id)
            if is_alone:
                self.show_arguments("{}")
            elif not (yield from incoming.json_value(self.show_arguments)):
                yield from self.malformed_arguments((START,))
        return self.conclude(attempt, is_call=is_call)

    @classmethod
    def grammar(cls, tools: Sequence[FunctionTool], *, at_least_one: bool, parallel: bool) -> dict[str, Any]:
        """Return the newer format of outputs with calls, as `ToolParser.grammar` defines."""
        tags = [formats.tag(f"{START}{tool.name}{ARGUMENTS}", formats.json_schema(tool.schema), "") for tool in tools]
        return formats.calls(tags, START, separator="", at_least_one=at_least_one, parallel=parallel)
