"""Schemas of tools' arguments without what no grammar can say: calls are enforced as far as a grammar can."""

from __future__ import annotations

from typing import Any

from jaxllm.constraints.schema_rewrites import FORMATS

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")
_SCHEMAS = ("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else")


def loosened(schema: Any) -> Any:
    """Return a schema without `uniqueItems`, and without formats that no grammar here knows; the rest is as it was."""
    if not isinstance(schema, dict):
        return schema
    node = {key: value for key, value in schema.items() if key != "uniqueItems"}
    form = node.get("format")
    if isinstance(form, str) and form not in FORMATS:
        del node["format"]
    for key, value in node.items():
        if key in _MAPS and isinstance(value, dict):
            node[key] = {name: loosened(inner) for name, inner in value.items()}
        elif key in _LISTS and isinstance(value, list):
            node[key] = [loosened(inner) for inner in value]
        elif key in _SCHEMAS:
            node[key] = [loosened(inner) for inner in value] if isinstance(value, list) else loosened(value)
    return node
