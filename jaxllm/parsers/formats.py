"""Formats of structural tags for outputs with calls, as `constraints/structural_tag.py` reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


def text(value: str) -> dict[str, Any]:
    """Return the format of one text."""
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> dict[str, Any]:
    """Return the format of what a regular expression matches."""
    return {"type": "regex", "pattern": pattern}


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the format of JSON that a schema allows."""
    return {"type": "json_schema", "json_schema": schema}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    """Return the format of one after the other."""
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: dict[str, Any]) -> dict[str, Any]:
    """Return the format of what matches any of these."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def optional(element: dict[str, Any]) -> dict[str, Any]:
    """Return the format of something that may be left out."""
    return either(element, text(""))


def tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    """Return the format of something between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def quoted(name: str) -> str:
    """Return a name as JSON text."""
    return json.dumps(name, ensure_ascii=False)


def calls(
    tags: Iterable[dict[str, Any]], trigger: str, *, separator: str, at_least_one: bool, parallel: bool
) -> dict[str, Any]:
    """Return the format of calls, each between texts of its own of which the first begins with `trigger`.

    With `at_least_one` there are only calls, with `separator` between them; else free text before and between them.
    """
    given = list(tags)
    if at_least_one:
        form: dict[str, Any] = {"type": "tags_with_separator", "tags": given, "separator": separator}
        return {**form, "at_least_one": True, "stop_after_first": not parallel}
    return {"type": "triggered_tags", "triggers": [trigger], "tags": given, "stop_after_first": not parallel}
