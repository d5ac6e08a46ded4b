"""Prepare JSON Schemas for llguidance: parse them, check bounds, and write options into them.

llguidance refuses keywords that it cannot enforce, by name, but it follows references without a bound. This module
visits every reachable subschema once, and requires references to stay inside the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from jaxllm.constraints.schemas.closed_objects import close_objects
from jaxllm.constraints.schemas.name_patterns import property_names
from jaxllm.constraints.schemas.rewrites import OneOf, Rewriter
from jaxllm.params.checks import shown
from jaxllm.params.grammar_checks import check_depth, check_parentheses, refuse
from jaxllm.params.limits import MAX_ENUM_VALUES, MAX_JSON_NESTING, MAX_PROPERTIES, MAX_SCHEMA_NODES
from jaxllm.params.structured_outputs import StructuredOutputsParams

_MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies")
_COUNTED = ("Length", "Items", "Properties", "Contains")
_SCHEMAS = (
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("not", "if", "then", "else", "allOf", "anyOf", "oneOf", "contentSchema"),
)
_KINDS: Mapping[str, tuple[str, type | tuple[type, ...]]] = {
    **dict.fromkeys((*_MAPS, "$defs", "definitions", "dependentRequired"), ("an object", dict)),
    **dict.fromkeys(("enum", "required", "prefixItems", "allOf", "anyOf", "oneOf"), ("an array", list)),
    **dict.fromkeys(("$ref", "pattern", "format"), ("a string", str)),
    **dict.fromkeys((f"{m}{of}" for m in ("min", "max") for of in _COUNTED), ("a number", (int, float))),
}
"""The type of each keyword's value; llguidance checks the rest."""

_WHITESPACE = r"[ \t]|\r?\n[ \t]{0,40}"  # bounded: small models write white space for ever

type _Schema = dict[str, Any]


def schema_text(parameter: str, schema: Any, params: StructuredOutputsParams, *, one_of: OneOf = OneOf.KEPT) -> str:
    """Return a schema (JSON text, dict or bool) as JSON text for llguidance, with the options of `params`.

    Raises VLLMValidationError, naming `parameter`, if it is not a schema, is too big or has a reference out of itself.
    """
    if isinstance(schema, str):
        schema = parse_json(parameter, schema)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise refuse(parameter, f"a JSON Schema is an object, got {json.dumps(schema)[:80]}.")
    check_nesting(parameter, schema)
    references = _References(parameter, schema)
    _check_schema(parameter, schema, references)
    if params.disable_additional_properties:
        schema = close_objects(parameter, schema, references.target)
    schema = Rewriter(parameter, property_names(schema), one_of=one_of).rewrite(schema)
    guidance = schema.get("x-guidance")
    options = _whitespace(params, guidance if isinstance(guidance, dict) else {})
    schema["x-guidance"] = options | {"coerce_one_of": True} if one_of is OneOf.ANY else options
    return json.dumps(schema)


def check_schemas_inside(parameter: str, text: str) -> None:
    """Check the schemas of a Lark grammar's `%json {...}` against the same bounds."""
    for match in re.finditer(r"%json\s*(?=\{)", text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, match.end())
        except RecursionError as error:
            raise refuse(parameter, f"more than {MAX_JSON_NESTING} levels of nesting.") from error
        except ValueError:
            continue  # llguidance will report it
        check_nesting(parameter, schema)
        _check_schema(parameter, schema, _References(parameter, schema))


def parse_json(parameter: str, text: str) -> Any:
    """Parse JSON. NaN and infinities, which Python would accept, are errors."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise refuse(parameter, f"not valid JSON: {error}.") from error


def check_nesting(parameter: str, value: Any) -> None:
    """Raise an error for JSON with more than MAX_JSON_NESTING nested brackets."""
    level = [value]
    for _ in range(MAX_JSON_NESTING):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise refuse(parameter, f"more than {MAX_JSON_NESTING} levels of nesting.")


def _inside(value: Any) -> list[Any]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [inner for inner in values if isinstance(inner, (dict, list))]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _whitespace(params: StructuredOutputsParams, options: dict[str, Any]) -> dict[str, Any]:
    """Return llguidance's options: those in the schema, then those of the params."""
    if params.disable_any_whitespace:
        return {**options, "whitespace_flexible": False}
    if params.whitespace_pattern is not None:
        check_parentheses("whitespace_pattern", params.whitespace_pattern)
        return {**options, "whitespace_pattern": params.whitespace_pattern}
    return {"whitespace_pattern": _WHITESPACE, **options} if options.get("whitespace_flexible", True) else options


