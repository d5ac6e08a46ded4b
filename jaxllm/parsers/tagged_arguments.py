"""Read arguments written one by one between tags: strings verbatim, other values as JSON."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.parsers import formats
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Incoming, Reading
from jaxllm.parsers.json_text import as_json
from jaxllm.parsers.tool_parser import ToolParser
from jaxllm.parsers.value_types import TYPES, allowed_types, resolved

_PLAIN = {"type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions"}
"""The keywords that a schema of arguments may have, for a grammar of separate arguments."""
_TOLD = {"type", "title", "description", "default", "examples"}
"""The other keywords that a string's schema may have, unless it lists the strings."""


class TaggedArguments:
    """The arguments of one call, shown as JSON by a parser: strings as they come, others once whole."""

    def __init__(self, parser: ToolParser, name: str, *, on_lines: bool = False) -> None:
        """Read values with the types of this tool's schema; `on_lines` values have their own lines."""
        tool = parser.tools.get(name)
        self._parser, self._on_lines = parser, on_lines
        self._schema = {} if tool is None else tool.schema
        properties = self._schema.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._before = "{"

    def read(
        self,
        incoming: Incoming,
        key: str,
        end: str,
        others: Iterable[str],
        *,
        following: str = "",
        is_text: bool | None = None,
    ) -> Reading[str | None]:
        """Read and show a value up to its `end`, and return the mark that ended it; None if the output ended before.

        Models may omit the end, so one of the `others` that may follow a value ends it too, and stays unread. It is
        part of the value if `end` is the next mark after it, unless it is the mark of a `following` argument.
        The value is a string if it `is_text`, and JSON if it is not and the tool's schema does not tell.
        """
        value, marks = self._begin(key, is_text=is_text), (end, *others)
        mark = yield from incoming.until(marks, value.add, leaves_part=True)
        if mark is None:
            incoming.rest()
        elif mark != end:
            start, later = incoming.trial() - len(mark), list[str]()
            if (yield from incoming.until(marks, later.append)) == end and mark != following:
                incoming.settle(start)
                value.add("".join((mark, *later)))
                mark = end
            else:
                incoming.rewind(start)
        value.end(is_cut=mark is None, on_line=self._on_lines or mark != end)
        return mark

    def close(self, stray: Iterable[str], *, is_cut: bool) -> None:
        """Show the end of the arguments, unless the output `is_cut` before it, and a line of text between arguments."""
        if not is_cut:
            self._parser.show_arguments("{}" if self._before == "{" else "}")
        if text := " ".join("".join(stray).split()):
            self._parser.show_text(f"{text}\n")

    def _begin(self, key: str, *, is_text: bool | None) -> _Value:
        """Show the key of an argument, which is a string unless the tool's schema or `is_text` tells otherwise."""
        unknown = {*TYPES.values()} if is_text is False else {"string"}
        types = {"string"} if is_text else allowed_types(self._properties.get(key), self._schema) or unknown
        self._parser.show_arguments(f"{self._before}{as_json(key)}: ")
        self._before = ", "
        return _Value(self._parser.show_arguments, types, on_line=self._on_lines)


class _Value:
    """The value of an argument, as it comes."""

    def __init__(self, show: Callable[[str], None], types: Set[str], *, on_line: bool) -> None:
        self._show, self._types, self._starts_line = show, types, on_line
        self._is_text = types == {"string"}
        self._parts = list[str]()
        """The text not shown yet: for a string at most the end of the last line."""
        if self._is_text:
            show('"')

    def add(self, text: str) -> None:
        """Add text to the value."""
        if text and self._starts_line:
            text, self._starts_line = text.removeprefix("\n"), False
        if not self._is_text:
            self._parts.append(text)
        elif text:
            text = "".join((*self._parts, text))
            self._parts = ["\n"] if text.endswith("\n") else []
            self._show(as_json(text.removesuffix("\n"))[1:-1])

    def end(self, *, is_cut: bool, on_line: bool) -> None:
        """Show the rest, without the end of the line if the value is `on_line`."""
        text = "".join(self._parts)
        text = text.removesuffix("\n") if on_line else text
        if self._is_text:
            self._show(as_json(text)[1:-1] + ("" if is_cut else '"'))
        elif is_cut:
            self._show(as_json(text)[:-1] if "string" in self._types else text)
        else:
            self._show(as_json(_typed(text, self._types)))


