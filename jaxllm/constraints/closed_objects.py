"""Schemas whose objects allow no properties but those that they list.

Authors list properties and mean these alone, but JSON Schema allows others, and small models write them to the end.
An object that `allOf`, `anyOf` or `$ref` put together lists what all its parts list: closing each part by itself would
leave nothing that is allowed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxllm.constraints.limits import refuse
from jaxllm.params.limits import MAX_SCHEMA_NODES

_MAPS = ("properties", "patternProperties")
_VALUES = (
    *("items", "prefixItems", "additionalItems", "unevaluatedItems"),
    *("additionalProperties", "unevaluatedProperties"),
)
"""Keywords with schemas of what is inside a value."""
_COMPARED = ("not", "if", "contains", "propertyNames", "contentSchema")
_OPENING = ("additionalProperties", "unevaluatedProperties", "propertyNames")
_DROPPED = ("$defs", "definitions", "$id", "$anchor")
_LISTS = {"allOf": "", "anyOf": "anyOf", "oneOf": "oneOf"}
_BRANCHES = {"then": "if", "else": "if"}
"""Keywords with parts of an object, each with the `alternative` of these parts."""

_MAX_NODES = 2 * MAX_SCHEMA_NODES
"""A subschema is copied once for each set of names beside it."""

type Schema = dict[str, Any]


class _Listed(NamedTuple):
    """What a schema and its parts say of an object's properties."""

    names: Mapping[str, None] = MappingProxyType({})
    """These names are listed, required or depended on; the order is that of the schema."""
    patterns: Mapping[str, None] = MappingProxyType({})
    """Names that match these are listed."""
    lists: bool = False
    """Some properties are listed, if only by a pattern."""
    is_open: bool = False
    """Something is said of other properties too."""

    def with_those_of(self, other: _Listed) -> _Listed:
        """Return what is listed by either."""
        names, patterns = {**self.names, **other.names}, {**self.patterns, **other.patterns}
        return _Listed(names, patterns, self.lists or other.lists, self.is_open or other.is_open)


_NOTHING = _Listed()


class _Part(NamedTuple):
    """A schema inside another one that is about the same value."""

    key: str
    place: str | int | None
    """Its place in the keyword's value; None if it is that value."""
    schema: Any
    alternative: str
    """Parts with the same text here exclude each other; "" for those that hold beside all others."""


def close_objects(parameter: str, schema: Schema, target: Callable[[Schema], Any]) -> Schema:
    """Return a schema that forbids other properties wherever some are listed and nothing is said about others.

    `target` returns what a subschema's $ref leads to, or None without one. Subschemas that are only compared with, as
    in `not`, `if` and `contains`, stay as they are. Raises VLLMValidationError, naming `parameter`, when the schema
    would have too many parts.
    """
    return _Closer(parameter, target).whole(schema)


