"""Rewrite JSON Schema keywords that llguidance lacks into ones that it supports.

A rewritten schema allows nothing that the original forbids, but it may allow less: for example, the items that
`contains` requires come first. A keyword that cannot be rewritten stays, and llguidance refuses it by name.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

from jaxllm.constraints.schemas.name_patterns import list_pattern_properties, listed_names, take_property_names
from jaxllm.constraints.schemas.negation import Schema, all_of, any_of, negated
from jaxllm.params.grammar_checks import refuse

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minContains")
_MAX_CONTAINS = 64
_MAX_BRANCHES = 64
"""The most branches of a oneOf: each is combined with all the others."""
_MAX_LENGTH = 2**23
"""The most characters of a rewritten schema; `not`, `if`, `oneOf`, `contains` and closed objects repeat parts of it."""
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"
_FORMATS: dict[str, dict[str, str]] = {
    "idn-email": {"format": "email"},
    "idn-hostname": {"format": "hostname"},
    "iri": {"format": "uri"},
    "json-pointer": {"pattern": f"^{_POINTER}$"},
    "relative-json-pointer": {"pattern": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$"},
    "uri-reference": {"pattern": "^[A-Za-z0-9/._~-]*$"},
    "iri-reference": {"pattern": "^[A-Za-z0-9/._~-]*$"},
    "uri-template": {"pattern": "^[A-Za-z0-9/._~-]*$"},
    "byte": {"pattern": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"},
}
_HINTS = ("password", "binary")
"""Formats of OpenAPI that any text satisfies."""
FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"),
        *_FORMATS,
        *_HINTS,
    }
)
"""The formats that a grammar can enforce: llguidance's, and the rewritten ones."""
_IN_PLACE = ("$ref", "$dynamicRef", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf")
_MEASURED_INSIDE = (
    *(*_MAPS, *_SCHEMAS, "dependentSchemas", "dependencies", "not", "if", "then", "else"),
    *("contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties", "contentSchema"),
)
"""Keywords with subschemas. The size of a subschema counts when it is rewritten itself, not with its keyword."""


class OneOf(enum.Enum):
    """How oneOf is passed to llguidance."""

    KEPT = enum.auto()
    """Unchanged: llguidance must see that the branches exclude each other."""
    EXPANDED = enum.auto()
    """As anyOf of values that match one branch and no other."""
    ANY = enum.auto()
    """As anyOf, as in vLLM, if branches cannot be kept apart: a text may then match several of them."""


class Rewriter:
    """Rewrites a schema, whose properties have `names`, or a part of it."""

    def __init__(self, parameter: str, names: Collection[str], *, one_of: OneOf) -> None:
        self._parameter = parameter
        self._listed_by = cache(lambda pattern: listed_names(pattern, names))  # closed objects repeat patterns
        self._one_of = one_of
        self._length = 0

    def rewrite(self, schema: Any) -> Any:
        """Return a schema without the keywords that can be rewritten; the argument is not changed."""
        if not isinstance(schema, dict):
            return schema
        self._length += 2 + sum(map(_length, schema.items()))
        if self._length > _MAX_LENGTH:
            message = (
                f"more than {_MAX_LENGTH} characters once not, if, oneOf, contains and closed objects are written out: "
                "shorten it, or give its objects additionalProperties."
            )
            raise refuse(self._parameter, message)
        node = dict(schema)
        extra = [part for part in self._extracted(node) if part is not True]
        if extra:
            present = node.get("allOf")
            node["allOf"] = [*(present if isinstance(present, list) else []), *extra]
        for key in _MAPS:
            if isinstance(node.get(key), dict):
                node[key] = {name: self.rewrite(inner) for name, inner in node[key].items()}
        for key in _SCHEMAS:
            value = node.get(key)
            node |= {} if value is None else {key: self._each(value)}
        return node

    def _each(self, value: Any) -> Any:
        return [self.rewrite(inner) for inner in value] if isinstance(value, list) else self.rewrite(value)

    def _extracted(self, node: dict[str, Any]) -> Iterator[Schema]:
        """Take the keywords that llguidance lacks out of `node`; yield schemas that must hold as well."""
        for key in _COUNTS:
            if isinstance(node.get(key), float) and node[key].is_integer():
                node[key] = int(node[key])
        if isinstance(node.get("format"), str):
            if node["format"] in _HINTS:
                del node["format"]
            else:
                node |= _FORMATS.get(node["format"], {})
                if "pattern" in _FORMATS.get(node["format"], {}):
                    del node["format"]
        list_pattern_properties(node, self._listed_by)
        yield from _take_unevaluated(node)
        yield from _take_not(node)
        yield from _take_if(node)
        yield from _take_dependencies(node)
        yield from _take_contains(node)
        yield from take_property_names(node)
        if self._one_of is OneOf.EXPANDED:
            yield from _take_one_of(node)
        if node.get("uniqueItems") is False or (node.get("uniqueItems") and node.get("maxItems", 2) <= 1):
            del node["uniqueItems"]


def _length(item: tuple[str, Any]) -> int:
    """Return the length of a keyword's JSON, without the subschemas in it."""
    key, value = item
    if isinstance(value, str):
        return len(key) + len(value)
    if key not in _MEASURED_INSIDE:
        return len(key) + len(json.dumps(value))
    return len(key) + 6 + (sum(len(name) + 6 for name in value) if isinstance(value, dict) and key in _MAPS else 0)


def _take_not(node: dict[str, Any]) -> Iterator[Schema]:
    opposite = negated(node["not"]) if "not" in node else None
    if opposite is not None:
        del node["not"]
        yield opposite


def _take_if(node: dict[str, Any]) -> Iterator[Schema]:
    if "if" not in node:
        node.pop("then", None)
        node.pop("else", None)
        return
    opposite = negated(node["if"])
    if "then" not in node and "else" not in node:
        del node["if"]
    elif opposite is not None:
        condition, then, otherwise = node.pop("if"), node.pop("then", True), node.pop("else", True)
        yield any_of([all_of([condition, then]), all_of([opposite, otherwise])])


def _take_one_of(node: dict[str, Any]) -> Iterator[Schema]:
    branches = node.get("oneOf")
    if not isinstance(branches, list) or len(branches) > _MAX_BRANCHES:
        return
    opposites = [negated(branch) for branch in branches]
    known = [opposite for opposite in opposites if opposite is not None]
    if len(known) < len(opposites):
        return
    del node["oneOf"]
    yield any_of(
        all_of([branch, *(other for at, other in enumerate(known) if at != index)])
        for index, branch in enumerate(branches)
    )


def _take_dependencies(node: dict[str, Any]) -> Iterator[Schema]:
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        if not isinstance(node.get(key), dict):
            continue
        for name, needs in node.pop(key).items():
            present: Schema = {"required": [name, *needs]} if isinstance(needs, list) else {"required": [name]}
            with_needs = present if isinstance(needs, list) else all_of([present, needs])
            yield any_of([{"properties": {name: False}}, with_needs])


def _take_contains(node: dict[str, Any]) -> Iterator[Schema]:
    """Require the first items to be those of `contains`, and with maxContains no others to match."""
    if "contains" not in node:
        node.pop("minContains", None)
        node.pop("maxContains", None)
        return
    count, most = node.get("minContains", 1), node.get("maxContains")
    others = negated(node["contains"]) if most is not None else True
    if not isinstance(count, int) or count > _MAX_CONTAINS or others is None or (most is not None and most < count):
        return
    wanted = node.pop("contains")
    node.pop("minContains", None)
    node.pop("maxContains", None)
    yield {"prefixItems": [wanted] * count, "items": others, "minItems": count} if count else {"items": others}


def _take_unevaluated(node: dict[str, Any]) -> Iterator[Schema]:
    """Turn unevaluatedProperties and -Items into additionalProperties and items, if all evaluated ones are listed."""
    is_plain = not any(key in node for key in _IN_PLACE)
    rest = node.get("unevaluatedProperties", True)
    if "unevaluatedProperties" in node and (rest is True or is_plain):
        seen = _seen_properties(node)
        if rest is True or seen is not None:
            del node["unevaluatedProperties"]
        if rest is not True and seen is not None and "additionalProperties" not in seen:
            yield {**seen, "additionalProperties": rest}
    rest = node.get("unevaluatedItems", True)
    if "unevaluatedItems" in node and (rest is True or (is_plain and "allOf" not in node and "contains" not in node)):
        del node["unevaluatedItems"]
        node.setdefault("items", rest)


def _seen_properties(node: dict[str, Any]) -> dict[str, Any] | None:
    """Collect the names that a schema and its allOf evaluate; None if that depends on the instance."""
    seen: dict[str, Any] = {"properties": {}, "patternProperties": {}}
    if any(key in node for key in _IN_PLACE):
        return None
    for key in ("properties", "patternProperties"):
        seen[key] |= dict.fromkeys(node.get(key) or {}, True)
    seen |= {"additionalProperties": True} if "additionalProperties" in node else {}
    for branch in node.get("allOf") or ():
        inner = _seen_properties(branch) if isinstance(branch, dict) else {}
        if inner is None:
            return None
        for key in ("properties", "patternProperties"):
            seen[key] |= inner.get(key, {})
        seen |= {"additionalProperties": True} if "additionalProperties" in inner else {}
    return seen
