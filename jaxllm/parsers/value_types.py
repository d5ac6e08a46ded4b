"""Find the JSON types that an argument's schema allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
"""JSON's types by Python's types."""
_ALL = frozenset(TYPES.values())
_ALIASES = {
    **dict.fromkeys(("str", "text"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "long", "short"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double"), "number"),
    "bool": "boolean",
    "dict": "object",
    "list": "array",
    "arr": "array",
}
"""Type names that tools use but JSON schema lacks."""
ANNOTATIONS = {"title", "description", "default", "examples"}
"""Keywords that limit no value. A schema's own ones override those of the schema that it refers to."""
_MOST_SCHEMAS = 200
"""The maximum number of schemas to visit: schemas may refer to themselves, and one may lead to many."""


def allowed_types(schema: Any, root: Any) -> frozenset[str]:
    """Return the types of values that a schema allows; none if unspecified. References resolve in `root`."""
    types = _Types(root).of(schema)
    return frozenset() if types == _ALL else types


def resolved(schema: Any, root: Any) -> Any:
    """Return a schema with its `$ref`, or an `allOf` of one schema, resolved."""
    for _ in range(_MOST_SCHEMAS):
        if not isinstance(schema, Mapping):
            return schema
        parts = schema.get("allOf")
        if "$ref" in schema:
            key, target = "$ref", _target(schema["$ref"], root)
        elif isinstance(parts, list) and len(parts) == 1:
            key, target = "allOf", parts[0]
        else:
            return schema
        if not isinstance(target, Mapping) or any(
            target[name] != schema[name] for name in (target.keys() & schema.keys()) - ANNOTATIONS
        ):
            return schema
        schema = {**target, **{name: value for name, value in schema.items() if name != key}}
    return schema


class _Types:
    """Finds the types of values that a schema allows."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_schemas = 0

    def of(self, schema: Any) -> frozenset[str]:
        self._num_schemas += 1
        if not isinstance(schema, Mapping) or self._num_schemas > _MOST_SCHEMAS:
            return _ALL
        types = _named(schema.get("type"))
        if "$ref" in schema:
            types &= self.of(_target(schema["$ref"], self._root))
        if "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            types &= _with_integers(TYPES[type(value)] for value in values if type(value) in TYPES)
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                types &= frozenset[str]().union(*map(self.of, schema[name]))
        if isinstance(schema.get("allOf"), list):
            types = types.intersection(*map(self.of, schema["allOf"]))
        return types or _ALL  # a schema that allows nothing is a mistake and is ignored


def _named(kinds: Any) -> frozenset[str]:
    """Return the types in a schema's keyword `type`."""
    kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    names = (name.strip().lower() for name in kinds if isinstance(name, str))
    return _with_integers(_ALIASES.get(name, name) for name in names) & _ALL or _ALL


def _with_integers(types: Iterable[str]) -> frozenset[str]:
    known = frozenset(types)
    return known | {"integer"} if "number" in known else known


def _target(reference: Any, root: Any) -> Any:
    """Return the part of `root` that a reference points to, or None."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node = root
    for name in unquote(reference[1:]).split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        elif isinstance(node, Mapping) and key in node:
            node = node[key]
        else:
            return None
    return node
