"""Rewrite patternProperties and propertyNames of JSON Schema into forms that llguidance can enforce."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from jaxllm.constraints.schemas.negation import Schema, all_of, other_strings

_MAX_LETTERS = 5_000
_MAX_NAME_LENGTH = 80
"""Each letter takes a parenthesis inside that of the one before, so longer names are not compared."""
_EMPTY_ERROR = "Regex is empty"
_LISTED_NAMES = re.compile(r"\^(?:(\w{1,64})|\((?:\?:)?(\w{1,64}(?:\|\w{1,64}){0,63})\))\$")
"""A pattern of one name, or of a few in parentheses."""


def property_names(schema: Any) -> list[str]:
    """Collect all names in `properties` and `required` anywhere in a schema, if it has patterns of names."""
    names: set[str] = set()
    has_patterns = False
    pending = [schema]
    seen: set[int] = set()  # closed objects share what they copied
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        pending += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        if isinstance(node, dict):
            has_patterns = has_patterns or "patternProperties" in node or "propertyNames" in node
            for key, kind in (("properties", dict), ("required", list)):
                named = node.get(key)
                names.update(name for name in (named if isinstance(named, kind) else ()) if isinstance(name, str))
    return sorted(name for name in names if len(name) <= _MAX_NAME_LENGTH) if has_patterns else []


def list_pattern_properties(node: dict[str, Any], listed_by: Callable[[str], list[str] | None]) -> None:
    """Turn patterns that only list names into properties, so that llguidance does not offer a property a second time.

    `listed_by` returns the names that such a pattern lists, and None for other patterns. Where a name is in both, both
    schemas must hold.
    """
    patterns, properties = node.get("patternProperties"), node.get("properties", {})
    if not patterns or not isinstance(patterns, dict) or not isinstance(properties, dict):
        return
    properties, others = dict(properties), {}
    for pattern, schema in patterns.items():
        listed = listed_by(pattern)
        if listed is None:
            others[pattern] = schema
        for name in listed or ():
            properties[name] = all_of([properties.get(name, True), schema])
    node |= {"properties": properties, "patternProperties": others}


def take_property_names(node: dict[str, Any]) -> Iterator[Schema]:
    """Take propertyNames out of `node`; yield equivalent schemas with patternProperties."""
    names = node.get("propertyNames")
    if isinstance(names, bool):
        del node["propertyNames"]
        yield True if names else {"maxProperties": 0}
        return
    patterns = _patterns_of(names) if isinstance(names, dict) else None
    if patterns is None:
        return
    del node["propertyNames"]
    yield from ({"patternProperties": {pattern: True}, "additionalProperties": False} for pattern in patterns)


def listed_names(pattern: str, names: Collection[str]) -> list[str] | None:
    """Return the names that a pattern spells out, or those of `names` that it matches if it matches only such; else
    None.
    """
    if match := _LISTED_NAMES.fullmatch(pattern):
        return list(dict.fromkeys((match[1] or match[2]).split("|")))
    return matching(pattern, names) if names and matches_only(pattern, names) else None


def matches_only(pattern: str, names: Iterable[str]) -> bool:
    """Return whether a pattern matches only these names."""
    others = ({"pattern": f"^(?:{other_strings(part)})$"} for part in _parts(names))
    return _is_empty({"pattern": pattern}, *others)


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a pattern matches."""
    return [name for name in names if not _is_empty({"pattern": pattern}, {"enum": [name]})]


def _patterns_of(names: dict[str, Any]) -> list[str] | None:
    """Return patterns that must all match, equivalent to a schema of names; None if there are none."""
    shortest, longest = names.get("minLength", 0), names.get("maxLength")
    patterns = [names["pattern"]] if "pattern" in names else []
    if "minLength" in names or "maxLength" in names:
        patterns.append(f"^(?s:.{{{int(shortest)},{'' if longest is None else int(longest)}}})$")
    values = [names["const"]] if "const" in names else names.get("enum")
    if values is not None:
        escaped = [re.escape(value) for value in values if isinstance(value, str)]
        patterns.append(f"^(?:{'|'.join(escaped)})$" if escaped else "^[^\\s\\S]$")
    known = {"pattern", "minLength", "maxLength", "const", "enum"}
    known |= {"type"} if names.get("type") == "string" else set()
    return patterns if set(names) <= known else None


def _parts(names: Iterable[str]) -> Iterator[list[str]]:
    """Split names into lists short enough to be negated as one pattern."""
    part: list[str] = []
    longest = 0
    for name in names:
        longest = max(longest, len(name))
        if longest * (len(part) + 1) > _MAX_LETTERS:
            yield part
            part, longest = [], len(name)
        part.append(name)
    if part:
        yield part


def _is_empty(*schemas: dict[str, Any]) -> bool:
    """Return whether no string matches all the schemas. With an invalid pattern it is False: llguidance reports it
    later.
    """
    from llguidance import LLMatcher

    whole = {"type": "string", "allOf": schemas}
    return _EMPTY_ERROR in LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(whole)))