class _Closer:
    """Copies a schema, and what its references lead to once for each set of names beside it."""

    def __init__(self, parameter: str, target: Callable[[Schema], Any]) -> None:
        self._parameter = parameter
        self._target = target
        self._definitions: dict[str, Any] = {}
        self._pointers: dict[tuple[Any, ...], str] = {}
        self._listed: dict[int, _Listed] = {}
        self._num_nodes = 0

    def whole(self, schema: Schema) -> Schema:
        """Return a copy of the root."""
        self._pointers[_key(schema, _NOTHING, closes=True)] = "#"
        copied = self._copied(schema, _NOTHING, closes=True)
        return {**copied, "$defs": self._definitions} if self._definitions else copied

    def _copied(self, node: Any, beside: _Listed | None, *, closes: bool) -> Any:
        """Copy a schema, and close it to what it lists and to what is listed `beside` it.

        None leaves it open, though not the values in it. Without `closes` nothing is closed.
        """
        if not isinstance(node, dict):
            return node
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            message = f"more than {_MAX_NODES} subschemas once its objects are closed: give them additionalProperties."
            raise refuse(self._parameter, message)
        copied = {key: self._value(key, value, closes=closes) for key, value in node.items() if key not in _DROPPED}
        parts = list(self._parts(node))
        for part in parts:
            listed = self._beside(node, part, parts, beside) if closes and beside is not None else None
            self._put(copied, part, listed, closes=closes)
        listed = self._all_listed(node)
        if closes and beside is not None and self._own(node).lists and not listed.is_open:
            _close(copied, listed.with_those_of(beside))
        return copied

    def _value(self, key: str, value: Any, *, closes: bool) -> Any:
        """Copy the value of a keyword, in which parts take their places later."""
        if key in _MAPS and isinstance(value, dict):
            return {name: self._copied(inner, _NOTHING, closes=closes) for name, inner in value.items()}
        if key in (*_VALUES, *_COMPARED):
            closes = closes and key in _VALUES
            inside = value if isinstance(value, list) else [value]
            copied = [self._copied(inner, _NOTHING, closes=closes) for inner in inside]
            return copied if isinstance(value, list) else copied[0]
        return copy.copy(value)

    def _put(self, copied: Schema, part: _Part, beside: _Listed | None, *, closes: bool) -> None:
        if part.key == "$ref":
            copied["$ref"] = self._pointer(part.schema, beside, closes=closes)
        elif part.place is None:
            copied[part.key] = self._copied(part.schema, beside, closes=closes)
        else:
            copied[part.key][part.place] = self._copied(part.schema, beside, closes=closes)

    def _pointer(self, target: Any, beside: _Listed | None, *, closes: bool) -> str:
        """Return a reference to a copy of `target`."""
        key = _key(target, beside, closes=closes)
        if key not in self._pointers:
            name = str(len(self._pointers))
            self._pointers[key] = f"#/$defs/{name}"  # the copy may refer to itself
            self._definitions[name] = self._copied(target, beside, closes=closes)
        return self._pointers[key]

    def _parts(self, node: Schema) -> Iterator[_Part]:
        target = self._target(node)
        if target is not None:
            yield _Part("$ref", None, target, "")
        for key, alternative in _LISTS.items():
            yield from (_Part(key, index, inner, alternative) for index, inner in enumerate(node.get(key) or ()))
        if "if" in node:
            yield from (_Part(key, None, node[key], of) for key, of in _BRANCHES.items() if key in node)
        for key in ("dependentSchemas", "dependencies"):
            named = [(name, inner) for name, inner in (node.get(key) or {}).items() if isinstance(inner, dict)]
            yield from (_Part(key, name, inner, "") for name, inner in named)

    def _beside(self, node: Schema, part: _Part, parts: list[_Part], beside: _Listed) -> _Listed | None:
        """Return what a part has to allow beside what it lists itself; None if it has to stay open."""
        for other in (node, *(other.schema for other in parts if other is not part and not _exclude(other, part))):
            beside = beside.with_those_of(self._own(node) if other is node else self._all_listed(other))
        return None if beside.is_open or not self._all_listed(part.schema).lists else beside

    def _all_listed(self, node: Any) -> _Listed:
        """Return what a schema and all of its parts list."""
        if not isinstance(node, dict):
            return _NOTHING
        if id(node) not in self._listed:
            self._listed[id(node)] = _NOTHING  # a part may refer back to this schema
            listed = self._own(node)
            for part in self._parts(node):
                listed = listed.with_those_of(self._all_listed(part.schema))
            self._listed[id(node)] = listed
        return self._listed[id(node)]

    @staticmethod
    def _own(node: Schema) -> _Listed:
        """Return what a schema lists without its parts."""
        names: dict[str, None] = {}
        condition = node.get("if")
        for schema in (node, condition if isinstance(condition, dict) else {}):
            names |= dict.fromkeys(schema.get("properties") or ())
            names |= dict.fromkeys(name for name in schema.get("required") or () if isinstance(name, str))
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, needs in (node.get(key) or {}).items():
                more = needs if isinstance(needs, list) else ()
                names |= dict.fromkeys([name, *(each for each in more if isinstance(each, str))])
        patterns: dict[str, None] = dict.fromkeys(node.get("patternProperties") or ())
        lists = "properties" in node or bool(patterns)
        is_short = node.get("minProperties", 0) > len(names) and not patterns
        return _Listed(names, patterns, lists, is_short or any(key in node for key in _OPENING))


def _key(target: Any, beside: _Listed | None, *, closes: bool) -> tuple[Any, ...]:
    return (id(target), closes, None if beside is None else (frozenset(beside.names), frozenset(beside.patterns)))


def _exclude(part: _Part, other: _Part) -> bool:
    """Say whether an object matches only one of two parts."""
    return part.alternative == other.alternative != ""


def _close(node: Schema, listed: _Listed) -> None:
    """Let `node` allow what is listed and nothing else."""
    for key, names in (("properties", listed.names), ("patternProperties", listed.patterns)):
        own = node.get(key, {})
        others = {name: True for name in names if name not in own}
        if others:
            node[key] = {**own, **others}
    node["additionalProperties"] = False
