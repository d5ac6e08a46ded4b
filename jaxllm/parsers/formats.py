"""Build formats of structural tags (`constraints/structural_tag.py`), also from constraints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from jaxllm.params.structured_outputs import StructuredOutputsParams

_MOST_FIRST = 8
"""The maximum number of optional parts that may each be the first: a grammar grows with its square."""


def text(value: str) -> dict[str, Any]:
    """Return the format of one text."""
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> dict[str, Any]:
    """Return the format of a regular expression."""
    return {"type": "regex", "pattern": pattern}


def json_schema(schema: Any) -> dict[str, Any]:
    """Return the format of JSON that a schema allows."""
    return {"type": "json_schema", "json_schema": schema}


def any_text(*excluded: str) -> dict[str, Any]:
    """Return the format of free text without any of the excluded texts."""
    return {"type": "any_text", **({"excluded_str": [*excluded]} if excluded else {})}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    """Return the format of a sequence."""
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: dict[str, Any]) -> dict[str, Any]:
    """Return the format of a choice."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def optional(element: dict[str, Any]) -> dict[str, Any]:
    """Return the format of an optional part."""
    return either(element, text(""))


def members(parts: Sequence[tuple[dict[str, Any], bool]], separator: str) -> dict[str, Any]:
    """Return the format of parts in this order with a separator between them, where only some are required.

    Each part is a format and whether it is required. Of many optional parts before a required one, each has its
    separator after it, also if it is the last.
    """
    num_first = next((i for i, (_, is_required) in enumerate(parts) if is_required), len(parts))
    rest = [sequence(text(separator), form) for form, _ in parts]
    later = [form if is_required else optional(form) for form, (_, is_required) in zip(rest, parts, strict=True)]
    if num_first > _MOST_FIRST:
        early = [optional(sequence(form, text(separator))) for form, _ in parts[:num_first]]
        return sequence(*early, *(form for form, _ in parts[num_first : num_first + 1]), *later[num_first + 1 :])
    firsts = [sequence(parts[i][0], *later[i + 1 :]) for i in range(min(num_first + 1, len(parts)))]
    return either(*firsts, *([text("")] if num_first == len(parts) else []))


def tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    """Return the format of content between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def quoted(name: str) -> str:
    """Return a name as JSON text."""
    return json.dumps(name, ensure_ascii=False)


def calls(
    tags: Iterable[dict[str, Any]], trigger: str, *, separator: str, at_least_one: bool, parallel: bool
) -> dict[str, Any]:
    """Return the format of calls, each between two texts; the first of these begins with `trigger`.

    With `at_least_one` only calls match, with `separator` between them; else also free text before and between them.
    """
    tag_list = list(tags)
    if at_least_one:
        form: dict[str, Any] = {"type": "tags_with_separator", "tags": tag_list, "separator": separator}
        return {**form, "at_least_one": True, "stop_after_first": not parallel}
    return {"type": "triggered_tags", "triggers": [trigger], "tags": tag_list, "stop_after_first": not parallel}


def listed_calls(
    tags: Iterable[dict[str, Any]],
    ends: tuple[str, str],
    trigger: str,
    *,
    separator: str,
    at_least_one: bool,
    parallel: bool,
) -> dict[str, Any]:
    """Return the format of calls with a separator between them, all between two texts; the first begins with `trigger`.

    With `at_least_one` only calls match, else also free text, before them or alone.
    """
    listed = tag(ends[0], calls(tags, trigger, separator=separator, at_least_one=True, parallel=parallel), ends[1])
    return listed if at_least_one else calls([listed], trigger, separator="", at_least_one=False, parallel=False)


def as_format(params: StructuredOutputsParams) -> dict[str, Any] | None:
    """Return the format that matches the same outputs as a constraint.

    None for the older form of structural tags, and for an invalid constraint, which the engine refuses.
    """
    try:
        return _as_format(params)
    except (ValueError, RecursionError, AttributeError):
        return None


def _as_format(params: StructuredOutputsParams) -> dict[str, Any] | None:
    match params.kind:
        case "json":
            schema = json.loads(params.json) if isinstance(params.json, str) else params.json
            return json_schema(schema)
        case "json_object" if params.json_object is True:
            return json_schema({"type": "object"})
        case "regex":
            return regex(params.regex or "")
        case "grammar":
            return {"type": "grammar", "grammar": params.grammar}
        case "choice":
            return either(*map(text, params.choice or ()))
        case "structural_tag":
            return json.loads(params.structural_tag or "").get("format")
        case _:
            return None


def from_format(form: dict[str, Any], like: StructuredOutputsParams | None = None) -> StructuredOutputsParams:
    """Return the constraint for a format, with another constraint's JSON options."""
    tag = msgspec.json.encode({"type": "structural_tag", "format": form}).decode()
    if like is None:
        return StructuredOutputsParams(structural_tag=tag)
    return StructuredOutputsParams(
        structural_tag=tag,
        disable_any_whitespace=like.disable_any_whitespace,
        disable_additional_properties=like.disable_additional_properties,
        whitespace_pattern=like.whitespace_pattern,
    )