def _subschemas(node: _Schema) -> Iterator[_Schema]:
    """Yield the schemas directly inside one, except those of $defs, which are reached by reference only."""
    for key, value in node.items():
        if key in _MAPS and isinstance(value, dict):
            yield from (inner for inner in value.values() if isinstance(inner, dict))
        elif key in _SCHEMAS:
            inside = value if isinstance(value, list) else [value]
            yield from (inner for inner in inside if isinstance(inner, dict))


def _check_schema(parameter: str, schema: _Schema, references: _References) -> None:
    """Check every reachable subschema and the depth of their nesting."""
    graph: dict[int, list[int]] = {}
    pending = [schema]
    while pending:
        node = pending.pop()
        if id(node) in graph:
            continue
        _check_keywords(parameter, node)
        inside = list(_subschemas(node))
        target = references.target(node)
        if isinstance(target, dict):
            inside.append(target)
        graph[id(node)] = [id(inner) for inner in inside]
        if len(graph) > MAX_SCHEMA_NODES:
            raise refuse(parameter, f"more than {MAX_SCHEMA_NODES} subschemas.")
        pending.extend(inside)
    check_depth(parameter, "subschemas", graph)


def _check_keywords(parameter: str, node: _Schema) -> None:
    for key, (what, kind) in _KINDS.items():
        if key in node and not isinstance(node[key], kind):
            raise refuse(parameter, f"{key} must be {what}, got {shown(node[key])}.")
    enum = node.get("enum", ())
    if len(enum) > MAX_ENUM_VALUES:
        raise refuse(parameter, f"enum has {len(enum)} values; at most {MAX_ENUM_VALUES} are possible.")
    for key in ("properties", "patternProperties", "required"):
        named = node.get(key, ())
        if len(named) > MAX_PROPERTIES:
            raise refuse(parameter, f"{key} has {len(named)} entries; at most {MAX_PROPERTIES} are possible.")
    for pattern in (node.get("pattern"), *(node.get("patternProperties") or ())):
        if isinstance(pattern, str):
            check_parentheses(parameter, pattern)
    if node.get("minProperties", 0) > len(set(map(str, node.get("required", ())))) + 1:
        message = "minProperties can ask for at most one property more than `required` names: other names may repeat."
        raise refuse(parameter, message)


def _joined(base: str, relative: str) -> str:
    try:
        return urldefrag(urljoin(base, relative)).url
    except ValueError:
        return base


class _References:
    """Finds the target of a schema's `$ref`s: a part of the schema itself, of a subschema's `$id`, or an `$anchor`."""

    def __init__(self, parameter: str, schema: _Schema) -> None:
        self._parameter = parameter
        self._bases: dict[int, str] = {}
        self._resources: dict[str, _Schema] = {"": schema}
        self._anchors: dict[tuple[str, str], _Schema] = {}
        pending: list[tuple[Any, str]] = [(schema, "")]
        while pending:
            node, base = pending.pop()
            if isinstance(node, dict):
                identifier = node.get("$id")
                if isinstance(identifier, str) and not identifier.startswith("#"):
                    base = _joined(base, identifier)
                    self._resources.setdefault(base, node)
                if isinstance(node.get("$anchor"), str):
                    self._anchors[base, node["$anchor"]] = node
                self._bases[id(node)] = base
            pending.extend((inner, base) for inner in _inside(node))

    def target(self, node: _Schema) -> Any:
        """Return the target of `node`'s $ref, which may be a boolean; None without a $ref."""
        reference = node.get("$ref")
        if not isinstance(reference, str):
            return None
        base = self._bases[id(node)]
        try:
            url, fragment = urldefrag(base + reference if reference.startswith("#") else urljoin(base, reference))
        except ValueError as error:
            raise refuse(self._parameter, f"$ref {reference[:200]!r} is no reference: {error}.") from error
        resource = self._resources.get(url)
        if resource is None:
            message = f"$ref {reference[:200]!r} is not inside the schema; remote references are not fetched."
            raise refuse(self._parameter, message)
        fragment = unquote(fragment)
        target = self._pointed(resource, fragment) if fragment[:1] in ("", "/") else self._anchors.get((url, fragment))
        if target is None:
            raise refuse(self._parameter, f"$ref {reference[:200]!r} leads nowhere.")
        return target

    @staticmethod
    def _pointed(resource: _Schema, pointer: str) -> Any:
        value: Any = resource
        for part in pointer.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict):
                value = value.get(part)
            elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                return None
        return value
