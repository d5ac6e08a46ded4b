"""Llama 4, Llama 3.2 and others: a list of Python calls with keyword arguments, which is the whole answer."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Sequence
from typing import Any

from jaxllm.parsers import formats
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Reading
from jaxllm.parsers.json_text import as_json
from jaxllm.parsers.tagged_arguments import argument_formats
from jaxllm.parsers.tool_parser import ToolParser

START, END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[^\s()=,'\"]+")
_MAX_NAME = 256
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_MAX_DEPTH = 50
_OTHER = re.compile(r"[^\[\](){}'\",]+")
_QUOTED = {quote: re.compile(rf"[^\\{quote}\n]+") for quote in "'\""}
_MAX_LITERAL = 2**20
_ANY = re.compile(r"[\s\S]")
_OTHER_TEXT = r"\s*([^\s\[<][\s\S]*)?"


class PythonicParser(ToolParser):
    """This reads `[name(key=value, ...), ...]` at the beginning of an answer, where the names are the request's tools.

    Values are literals; nothing is evaluated.
    """

    marks = (START, END)

    def read(self) -> Reading[None]:
        """Read a list of calls, if there is one."""
        incoming = self.incoming
        start = incoming.trial()
        yield from incoming.skip_space()
        yield from incoming.take(START)
        name = None
        if (yield from incoming.take_spaced("[")):
            yield from incoming.skip_space()
            name = yield from self._name()
        text = incoming.settle(start)
        if name is None:
            self.show_text(text)
            return
        while name is not None:
            self.start_call(name)
            if not (yield from self._arguments()):
                return
            if not (yield from incoming.take_spaced(",")):
                yield from incoming.take_spaced("]")
                yield from incoming.take_spaced(END)
                return
            start = incoming.trial()
            yield from incoming.skip_space()
            name = yield from self._name()
            text = incoming.settle(start)
        self.show_text(f",{text}")

    def _name(self) -> Reading[str | None]:
        """Read the name of a tool, and the bracket that opens its arguments; None if there are none."""
        name = yield from self.incoming.take_while(_NAME, _MAX_NAME)
        if name in self.tools and (yield from self.incoming.take("(")):
            return name
        return None

    def _arguments(self) -> Reading[bool]:
        """Read the arguments up to the bracket that closes them; False where they are malformed."""
        incoming, before = self.incoming, "{"
        while not (yield from incoming.take_spaced(")")):
            start = incoming.trial()
            yield from incoming.skip_space()
            key = yield from incoming.take_while(_NAME, _MAX_NAME)
            value = None
            if key and (yield from incoming.take_spaced("=")):
                value = yield from self._literal()
            text = incoming.settle(start)
            if value is None:
                if not incoming.is_ended:
                    self.show_arguments("{}" if before == "{" else "}")
                self.show_text(text)
                return False
            self.show_arguments(f"{before}{as_json(key)}: {value}")
            before = ", "
            yield from incoming.take_spaced(",")
        self.show_arguments("{}" if before == "{" else "}")
        return True

    def _literal(self) -> Reading[str | None]:
        """Read a literal and return it as JSON; None if it is none."""
        incoming, closers = self.incoming, list[str]()
        start = incoming.trial()
        size = 0
        while size < _MAX_LITERAL and (yield from incoming.has(1)):
            if not closers and ((yield from incoming.next_is(",")) or (yield from incoming.next_is(")"))):
                break
            if not (yield from self._part(closers)):
                break
            size += 1
        text = incoming.settle(start)
        return None if closers else _as_json(text.strip())

    def _part(self, closers: list[str]) -> Reading[bool]:
        """Read a string, a bracket, or what stands between those; False where none of them can come."""
        incoming = self.incoming
        if (yield from incoming.take_while(_OTHER, _MAX_LITERAL)):
            return True
        quote = yield from incoming.take_any(tuple(_QUOTED))
        if quote is not None:
            while True:
                yield from incoming.take_while(_QUOTED[quote], _MAX_LITERAL)
                if (yield from incoming.take(quote)):
                    return True
                if not ((yield from incoming.take("\\")) and (yield from incoming.has(1))):
                    return False
                yield from incoming.take_while(_ANY, 1)
        if closers and (yield from incoming.take(closers[-1])):
            closers.pop()
            return True
        opened = yield from incoming.take_any(tuple(_BRACKETS))
        if opened is not None and len(closers) < _MAX_DEPTH:
            closers.append(_BRACKETS[opened])
            return True
        return bool(closers) and (yield from incoming.take(","))

    @classmethod
    def grammar(cls, tools: Sequence[FunctionTool], *, at_least_one: bool, parallel: bool) -> dict[str, Any]:
        """Return the format of outputs with calls, as `ToolParser.grammar` says: values are written as in JSON."""
        tags = [
            formats.tag(f"{tool.name}(", argument_formats(tool, _NAME, lambda key: f"{key}=", ", ", is_json=True), ")")
            for tool in tools
        ]
        calls = formats.calls(tags, "[", separator=", ", at_least_one=True, parallel=parallel)
        listed = formats.tag("[", calls, "]")
        return listed if at_least_one else formats.either(listed, formats.regex(_OTHER_TEXT))


def _as_json(literal: str) -> str | None:
    """Return a literal of Python or JSON as JSON; None if it is none, or has no equal there."""
    if len(literal) > _MAX_LITERAL:
        return None
    try:
        return as_json(json.loads(literal))
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes that Python does not know stay as they are
            return as_json(ast.literal_eval(literal))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
