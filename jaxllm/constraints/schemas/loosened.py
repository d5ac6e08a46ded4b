"""Remove what no grammar can express from the schemas of tools' arguments, so that the rest can be enforced."""

from __future__ import annotations

from typing import Any

from jaxllm.constraints.schemas.rewrites import FORMATS

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")
_SCHEMAS = (
    *("items", "additionalItems", "unevaluatedItems", "contains", "then", "else"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
)


def loosened(schema: Any) -> Any:
    """Return a schema without `uniqueItems`, and without formats that no grammar supports.

    The rest stays. So do the schemas of `not` and `if`: without a keyword they would match more values, and the schema
    around them would allow fewer.
    """
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
