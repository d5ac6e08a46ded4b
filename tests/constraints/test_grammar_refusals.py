"""What cannot be constrained is refused, by the name of the option, keyword or limit."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxllm.constraints.compiler import GrammarCompiler
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.structured_outputs import StructuredOutputsParams
from tests.constraints.grammar_walks import make_compiler

pytestmark = pytest.mark.constraints


@pytest.fixture(scope="module")
def compiler(smollm2_path: str) -> GrammarCompiler:
    return make_compiler(smollm2_path)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["a"]}, "exactly one"),
        ({"json": 3}, "json must be"),
        ({"json": {"a": math.nan}}, "json"),
        ({"json": {"a": {1, 2}}}, "json"),
        ({"json": {"maximum": 2**70}}, "json.*2\\*\\*64"),
        ({"json": {"const": "\ud800"}}, "json.*surrogates"),
        ({"regex": "\ud800"}, "regex.*surrogates"),
        ({"choice": ["a", "\ud800"]}, "choice.*surrogates"),
        ({"json": dict}, "Pydantic"),
        ({"json": "x" * (2**20 + 1)}, "json"),
        ({"json": {"description": "x" * 2**20}}, "json"),
        ({"choice": []}, "choice"),
        ({"choice": "abc"}, "choice"),
        ({"choice": [3]}, "choice"),
        ({"choice": [""]}, "choice"),
        ({"choice": ["x" * 2**19, "y" * 2**19, "z"]}, "choice"),
        ({"choice": [str(i) for i in range(2**16 + 1)]}, "choice"),
        ({"regex": ""}, "regex"),
        ({"regex": 3}, "regex"),
        ({"json_object": 1}, "json_object"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace"),
        ({"choice": ["a"], "whitespace_pattern": " "}, "whitespace_pattern"),
        ({"grammar": "start: A", "disable_additional_properties": True}, "disable_additional_properties"),
        ({"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True}, "whitespace_pattern"),
        ({"json_object": True, "disable_any_whitespace": 1}, "disable_any_whitespace"),
    ],
)
def test_params(fields: dict[str, Any], named: str):
    with pytest.raises(VLLMValidationError, match=named):
        StructuredOutputsParams(**fields)


def test_a_schema_is_read_as_json():
    """A schema is copied as JSON: what looks for lists sees its tuples too, and later changes do not reach it."""
    schema = {"enum": ("a", 1), "properties": {1: True}}
    params = StructuredOutputsParams(json=schema)
    schema["type"] = "object"
    assert params.json == {"enum": ["a", 1], "properties": {"1": True}}


def test_with_defaults_keeps_what_was_asked_for():
    on = {"disable_any_whitespace": True, "disable_additional_properties": True}
    assert StructuredOutputsParams(json_object=True).with_defaults(**on).disable_any_whitespace
    spaced = StructuredOutputsParams(json_object=True, whitespace_pattern=" ").with_defaults(**on)
    assert not spaced.disable_any_whitespace
    assert spaced.disable_additional_properties
    assert StructuredOutputsParams(regex="a").with_defaults(**on) == StructuredOutputsParams(regex="a")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"json": {"uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$dynamicRef": "#x"}}, r"\$dynamicRef"),
        ({"json": {"type": "string", "format": "regex"}}, "format"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
        ({"json": {"type": "what"}}, "what"),
        ({"json": {"enum": 5}}, "enum must be an array"),
        ({"json": {"unevaluatedProperties": False, "properties": 5}}, "properties must be an object"),
        ({"json": {"propertyNames": {"minLength": "x"}}}, "minLength must be a number"),
        ({"json": {"uniqueItems": True, "maxItems": "x"}}, "maxItems must be a number"),
        ({"json": {"$ref": "http://example.com/schema"}}, "remote references"),
        ({"json": {"$ref": "#/$defs/x"}}, "leads nowhere"),
        ({"json": {"$id": "http://a/", "$ref": "http://[bad"}}, "no reference|remote references"),
        ({"json": {"$ref": "#"}}, "no output matches"),
        ({"json": {"type": "object", "minProperties": 3}}, "minProperties"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "minimum"),
        ({"json": "[1]"}, "an object"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": '{"minimum": NaN}'}, "NaN"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "a{999999}"}, "more than 65536 bytes"),
        ({"choice": ["ab" * 2**16]}, "more than 65536 bytes"),
        ({"json": {"const": "ab" * 2**16}}, "more than 65536 bytes"),
        ({"grammar": 'root ::= "a"{999999}'}, "more than 65536 bytes"),
        ({"regex": r"[^\s\S]"}, "no output matches"),
        ({"grammar": "start: ("}, "grammar"),
        ({"grammar": 'start: %json {"$ref": "#/$defs/x"}'}, "leads nowhere"),
        ({"grammar": "start: %json " + '{"items":' * 101 + "{}" + "}" * 101}, "100 levels"),
        ({"grammar": "start: %json " + '{"items":' * 100_000}, "levels|grammar"),
        ({"json_object": True, "whitespace_pattern": "("}, "unclosed|group"),
        ({"json": ""}, "not valid JSON"),
        ({"json_object": False}, "must be True"),
        ({"grammar": "start: missing"}, "Invalid grammar specification: .*missing"),
        ({"grammar": 'top ::= "a"'}, "Invalid grammar specification: .*root"),
        ({"grammar": "start: " + " ".join(f'"{i}" A' for i in range(40_000)) + "\nA: /a/"}, "smaller or simpler"),
        ({"structural_tag": "[]"}, "object"),
        ({"structural_tag": "{}"}, "format"),
    ],
)
def test_grammars(compiler: GrammarCompiler, fields: dict[str, Any], named: str):
    with pytest.raises(VLLMValidationError, match=named) as raised:
        compiler.check(StructuredOutputsParams(**fields))
    assert raised.value.parameter == next(iter(fields))
    assert f"structured_outputs.{raised.value.parameter}" in str(raised.value)
    assert len(str(raised.value)) < 600
