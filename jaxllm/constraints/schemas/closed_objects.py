"""Close the objects of a JSON Schema: they allow only the properties that they list.

Authors list properties and mean only these, but JSON Schema allows others, and small models would write them until the
output ends. An object composed by `allOf`, `anyOf` or `$ref` lists what all its parts list: closing each part alone
would allow nothing.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxllm.params.grammar_checks import refuse
from jaxllm.params.limits import MAX_SCHEMA_NODES

_MAPS = ("properties", "patternProperties")
_VALUES = (
    *("items", "prefixItems", "additionalItems", "unevaluatedItems"),
    *("additionalProperties", "unevaluatedProperties"),
)
"""Keywords with schemas of values inside a value."""
_COMPARED = ("not", "if", "contains", "propertyNames", "contentSchema")
_OPENING = ("additionalProperties", "unevaluatedProperties", "propertyNames")
_DROPPED = ("$defs", "definitions", "$id", "$anchor")
_LISTS = {"allOf": "", "anyOf": "anyOf", "oneOf": "oneOf"}
_BRANCHES = {"then": "if", "else": "if"}
"""Keywords with parts of an object, and the `alternative` of these parts."""
_DEPENDENT = ("dependentSchemas", "dependencies")
_WITH_PARTS = (*_LISTS, *_DEPENDENT)
"""Keywords whose copies get the copies of parts put into them."""

_MAX_SIZE = 2 * MAX_SCHEMA_NODES
"""The most subschemas, names and patterns of all copies: a subschema is copied once for each set of names beside it,
and a closed one gets those names too.
"""

type _Schema = dict[str, Any]


@dataclass(frozen=True, eq=False)
class _Listed:
    """The properties of an object that a schema and its parts list."""

    names: Mapping[str, None] = MappingProxyType({})
    """The names that are listed, required or depended on, in the schema's order."""
    patterns: Mapping[str, None] = MappingProxyType({})
    """Patterns of listed names."""
    lists: bool = False
    """Whether any properties are listed, if only by a pattern."""
    is_open: bool = False
    """Whether the schema constrains properties that it does not list, too."""

    @property
    def size(self) -> int:
        return len(self.names) + len(self.patterns)

    @cached_property
    def key(self) -> tuple[frozenset[str], frozenset[str]]:
        """The names and patterns without order: parts that share this object share the sets."""
        return frozenset(self.names), frozenset(self.patterns)


class _Union:
    """The union of what several schemas list, with counts, so that the union of all but one needs no second pass."""

    def __init__(self, members: Iterable[_Listed]) -> None:
        self._names: Counter[str] = Counter()
        self._patterns: Counter[str] = Counter()
        self._num_listing = self._num_open = 0
        for member in members:
            self._names.update(member.names.keys())
            self._patterns.update(member.patterns.keys())
            self._num_listing += member.lists
            self._num_open += member.is_open

    def is_open_without(self, member: _Listed) -> bool:
        return self._num_open > member.is_open

    def without(self, member: _Listed) -> _Listed:
        """Return what all schemas but one list; with _NOTHING, what all of them list."""
        names = {name: None for name, count in self._names.items() if count > (name in member.names)}
        patterns = {each: None for each, count in self._patterns.items() if count > (each in member.patterns)}
        return _Listed(names, patterns, self._num_listing > member.lists, self._num_open > member.is_open)


_NOTHING = _Listed()


class _Part(NamedTuple):
    """A schema inside another one that constrains the same value."""

    key: str
    position: str | int | None
    """Its key or index in the keyword's value; None if it is that value."""
    schema: Any
    alternative: str
    """Parts with the same alternative exclude each other; "" for parts that hold together with all others."""


def close_objects(parameter: str, schema: _Schema, target: Callable[[_Schema], Any]) -> _Schema:
    """Return a schema that forbids other properties wherever some are listed and no rule for others exists.

    `target` returns the target of a subschema's $ref, or None without one. Subschemas that values are only compared
    with, as in `not`, `if` and `contains`, stay unchanged. Raises VLLMValidationError, naming `parameter`, if the
    schema would have too many parts.
    """
    return _Closer(parameter, target).whole(schema)


