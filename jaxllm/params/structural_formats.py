"""Constraints as the formats of structural tags, so that several make one."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from jaxllm.params.structured_outputs import StructuredOutputsParams


def as_format(params: StructuredOutputsParams) -> dict[str, Any] | None:
    """Return the format that the same outputs match.

    None for what the older form of structural tags says, and for what is no constraint: the engine refuses that.
    """
    try:
        return _as_format(params)
    except (ValueError, RecursionError, AttributeError):
        return None


def _as_format(params: StructuredOutputsParams) -> dict[str, Any] | None:
    match params.kind:
        case "json":
            schema = json.loads(params.json) if isinstance(params.json, str) else params.json
            return {"type": "json_schema", "json_schema": schema}
        case "json_object" if params.json_object is True:
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": params.regex}
        case "grammar":
            return {"type": "grammar", "grammar": params.grammar}
        case "choice":
            return either([{"type": "const_string", "value": each} for each in params.choice or ()])
        case "structural_tag":
            return json.loads(params.structural_tag or "").get("format")
        case _:
            return None


def either(formats: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the format of what matches any of these."""
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}


def from_format(form: dict[str, Any], like: StructuredOutputsParams | None = None) -> StructuredOutputsParams:
    """Return the constraint of a format, with the options for JSON of another one."""
    tag = msgspec.json.encode({"type": "structural_tag", "format": form}).decode()
    if like is None:
        return StructuredOutputsParams(structural_tag=tag)
    return StructuredOutputsParams(
        structural_tag=tag,
        disable_any_whitespace=like.disable_any_whitespace,
        disable_additional_properties=like.disable_additional_properties,
        whitespace_pattern=like.whitespace_pattern,
    )
