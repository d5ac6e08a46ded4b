"""The grammar of Gemma 4's arguments: a notation like JSON's, with bare keys and a mark around strings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.parsers import formats
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.json_text import as_json
from jaxllm.parsers.value_types import ANNOTATIONS, allowed_types, resolved

QUOTE = '<|"|>'
"""The mark before and after a string."""
_KEY = re.compile(r"[^\s:,<>{}\[\]\"]+")
_FREE_DEPTH = 3
"""The number of levels of lists and objects where a schema does not tell."""
_MOST_SCHEMAS = 500
"""The maximum number of schemas to write: they may refer to themselves."""
_MAX_DEPTH = 20
_OBJECT = {"properties", "required", "additionalProperties"}
_NUMERIC = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_SCALARS = {"integer", "number", "boolean", "null"}
_STRING = formats.tag(QUOTE, formats.any_text(QUOTE), QUOTE)
_SCALAR = formats.json_schema({"type": ["boolean", "null", "number"]})


def arguments_format(tool: FunctionTool) -> dict[str, Any]:
    """Return the format of a tool's arguments. Raises VLLMValidationError for a schema that it cannot express."""
    writer = _Writer(tool)
    return writer.object(tool.schema, 0)


class _Writer:
    """Writes formats of values from their schemas."""

    def __init__(self, tool: FunctionTool) -> None:
        self._tool, self._root = tool, tool.schema
        self._num_schemas = 0
        self._key = ""
        """The last key of an object."""

    def value(self, schema: Any, depth: int) -> dict[str, Any]:
        """Return the format of a value."""
        self._num_schemas += 1
        if self._num_schemas > _MOST_SCHEMAS or depth > _MAX_DEPTH:
            raise self._refusal("too many values, or values that are nested too deep")
        schema = resolved(schema, self._root)
        told = schema.keys() - ANNOTATIONS if isinstance(schema, dict) else set()
        if not told:
            return _free(_FREE_DEPTH)
        if "const" in told or "enum" in told:
            return formats.either(*map(_listed, schema.get("enum", [schema.get("const")])))
        if branches := schema.get("anyOf") or schema.get("oneOf"):
            if told - {"anyOf", "oneOf", "type"}:
                raise self._refusal(f"a choice beside other keywords ({self._key!r})")
            return formats.either(*(self.value(branch, depth + 1) for branch in branches))
        if unknown := told - _OBJECT - _NUMERIC - {"type", "items"}:
            raise self._refusal(f"{min(unknown)!r} ({self._key!r})")
        return formats.either(*self._typed(schema, depth))

    def _typed(self, schema: dict[str, Any], depth: int) -> list[dict[str, Any]]:
        """Return the formats of the values that a schema allows, one for each kind."""
        types, forms = allowed_types(schema, self._root), []
        if scalars := types & _SCALARS or (set() if types else _SCALARS):
            limits = {key: schema[key] for key in schema.keys() & _NUMERIC}
            forms.append(formats.json_schema({"type": sorted(scalars), **limits}))
        if not types or "string" in types:
            forms.append(_STRING)
        if not types or "array" in types:
            forms.append(_array(self.value(schema.get("items", True), depth + 1)))
        if not types or "object" in types:
            forms.append(self.object({key: schema[key] for key in schema.keys() & _OBJECT}, depth))
        return forms

    def object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        """Return the format of an object, with members in the order of its schema."""
        if unknown := schema.keys() - _OBJECT - ANNOTATIONS - {"type", "$defs", "definitions", "$schema"}:
            raise self._refusal(f"{min(unknown)!r} at its top")
        if "properties" not in schema and schema.get("additionalProperties") is not False:
            return _members(_free(_FREE_DEPTH - 1))
        required, parts = schema.get("required") or (), []
        for key, value in (schema.get("properties") or {}).items():
            if not _KEY.fullmatch(key):
                raise self._refusal(f"the key {key!r}")
            self._key = key
            form = formats.sequence(formats.text(f"{key}:"), self.value(value, depth + 1))
            parts.append((form, key in required))
        return formats.sequence(formats.text("{"), formats.members(parts, ","), formats.text("}"))

    def _refusal(self, what: str) -> VLLMValidationError:
        message = (
            "tools: the model writes arguments in a notation of its own, where the schema of "
            f"{self._tool.name!r} cannot be enforced: it has {what}. "
            "Simplify it, or leave strict and a required tool_choice out."
        )
        return VLLMValidationError(message, parameter="tools", value=self._tool.name)


def _array(item: dict[str, Any]) -> dict[str, Any]:
    """Return the format of a list of any length."""
    return formats.tag("[", _separated(item), "]")


def _members(value: dict[str, Any]) -> dict[str, Any]:
    """Return the format of an object with any members."""
    return formats.tag("{", _separated(formats.sequence(formats.regex(_KEY.pattern), formats.text(":"), value)), "}")


def _separated(item: dict[str, Any]) -> dict[str, Any]:
    """Return the format of any number of items with commas between them."""
    return {"type": "tags_with_separator", "tags": [formats.tag("", item, "")], "separator": ",", "at_least_one": False}


def _free(depth: int) -> dict[str, Any]:
    """Return the format of any value with at most this many levels of lists and objects."""
    if depth == 0:
        return formats.either(_STRING, _SCALAR)
    inner = _free(depth - 1)
    return formats.either(_STRING, _SCALAR, _array(inner), _members(inner))


def _listed(value: Any) -> dict[str, Any]:
    """Return the format of one value."""
    match value:
        case str():
            return formats.text(f"{QUOTE}{value}{QUOTE}")
        case dict():
            members = [formats.sequence(formats.text(f"{key}:"), _listed(each)) for key, each in value.items()]
            return formats.sequence(formats.text("{"), *_joined(members), formats.text("}"))
        case list():
            return formats.sequence(formats.text("["), *_joined([_listed(each) for each in value]), formats.text("]"))
        case _:
            return formats.text(as_json(value))


def _joined(forms: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the formats with commas between them."""
    return [element for i, form in enumerate(forms) for element in ([formats.text(",")] if i else []) + [form]]
