"""oneOf holds where its branches can be told apart, and is anyOf where they cannot, as in vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.constraints.compiler import GrammarCompiler
from jaxllm.constraints.schemas.loosened import loosened
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.structured_outputs import StructuredOutputsParams
from tests.constraints.grammar_walks import make_compiler, takes

CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "tricks": {"type": "integer"}}, "required": ["kind"]}
PETS = {"$defs": {"Cat": CAT, "Dog": DOG}, "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}
"""A union with a discriminator, as Pydantic writes it."""
TEXT = {"type": "string"}


@pytest.fixture(scope="module")
def compiler(smollm2_path: str) -> GrammarCompiler:
    return make_compiler(smollm2_path)


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (PETS, ['{"kind":"cat","lives":9}', '{"kind":"dog","tricks":2}'], ['{"kind":"fox"}', '{"lives":9}']),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["1", "1.5"], ['"a"']),
        ({"oneOf": [{"type": "integer", "multipleOf": 5}, {"type": "integer", "multipleOf": 3}]}, ["5", "9"], ["7"]),
        ({"oneOf": [{**TEXT, "pattern": "^a"}, {**TEXT, "pattern": "^b"}]}, ['"a"', '"bc"'], ['"c"', "1"]),
        ({"oneOf": [{**TEXT, "format": "ipv4"}, {**TEXT, "format": "ipv6"}]}, ['"1.2.3.4"', '"::1"'], ['"a"']),
        ({"oneOf": [TEXT, {**TEXT, "format": "date"}]}, ['"a"'], ["1"]),
        ({"oneOf": [{"description": "any"}, TEXT]}, ["1", '"a"'], ["a"]),
        # Where the branches can be told apart, what matches two of them is left out as before.
        ({"oneOf": [{"enum": ["a", "b"]}, TEXT]}, ['"c"'], ['"a"']),
        ({"oneOf": [{"const": 1}, {"type": "integer"}]}, ["2"], ["1"]),
        ({"oneOf": [{}, TEXT]}, ["1", "{}"], ['"a"']),
    ],
)
def test_what_matches_a_branch_is_taken(
    compiler: GrammarCompiler, smollm2_path: str, schema: dict[str, Any], good: list[str], bad: list[str], closes: bool
) -> None:
    params = StructuredOutputsParams(json=schema, disable_additional_properties=closes)
    assert [text for text in good if not takes(compiler, smollm2_path, params, text)] == []
    assert [text for text in bad if takes(compiler, smollm2_path, params, text)] == []


@pytest.mark.parametrize("schema", [{"oneOf": [True, {}]}, {"oneOf": [False, {"not": {}}]}])
def test_what_nothing_matches_is_refused(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match="schema is false"):
        compiler.check(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ("password", ['"a b"', '""'], ["1"]),
        ("binary", ['"a b"'], ["1"]),
        ("byte", ['"YWI="', '""'], ['"a b"', '"YWI"']),
    ],
)
def test_formats_of_openapi(
    compiler: GrammarCompiler, smollm2_path: str, form: str, good: list[str], bad: list[str]
) -> None:
    params = StructuredOutputsParams(json={**TEXT, "format": form})
    assert [text for text in good if not takes(compiler, smollm2_path, params, text)] == []
    assert [text for text in bad if takes(compiler, smollm2_path, params, text)] == []


def test_schemas_of_arguments_lose_what_no_grammar_can_say() -> None:
    tags = {"type": "array", "items": {**TEXT, "format": "slug"}, "uniqueItems": True}
    schema = {
        "type": "object",
        "properties": {"uniqueItems": TEXT, "format": {**TEXT, "format": "date"}, "tags": tags},
        "anyOf": [{"properties": {"tags": {"uniqueItems": True}}}, True],
        "default": {"uniqueItems": True},
    }
    assert loosened(schema) == {
        "type": "object",
        "properties": {
            "uniqueItems": TEXT,
            "format": {**TEXT, "format": "date"},
            "tags": {"type": "array", "items": TEXT},
        },
        "anyOf": [{"properties": {"tags": {}}}, True],
        "default": {"uniqueItems": True},
    }
    assert tags["uniqueItems"] is True
    assert loosened(None) is None


UNIQUE: dict[str, Any] = {"type": "array", "uniqueItems": True, "contains": {"format": "slug"}}
LOOSE: dict[str, Any] = {"type": "array", "contains": {}}


@pytest.mark.parametrize(
    ("schema", "loose"),
    [
        ({"dependencies": {"a": UNIQUE, "b": ["a"]}}, {"dependencies": {"a": LOOSE, "b": ["a"]}}),
        ({"dependentSchemas": {"a": UNIQUE}}, {"dependentSchemas": {"a": LOOSE}}),
        ({"propertyNames": {"format": "slug"}}, {"propertyNames": {}}),
        ({"unevaluatedProperties": UNIQUE}, {"unevaluatedProperties": LOOSE}),
        ({"unevaluatedItems": UNIQUE}, {"unevaluatedItems": LOOSE}),
        ({"if": UNIQUE, "then": UNIQUE, "else": UNIQUE}, {"if": UNIQUE, "then": LOOSE, "else": LOOSE}),
        # Nothing satisfies {"not": {}}.
        ({"not": {"uniqueItems": True}}, {"not": {"uniqueItems": True}}),
        ({"not": {"format": "slug"}}, {"not": {"format": "slug"}}),
    ],
)
def test_schemas_are_loosened_wherever_that_allows_more(schema: dict[str, Any], loose: dict[str, Any]) -> None:
    assert loosened(schema) == loose
