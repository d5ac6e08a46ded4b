"""Llama 4, Llama 3.2, LFM2, Olmo 3 and others: Python calls with keyword arguments."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

from jaxllm.parsers import formats
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Reading
from jaxllm.parsers.json_calls import read_calls
from jaxllm.parsers.json_text import as_json
from jaxllm.parsers.tagged_arguments import argument_formats
from jaxllm.parsers.tool_parser import Attempt, ToolParser

_NAME = re.compile(r"[^\s()=,'\"]+")
_MAX_NAME = 256
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_MAX_DEPTH = 50
_OTHER = re.compile(r"[^\[\](){}'\",]+")
_QUOTED = {
    **{quote * 3: re.compile(rf"[^\\{quote}]+") for quote in "'\""},
    **{quote: re.compile(rf"[^\\{quote}\n]+") for quote in "'\""},
}
"""The contents of a string with these quotes, without escapes and inner quotes."""
_MAX_LITERAL = 2**20
_CUT_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?\Z")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ANY = re.compile(r"[\s\S]")
_OTHER_TEXT = r"\s*([^\s\[<][\s\S]*)?"


class PythonicParser(ToolParser):
    """Reads `[name(key=value, ...), ...]` at the beginning of an answer, with names of the request's tools.

    Values are literals; nothing is evaluated.
    """

    marks = ("<|python_start|>", "<|python_end|>")
    needs_mark: ClassVar[bool] = False
    """Whether calls are anywhere in an answer after the first mark, with any names, and up to the second one."""
    brackets: ClassVar[tuple[str, str]] = ("[", "]")
    """What is around the calls."""
    separator: ClassVar[str] = ", "
    """What is between calls. Outputs may lack it if it is white space."""

    def __init__(self, tools: Sequence[FunctionTool] = ()) -> None:
        """Read calls of these tools, and of others after a mark."""
        super().__init__(tools)
        self._is_lost = False
        """Whether an entry is not a call, so that its end is unknown and no call is read after it."""

    def read(self) -> Reading[None]:
        """Read text and calls in turns, or the calls that an answer begins with."""
        incoming, start = self.incoming, self.marks[0]
        if not self.needs_mark:
            attempt = self.attempt()
            yield from incoming.skip_space()
            yield from incoming.take(start)
            yield from self._calls(attempt)
        while self.needs_mark and (yield from incoming.until((start,), self.show_text)):
            self._is_lost = False
            yield from self._calls(self.attempt(start))

    def _calls(self, attempt: Attempt) -> Reading[None]:
        """Read calls, if there are any. After a malformed call, continue with the next one."""
        incoming, (opened, closed) = self.incoming, map(str.strip, self.brackets)
        name = (yield from self._name()) if (yield from incoming.take_spaced(opened)) else None
        goes_on, is_call = name is not None, False
        while goes_on:
            is_call = name is not None and (yield from self._arguments(name))
            if name is None:
                self._is_lost = not (yield from incoming.take("("))
                yield from self._rest_of_call()
            self.conclude(attempt, is_call=is_call)
            attempt = self.attempt()
            goes_on = not self._is_lost and (yield from self._goes_on())
            name = (yield from self._name()) if goes_on else None
        if not is_call:
            self.conclude(attempt, is_call=False)
            return
        self.give_up(attempt)
        yield from incoming.take_spaced(closed)
        yield from incoming.take_spaced(self.marks[1])

    def _goes_on(self) -> Reading[bool]:
        """Read what is between two calls; return whether another one follows."""
        if (yield from self.incoming.take_spaced(",")):
            return True
        if not self.separator.isspace():
            return False
        yield from self.incoming.skip_space()
        return (yield from self.incoming.has(1)) and not (yield from self.incoming.next_is(self.marks[1]))

    def _name(self) -> Reading[str | None]:
        """Read the name of a function, and the bracket that opens its arguments; None if there are none."""
        yield from self.incoming.skip_space()
        name = yield from self.incoming.take_while(_NAME, _MAX_NAME)
        if name and (self.needs_mark or name in self.tools) and (yield from self.incoming.take("(")):
            return name
        return None

    def _arguments(self, name: str) -> Reading[bool]:
        """Read the arguments up to their closing bracket; False if they are malformed or cut short.

        The call begins with the first argument.
        """
        incoming, before = self.incoming, "{"
        while not (yield from incoming.take_spaced(")")):
            start = incoming.trial()
            yield from incoming.skip_space()
            key, literal = (yield from incoming.take_while(_NAME, _MAX_NAME)), None
            if key and (yield from incoming.take_spaced("=")):
                literal = yield from self._literal()
            value = _as_json(literal or "")
            is_malformed = value is None and ((yield from incoming.has(1)) or (before == "{" and not literal))
            if is_malformed and not self._is_lost:
                yield from self._rest_of_call()
            text = incoming.settle(start)
            if is_malformed:
                if before != "{" and self.keeps_parts:
                    self.show_text(text)
                return False
            if before == "{":
                self.start_call(name)
            if value is None:
                self.show_arguments(before + _cut_short(key, literal) if key else "")
                return False
            self.show_arguments(f"{before}{as_json(key)}: {value}")
            before = ", "
            yield from incoming.take_spaced(",")
        if before == "{":
            self.start_call(name)
        self.show_arguments("{}" if before == "{" else "}")
        return True

    def _rest_of_call(self) -> Reading[None]:
        """Read the rest of a malformed call, up to the closing bracket of its arguments."""
        closers = [")"]
        while closers and not self._is_lost:
            self._is_lost = not (yield from self._part(closers))

    def _literal(self) -> Reading[str]:
        """Read a possible literal up to the comma or bracket after it, including invalid characters."""
        incoming, closers = self.incoming, list[str]()
        start = incoming.trial()
        size = 0
        while size < _MAX_LITERAL and (yield from incoming.has(1)):
            if not closers and ((yield from incoming.next_is(",")) or (yield from incoming.next_is(")"))):
                break
            if not (yield from self._part(closers)):
                yield from incoming.take_while(_ANY, 1)
                self._is_lost = True
                break
            size += 1
        return incoming.settle(start).strip()

    def _part(self, closers: list[str]) -> Reading[bool]:
        """Read a string, a bracket, or text between those; False if none is possible."""
        incoming = self.incoming
        if (yield from incoming.take_while(_OTHER, _MAX_LITERAL)):
            return True
        quote = yield from incoming.take_any(tuple(_QUOTED))
        if quote is not None:
            while True:
                yield from incoming.take_while(_QUOTED[quote], _MAX_LITERAL)
                if (yield from incoming.take(quote)):
                    return True
                if len(quote) > 1 and (yield from incoming.take(quote[0])):
                    continue
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
        """Return the format of outputs with calls, as `ToolParser.grammar` defines, with values as in JSON."""
        tags = [
            formats.tag(f"{tool.name}(", argument_formats(tool, _NAME, lambda key, _: f"{key}=", separator=", "), ")")
            for tool in tools
        ]
        opened, closed = cls.brackets
        if cls.needs_mark:
            start, end = cls.marks
            ends = (start + opened, closed + end)
            return formats.listed_calls(
                tags, ends, start, separator=cls.separator, at_least_one=at_least_one, parallel=parallel
            )
        calls = formats.calls(tags, opened, separator=cls.separator, at_least_one=True, parallel=parallel)
        listed = formats.tag(opened, calls, closed)
        return listed if at_least_one else formats.either(listed, formats.regex(_OTHER_TEXT))


class Lfm2Parser(PythonicParser):
    """LFM2: reads `<|tool_call_start|>[name(key=value, ...)]<|tool_call_end|>`, also JSON objects in the list."""

    marks = ("<|tool_call_start|>", "<|tool_call_end|>")
    needs_mark = True

    def _calls(self, attempt: Attempt) -> Reading[None]:
        incoming = self.incoming
        start = incoming.trial()
        is_json = (yield from incoming.take_spaced("[")) and (yield from incoming.next_is("{"))
        if not is_json:
            incoming.rewind(start)
            yield from super()._calls(attempt)
            return
        incoming.settle(start)
        if (yield from read_calls(self, attempt, ends=self.marks[1:])):
            yield from incoming.take_spaced(self.marks[1])


class Olmo3Parser(PythonicParser):
    """Olmo 3: reads `<function_calls>` and calls on lines of their own."""

    marks = ("<function_calls>", "</function_calls>")
    needs_mark = True
    brackets = ("\n", "\n")
    separator = "\n"


def _as_json(literal: str) -> str | None:
    """Return a literal of Python or JSON as JSON; None if it is not one, or has no JSON equivalent."""
    if len(literal) > _MAX_LITERAL:
        return None
    try:
        return as_json(json.loads(literal))
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes unknown to Python are unchanged
            return as_json(_value(ast.parse(literal, mode="eval").body))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _value(node: ast.expr) -> Any:
    """Return the value of a literal, in which JSON's names are allowed. Raises ValueError if it is not one."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str()):
            return node.value
        case ast.Name(id="true" | "false" | "null"):
            return json.loads(node.id)
        case ast.List() | ast.Tuple() | ast.Set():
            return [_value(each) for each in node.elts]
        case ast.Dict():
            keys = [None if key is None else _value(key) for key in node.keys]
            if not all(isinstance(key, str | int | float) for key in keys):
                raise ValueError("an object's keys are texts")
            return dict(zip(keys, map(_value, node.values), strict=True))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as number)):
            return -number if isinstance(sign, ast.USub) else number
        case ast.JoinedStr() if all(isinstance(part, ast.Constant) for part in node.values):
            return "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        case _:
            raise ValueError("no literal")


def _cut_short(key: str, literal: str | None) -> str:
    """Return an argument that was cut short as JSON that is cut short; without a literal if the key is incomplete.

    An incomplete literal is unchanged.
    """
    if literal is None:
        return as_json(key)[:-1]
    words = [same[: len(literal)] for word, same in _WORDS.items() if word.startswith(literal)]
    texts = (literal, _CUT_ESCAPE.sub("", literal))
    values = [_as_json(text + quote) for text in texts for quote in _QUOTED if literal.startswith(quote)]
    shown = next((value[:-1] for value in values if value is not None), (words or [literal])[0])
    return f"{as_json(key)}: {shown}"
