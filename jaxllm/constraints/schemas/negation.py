"""Negate a JSON Schema, for `not`, `if` and `oneOf`: every instance of the result violates the original.

The result may miss some violating instances: generation needs valid outputs, not all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

type Schema = dict[str, Any] | bool

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_MAX_LETTERS = 10_000
_NUMBERS = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_AT_LEAST = {
    "minLength": ("string", "maxLength"),
    "minItems": ("array", "maxItems"),
    "minProperties": ("object", "maxProperties"),
}
_AT_MOST = {
    "maxLength": ("string", "minLength"),
    "maxItems": ("array", "minItems"),
    "maxProperties": ("object", "minProperties"),
}


def negated(schema: Any) -> Schema | None:
    """Return a schema whose instances all violate `schema`; None if none is known."""
    if isinstance(schema, bool) or schema == {}:
        return schema is False
    if not isinstance(schema, dict):
        return None
    opposites: list[Schema] = []
    for key, value in schema.items():
        negate = _KEYWORDS.get(key)
        opposite = negate(value) if negate is not None else _negated_bound(key, value)
        if opposite is not None:
            opposites.append(opposite)
    if isinstance(schema.get("items"), dict) and "prefixItems" not in schema:
        wrong = negated(schema["items"])
        opposites += [] if wrong is None else [{"type": "array", "prefixItems": [wrong], "minItems": 1}]
    return any_of(opposites) if opposites else None


def any_of(schemas: Iterable[Schema]) -> Schema:
    """Join schemas by "or"."""
    kept = [schema for schema in schemas if schema is not False]
    if True in kept:
        return True
    return False if not kept else kept[0] if len(kept) == 1 else {"anyOf": kept}


def all_of(schemas: Iterable[Schema]) -> Schema:
    """Join schemas by "and"."""
    kept = [schema for schema in schemas if schema is not True]
    if False in kept:
        return False
    return True if not kept else kept[0] if len(kept) == 1 else {"allOf": kept}


def _negated_bound(key: str, value: Any) -> Schema | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if key in _NUMBERS:
        return {"type": "number", _NUMBERS[key]: value}
    if key in _AT_LEAST:
        kind, opposite = _AT_LEAST[key]
        return {"type": kind, opposite: int(value) - 1} if value >= 1 else False
    if key in _AT_MOST:
        kind, opposite = _AT_MOST[key]
        return {"type": kind, opposite: int(value) + 1}
    return None


def _negated_type(value: Any) -> Schema | None:
    names = {value} if isinstance(value, str) else set(value) if isinstance(value, list) else set()
    if "integer" in names:
        names.add("number")  # non-integer numbers have no schema
    others = [name for name in _TYPES if name not in names]
    return {"type": others} if others else False


def _negated_enum(values: Any) -> Schema | None:
    if not isinstance(values, list):
        return None
    kinds = {_type_of(value) for value in values}
    opposites: list[Schema] = [{"type": [name for name in _TYPES if name not in kinds]}] if len(kinds) < 6 else []
    if "boolean" in kinds:
        opposites += [{"const": value} for value in (True, False) if not any(value is other for other in values)]
    if "string" in kinds:
        strings = [value for value in values if isinstance(value, str)]
        longest = max(map(len, strings))
        if longest * len(strings) > _MAX_LETTERS or longest > _MAX_LETTERS // 100:
            opposites.append({"type": "string", "minLength": longest + 1})
        else:
            opposites.append({"type": "string", "pattern": f"^(?:{other_strings(strings)})$"})
    if "number" in kinds:
        numbers = [value for value in values if _type_of(value) == "number"]
        opposites.append({"type": "number", "exclusiveMinimum": max(numbers)})
        opposites.append({"type": "number", "exclusiveMaximum": min(numbers)})
    return any_of(opposites)


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {type(None): "null", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "object")


def other_strings(strings: list[str]) -> str:
    """Return a regular expression for every string but these."""
    if not strings:
        return "(?s:.*)"
    ends = [] if "" in strings else [""]
    following: dict[str, list[str]] = {}
    for string in strings:
        if string:
            following.setdefault(string[0], []).append(string[1:])
    if not following:
        return "(?s:.+)"
    first = "".join(_code(character) for character in following)
    branches = [f"{_code(character)}(?:{other_strings(rest)})" for character, rest in following.items()]
    return "|".join([*ends, f"[^{first}](?s:.*)", *branches])


def _code(character: str) -> str:
    return f"\\u{{{ord(character):X}}}"


def _negated_required(names: Any) -> Schema | None:
    if not isinstance(names, list):
        return None
    return any_of({"type": "object", "properties": {name: False}} for name in names if isinstance(name, str))


def _negated_properties(properties: Any) -> Schema | None:
    opposites: list[Schema] = []
    for name, schema in properties.items() if isinstance(properties, dict) else ():
        wrong = negated(schema)
        if wrong is not None and wrong is not False:
            opposites.append({"type": "object", "properties": {name: wrong}, "required": [name]})
    return any_of(opposites) if opposites else None


def _negated_all(schemas: Any) -> Schema | None:
    opposites = [wrong for wrong in map(negated, schemas if isinstance(schemas, list) else ()) if wrong is not None]
    return any_of(opposites) if opposites else None


def _negated_any(schemas: Any) -> Schema | None:
    opposites = [negated(schema) for schema in schemas] if isinstance(schemas, list) else [None]
    wrong = [schema for schema in opposites if schema is not None]
    return all_of(wrong) if len(wrong) == len(opposites) else None


_KEYWORDS: Mapping[str, Callable[[Any], Schema | None]] = {
    "type": _negated_type,
    "const": lambda value: _negated_enum([value]),
    "enum": _negated_enum,
    "required": _negated_required,
    "properties": _negated_properties,
    "not": lambda schema: schema if isinstance(schema, (dict, bool)) else None,
    "allOf": _negated_all,
    "anyOf": _negated_any,
    "oneOf": _negated_any,
}
