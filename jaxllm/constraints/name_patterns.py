"""Patterns of property names, compared with lists of names as llguidance reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from jaxllm.constraints.schema_negation import other_strings

_MAX_LETTERS = 5_000
_MAX_NAME_LENGTH = 80
"""Each letter takes a parenthesis inside that of the one before; longer names are not compared."""
_EMPTY_ERROR = "Regex is empty"


def property_names(schema: Any) -> list[str]:
    """Collect the names that `properties` and `required` have anywhere in a schema that has patterns of names."""
    names: set[str] = set()
    has_patterns = False
    pending = [schema]
    while pending:
        node = pending.pop()
        pending += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        if isinstance(node, dict):
            has_patterns = has_patterns or "patternProperties" in node or "propertyNames" in node
            for key, kind in (("properties", dict), ("required", list)):
                named = node.get(key)
                names.update(name for name in (named if isinstance(named, kind) else ()) if isinstance(name, str))
    return sorted(name for name in names if len(name) <= _MAX_NAME_LENGTH) if has_patterns else []


def matches_only(pattern: str, names: Iterable[str]) -> bool:
    """Say whether a pattern matches none but these names."""
    others = ({"pattern": f"^(?:{other_strings(part)})$"} for part in _parts(names))
    return _is_empty({"pattern": pattern}, *others)


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return those of the names that a pattern matches."""
    return [name for name in names if not _is_empty({"pattern": pattern}, {"enum": [name]})]


def _parts(names: Iterable[str]) -> Iterator[list[str]]:
    """Split names into lists of which each can be negated as one pattern."""
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
    """Say whether no string matches all the schemas; llguidance will complain of a pattern that it cannot read."""
    from llguidance import LLMatcher

    whole = {"type": "string", "allOf": schemas}
    return _EMPTY_ERROR in LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(whole)))
