"""Arguments that models write one by one between tags: strings as they are, other values as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.parsers import formats
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.json_text import as_json
from jaxllm.parsers.marks import held_back
from jaxllm.parsers.tool_parser import ToolParser

_TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_PLAIN = {"type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions"}
"""What the schema of arguments may say for a grammar to take them one by one."""
_TOLD = {"type", "title", "description", "default", "examples"}
"""What the schema of a string may say besides, unless it lists the strings."""


class TaggedArguments:
    """The arguments of one call, which a parser shows as JSON, each once it is whole."""

    def __init__(self, parser: ToolParser, name: str) -> None:
        """Read values as the schema of the tool of this name types them."""
        tool = parser.tools.get(name)
        self._parser = parser
        properties = {} if tool is None else tool.schema.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._before = "{"

    def add(self, key: str, value: str) -> None:
        """Show an argument."""
        read = _typed(value, self._properties.get(key))
        self._parser.show_arguments(f"{self._before}{as_json(key)}: {as_json(read)}")
        self._before = ", "

    def cut(self, key: str, value: str, mark: str) -> None:
        """Show an argument within which the output ended, be it within the `mark` after it."""
        value = value[: len(value) - held_back(value, (mark,))]
        is_text = _types(self._properties.get(key)) == {"string"}
        self._parser.show_arguments(f"{self._before}{as_json(key)}: {as_json(value)[:-1] if is_text else value}")

    def close(self) -> None:
        """Show the end of the arguments."""
        self._parser.show_arguments("{}" if self._before == "{" else "}")


def _typed(text: str, schema: Any) -> Any:
    """Return the value that a text stands for: of a type that the schema allows, else the text itself."""
    types = _types(schema)
    if types == {"string"}:
        return text
    try:
        value = json.loads(text)
        as_json(value)  # no number that JSON lacks
    except (ValueError, RecursionError):
        lowered = text.strip().lower()
        if lowered in ("true", "false") and (not types or "boolean" in types):
            return lowered == "true"
        return None if lowered in ("none", "null") and (not types or "null" in types) else text
    found = _TYPES[type(value)]
    fits = not types or found in types or (found == "integer" and "number" in types)
    return value if fits else text


def _types(schema: Any) -> set[str]:
    """Return JSON's types of values that a schema allows; nothing if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else set()
    for name in ("anyOf", "oneOf"):
        choices = schema.get(name)
        types |= {each for choice in (choices if isinstance(choices, list) else ()) for each in _types(choice)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not types and isinstance(values, list):
        types = {_TYPES.get(type(value), "object") for value in values}
    return types & set(_TYPES.values())


def argument_formats(
    tool: FunctionTool, keys: re.Pattern[str], begin: Callable[[str], str], end: str, *, is_json: bool = False
) -> dict[str, Any]:
    """Return the format of a tool's arguments in the order of its schema, each after `begin(key)` and before `end`.

    Strings are as they are unless `is_json`. Raises VLLMValidationError for a schema that this form of arguments cannot
    keep to, and for keys beside those that `keys` matches, which could not be read.
    """
    schema = tool.schema
    if unknown := schema.keys() - _PLAIN:
        raise _refusal(tool, f"{sorted(unknown)[0]!r} at its top")
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    required = schema.get("required") or ()
    elements = []
    for key, value in (schema.get("properties") or {}).items():
        if not keys.fullmatch(key):
            raise _refusal(tool, f"the key {key!r}")
        whole = {**definitions, **value} if isinstance(value, dict) else value
        form = formats.json_schema(whole) if is_json else _value_format(tool, key, whole)
        element = formats.tag(begin(key), form, end)
        elements.append(element if key in required else formats.optional(element))
    return formats.sequence(*elements) if elements else formats.text("")


def _value_format(tool: FunctionTool, key: str, schema: Any) -> dict[str, Any]:
    types = _types(schema)
    if "string" not in types:
        return formats.json_schema(schema)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return formats.either(*(formats.text(each if isinstance(each, str) else as_json(each)) for each in values))
    if types == {"string"} and not schema.keys() - _TOLD - {"$defs", "definitions"}:
        return formats.any_text()
    raise _refusal(tool, f"a string with more than a type and a description ({key!r})")


def _refusal(tool: FunctionTool, what: str) -> VLLMValidationError:
    message = (
        f"tools: the model writes arguments between tags, where the schema of {tool.name!r} cannot be enforced: it has "
        f"{what}. Simplify it, or leave strict and a required tool_choice out."
    )
    return VLLMValidationError(message, parameter="tools", value=tool.name)