class _Closer:
    """Copies a schema, and each reference's target once for each set of names beside it."""

    def __init__(self, parameter: str, target: Callable[[_Schema], Any]) -> None:
        self._parameter = parameter
        self._target = target
        self._definitions: dict[str, Any] = {}
        self._pointers: dict[tuple[Any, ...], str] = {}
        self._listed: dict[int, _Listed] = {}
        self._size = 0

    def whole(self, schema: _Schema) -> _Schema:
        """Return a copy of the root."""
        self._pointers[_key(schema, _NOTHING, closes=True)] = "#"
        copied = self._copied(schema, _NOTHING, closes=True)
        return {**copied, "$defs": self._definitions} if self._definitions else copied

    def _copied(self, node: Any, beside: _Listed | None, *, closes: bool) -> Any:
        """Copy a schema, and close it to what it lists and to what is listed `beside` it.

        With `beside` None it stays open, though values inside it are closed. Without `closes` nothing is closed.
        """
        self._charge(1)
        if not isinstance(node, dict):
            return node
        own_list = self._own(node)
        self._charge(own_list.size)
        copied = {key: self._value(key, value, closes=closes) for key, value in node.items() if key not in _DROPPED}
        parts = list(self._parts(node))
        around = [beside, own_list] if closes and beside is not None else None
        besides = itertools.repeat(None) if around is None else self._beside(around, parts)
        for part, listed in zip(parts, besides, strict=False):
            self._put(copied, part, listed, closes=closes)
        if around is not None and own_list.lists and not self._all_listed(node).is_open:
            self._close(copied, [self._all_listed(node), *around])
        return copied

    def _charge(self, size: int) -> None:
        """Count subschemas, names and patterns; they cost time in this class and in all readers of the copy."""
        self._size += size
        if self._size > _MAX_SIZE:
            message = (
                f"more than {_MAX_SIZE} subschemas and names of properties once each object, and each of its parts in "
                "allOf, anyOf, oneOf or $ref, is closed to what all of them list: give them additionalProperties."
            )
            raise refuse(self._parameter, message)

    def _value(self, key: str, value: Any, *, closes: bool) -> Any:
        """Copy the value of a keyword, into which copies of parts are put later."""
        if key in _MAPS and isinstance(value, dict):
            return {name: self._copied(inner, _NOTHING, closes=closes) for name, inner in value.items()}
        if key in (*_VALUES, *_COMPARED):
            closes = closes and key in _VALUES
            inside = value if isinstance(value, list) else [value]
            copied = [self._copied(inner, _NOTHING, closes=closes) for inner in inside]
            return copied if isinstance(value, list) else copied[0]
        return value.copy() if key in _WITH_PARTS else value

    def _put(self, copied: _Schema, part: _Part, beside: _Listed | None, *, closes: bool) -> None:
        if part.key == "$ref":
            copied["$ref"] = self._pointer(part.schema, beside, closes=closes)
        elif part.position is None:
            copied[part.key] = self._copied(part.schema, beside, closes=closes)
        else:
            copied[part.key][part.position] = self._copied(part.schema, beside, closes=closes)

    def _pointer(self, target: Any, beside: _Listed | None, *, closes: bool) -> str:
        """Return a reference to a copy of `target`."""
        key = _key(target, beside, closes=closes)
        if key not in self._pointers:
            name = str(len(self._pointers))
            self._pointers[key] = f"#/$defs/{name}"  # the copy may refer to itself
            self._definitions[name] = self._copied(target, beside, closes=closes)
        return self._pointers[key]

    def _parts(self, node: _Schema) -> Iterator[_Part]:
        target = self._target(node)
        if target is not None:
            yield _Part("$ref", None, target, "")
        for key, alternative in _LISTS.items():
            yield from (_Part(key, index, inner, alternative) for index, inner in enumerate(node.get(key) or ()))
        if "if" in node:
            yield from (_Part(key, None, node[key], of) for key, of in _BRANCHES.items() if key in node)
        for key in _DEPENDENT:
            named = [(name, inner) for name, inner in (node.get(key) or {}).items() if isinstance(inner, dict)]
            yield from (_Part(key, name, inner, "") for name, inner in named)

    def _beside(self, around: list[_Listed], parts: list[_Part]) -> Iterator[_Listed | None]:
        """Yield what each part must allow besides its own list; None if it must stay open.

        `around` is what the schema with these parts, and the schemas beside it, list.
        """
        listed = [self._all_listed(part.schema) for part in parts]
        pairs = list(zip(parts, listed, strict=True))
        alternatives: dict[str, _Listed] = {}
        everything: _Union | None = None
        for part, part_list in pairs:
            of = part.alternative
            if not part_list.lists:
                yield None  # it has nothing to close
            elif of:
                if of not in alternatives:
                    others = [each for other, each in pairs if other.alternative != of]
                    alternatives[of] = self._union([*around, *others]).without(_NOTHING)
                yield None if alternatives[of].is_open else alternatives[of]
            else:
                everything = everything or self._union([*around, *listed])
                yield None if everything.is_open_without(part_list) else self._all_but(everything, part_list)

    def _union(self, members: list[_Listed]) -> _Union:
        self._charge(sum(member.size for member in members))
        return _Union(members)

    def _all_but(self, union: _Union, member: _Listed) -> _Listed:
        listed = union.without(member)
        self._charge(listed.size)
        return listed

    def _close(self, node: _Schema, listed: list[_Listed]) -> None:
        """Make `node` allow only what is listed."""
        for key in ("properties", "patternProperties"):
            properties = node.get(key, {})
            names = itertools.chain(*(each.names if key == "properties" else each.patterns for each in listed))
            others = {name: True for name in names if name not in properties}
            self._charge(len(others))
            if others:
                node[key] = {**properties, **others}
        node["additionalProperties"] = False

    def _all_listed(self, node: Any) -> _Listed:
        """Return what a schema and all of its parts list."""
        if not isinstance(node, dict):
            return _NOTHING
        if id(node) not in self._listed:
            self._listed[id(node)] = _NOTHING  # a part may refer back to this schema
            own_list, parts = self._own(node), [self._all_listed(part.schema) for part in self._parts(node)]
            self._listed[id(node)] = self._union([own_list, *parts]).without(_NOTHING) if parts else own_list
        return self._listed[id(node)]

    @staticmethod
    def _own(node: _Schema) -> _Listed:
        """Return what a schema itself lists, without its parts."""
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
    return (id(target), closes, None if beside is None else beside.key)