def _typed(text: str, types: Set[str]) -> Any:
    """Return the value of a text: of one of the types, else its JSON value, else the text itself."""
    if types == {"string"}:
        return text
    lowered = text.strip().lower()
    if "null" in types and (lowered == "null" or (lowered == "none" and "string" not in types)):
        return None
    if "boolean" in types and lowered in ("true", "false"):
        return lowered == "true"
    try:
        value = json.loads(text)
        as_json(value)  # neither NaN nor infinity
    except (ValueError, RecursionError):
        return text if "string" in types else _number(text, types)
    is_text = "string" in types and (isinstance(value, str) or TYPES[type(value)] not in types)
    return text if is_text else value


def _number(text: str, types: Set[str]) -> int | float | str:
    """Return the number in a text, also in forms that JSON lacks: `007`, `+3`, `.5`."""
    for name, read in (("integer", int), ("number", float)):
        with contextlib.suppress(ValueError, OverflowError):
            if name in types and math.isfinite(number := read(text)):
                return number
    return text


def argument_formats(
    tool: FunctionTool, keys: re.Pattern[str], begin: Callable[[str, bool], str], end: str = "", separator: str = ""
) -> dict[str, Any]:
    """Return the format of a tool's arguments in the order of its schema, each before `end`.

    Before a value is what `begin` returns for its key and whether it is a string. Strings are verbatim, but
    with a `separator` between arguments all values are JSON. A schema without properties takes any text. Raises
    VLLMValidationError for a schema that this form cannot express, and for keys that do not match `keys`, which could
    not be read.
    """
    schema = tool.schema
    if unknown := schema.keys() - _PLAIN:
        raise _refusal(tool, f"{sorted(unknown)[0]!r} at its top")
    if "properties" not in schema and schema.get("additionalProperties") is not False:
        return formats.any_text()
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    required = schema.get("required") or ()
    parts = []
    for key, value in (schema.get("properties") or {}).items():
        if not keys.fullmatch(key):
            raise _refusal(tool, f"the key {key!r}")
        value = resolved(value, schema)
        whole = {**definitions, **value} if isinstance(value, dict) else value
        forms = [(False, formats.json_schema(whole))] if separator else _value_formats(tool, key, whole)
        if begin(key, True) == begin(key, False):
            free = [form for _, form in forms if form == formats.any_text()]  # null is text too
            forms = [(True, formats.either(*(free or [form for _, form in forms])))]
        tags = (formats.tag(begin(key, is_text), form, end) for is_text, form in forms)
        parts.append((formats.either(*tags), key in required))
    if separator:
        return formats.members(parts, separator)
    return formats.sequence(*(form if is_required else formats.optional(form) for form, is_required in parts))


def _value_formats(tool: FunctionTool, key: str, schema: Any) -> list[tuple[bool, dict[str, Any]]]:
    """Return the formats of an argument's values, each with whether the values are strings."""
    types = allowed_types(schema, schema) or {"string"}
    if "string" not in types or not isinstance(schema, dict):
        return [(False, formats.json_schema(schema))]
    values = _listed(schema, schema)
    if values is not None:
        texts = [formats.text(each) for each in values if isinstance(each, str)]
        others = [formats.text(as_json(each)) for each in values if not isinstance(each, str)]
        return [(kind, formats.either(*forms)) for kind, forms in ((True, texts), (False, others)) if forms]
    if types <= {"string", "null"} and _is_any_text(schema, schema):
        null = [(False, formats.text("null"))] if "null" in types else []
        return [(True, formats.any_text()), *null]
    raise _refusal(tool, f"a string with more than a type and a description ({key!r})")


def _listed(schema: Any, root: dict[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists, directly or in each branch of `anyOf`; None if it does not."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema or "enum" in schema:
        return schema.get("enum", [schema.get("const")])
    if schema.get("type") == "null":
        return [None]
    if not schema.get("anyOf") or schema.keys() - _TOLD - {"$defs", "definitions", "anyOf"}:
        return None
    branches = [_listed(resolved(branch, root), root) for branch in schema["anyOf"]]
    return None if None in branches else [value for branch in branches for value in branch or ()]


def _is_any_text(schema: Any, root: dict[str, Any]) -> bool:
    """Return whether a schema of a string or null has no other keywords."""
    if not isinstance(schema, dict) or schema.keys() - _TOLD - {"$defs", "definitions", "anyOf"}:
        return False
    return all(_is_any_text(resolved(branch, root), root) for branch in schema.get("anyOf", ()))


def _refusal(tool: FunctionTool, what: str) -> VLLMValidationError:
    message = (
        f"tools: the model writes arguments between tags, where the schema of {tool.name!r} cannot be enforced: it has "
        f"{what}. Simplify it, or leave strict and a required tool_choice out."
    )
    return VLLMValidationError(message, parameter="tools", value=tool.name)
