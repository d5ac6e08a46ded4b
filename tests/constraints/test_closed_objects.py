"""Objects are closed to what their schema lists: which texts a grammar takes, and which it does not."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema
import pytest

from jaxllm.config.groups import StructuredOutputsConfig
from jaxllm.constraints.compiler import GrammarCompiler
from jaxllm.constraints.schemas import name_patterns
from jaxllm.constraints.schemas.json_schema import schema_text
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.structured_outputs import StructuredOutputsParams
from tests.constraints.grammar_walks import make_compiler, smollm2_tokenizer, takes, walk_all
from tests.constraints.schema_corpus import corpus

pytestmark = pytest.mark.constraints

INTEGER = {"type": "integer"}
A: dict[str, Any] = {"type": "object", "properties": {"a": INTEGER}}
B: dict[str, Any] = {"type": "object", "properties": {"b": INTEGER}}
X: dict[str, Any] = {"type": "object", "patternProperties": {"^x": INTEGER}}
TREE: dict[str, Any] = {**A, "properties": {"a": INTEGER, "in": {"type": "array", "items": {"$ref": "#"}}}}


@pytest.fixture(scope="module")
def compiler(smollm2_path: str) -> GrammarCompiler:
    return make_compiler(smollm2_path)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # As xgrammar's strict mode has them.
        (A, ['{"a":1}', "{}"], ['{"a":1,"b":1}', '{"b":1}']),
        ({"properties": {"a": INTEGER}}, ['{"a":1}'], ['{"b":1}']),
        ({**A, "type": ["object", "null"]}, ['{"a":1}', "null"], ['{"a":1,"b":1}']),
        ({"type": "object", "properties": {"o": A}}, ['{"o":{"a":1}}'], ['{"o":{"b":1}}']),
        ({"type": "array", "items": A}, ['[{"a":1}]'], ['[{"b":1}]']),
        ({"type": "object", "additionalProperties": A}, ['{"k":{"a":1}}'], ['{"k":{"b":1}}']),
        ({"anyOf": [A, {"type": "null"}]}, ['{"a":1}', "null"], ['{"a":1,"b":1}']),
        ({"oneOf": [{**A, "required": ["a"]}, {**B, "required": ["b"]}]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}']),
        ({"$defs": {"o": A}, "$ref": "#/$defs/o"}, ['{"a":1}'], ['{"a":1,"b":1}']),
        (TREE, ['{"a":1,"in":[{"in":[{"a":2}]}]}'], ['{"in":[{"b":1}]}', '{"in":[{"in":[{"b":1}]}]}']),
        (X, ['{"x1":1}'], ['{"b":1}', '{"x1":""}']),
        ({"type": "object", "properties": {}}, ["{}"], ['{"b":1}']),
        # What lists nothing, or mentions other properties, stays open.
        ({"type": "object"}, ["{}", '{"b":1}'], []),
        ({"type": "object", "description": "anything"}, ['{"b":1}'], []),
        ({"type": "object", "required": ["b"]}, ['{"b":1,"c":2}'], ["{}"]),
        ({"type": "object", "properties": {"o": {"type": "object"}}}, ['{"o":{"z":1}}'], ['{"z":1}']),
        ({**A, "additionalProperties": True}, ['{"a":1,"b":1}'], []),
        ({**A, "additionalProperties": INTEGER}, ['{"a":1,"b":1}'], ['{"b":""}']),
        ({**A, "unevaluatedProperties": True}, ['{"a":1,"b":1}'], []),
        ({**A, "unevaluatedProperties": INTEGER}, ['{"a":1,"b":1}'], ['{"b":""}']),
        ({**A, "unevaluatedProperties": False}, ['{"a":1}'], ['{"b":1}']),
        ({**A, "minProperties": 2, "required": ["a"]}, ['{"a":1,"b":1}'], ['{"a":1}']),
        ({"anyOf": [{**A, "additionalProperties": True}, {**B, "required": ["b"]}]}, ['{"c":1}'], ['{"a":""}']),
        # An object in parts lists what all of its parts list.
        ({"allOf": [A, B]}, ['{"a":1,"b":1}', '{"b":1}'], ['{"c":1}', '{"b":""}']),
        ({**B, "allOf": [A]}, ['{"b":1,"a":1}'], ['{"c":1}']),
        ({"allOf": [A, {"required": ["a"]}]}, ['{"a":1}'], ["{}", '{"a":1,"c":1}']),
        ({"allOf": [A, {**B, "additionalProperties": True}]}, ['{"a":1,"c":1}'], ['{"a":""}']),
        ({"$defs": {"a": A}, "allOf": [{"$ref": "#/$defs/a"}, B]}, ['{"a":1,"b":1}'], ['{"c":1}']),
        (
            {"$defs": {"a": A}, "properties": {"l": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
            ['{"l":{"a":1},"a":1}', '{"a":1}'],
            ['{"l":{"l":1}}', '{"b":1}'],
        ),
        ({**A, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"c":1}', "{}"]),
        (
            {"properties": {"k": INTEGER}, "required": ["k"], "anyOf": [A, B]},
            ['{"k":1,"a":1}', '{"k":1,"b":1}'],
            ['{"k":1,"a":1,"b":1}', '{"k":1,"c":1}'],
        ),
        (
            {"allOf": [{"anyOf": [A, B]}, {"properties": {"k": INTEGER}}]},
            ['{"k":1}', '{"a":1}'],
            ['{"c":1}', '{"a":1,"b":1}'],
        ),
        (
            {**A, "if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": B},
            ['{"a":1,"b":1}', '{"a":2}'],
            ['{"a":1,"c":1}'],
        ),
        ({**A, "required": ["b"]}, ['{"a":1,"b":2}', '{"b":null}'], ['{"a":1}', '{"b":1,"c":1}']),
        ({**A, "dependentRequired": {"a": ["b"]}}, ['{"a":1,"b":1}', '{"b":1}'], ['{"a":1}', '{"c":1}']),
        # What is only compared with means what it says.
        ({**A, "not": {"properties": {"a": {"const": 1}}, "required": ["a"]}}, ['{"a":2}'], ['{"a":1}', '{"c":1}']),
    ],
)
def test_properties_that_are_taken(
    compiler: GrammarCompiler, smollm2_path: str, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    before = json.dumps(schema)
    params = StructuredOutputsParams(json=schema, disable_additional_properties=True)
    assert [text for text in good if not takes(compiler, smollm2_path, params, text)] == []
    assert [text for text in bad if takes(compiler, smollm2_path, params, text)] == []
    for text in good:
        jsonschema.validate(json.loads(text), schema)
    assert json.dumps(schema) == before


def test_every_schema_of_the_corpus_that_is_not_refused_open(compiler: GrammarCompiler, smollm2_path: str) -> None:
    tokenizer = smollm2_tokenizer(smollm2_path)
    for case in corpus():
        try:
            compiler.check(StructuredOutputsParams(json=case.schema))
        except ValueError:
            continue
        params = StructuredOutputsParams(json=case.schema, disable_additional_properties=True)
        walks = walk_all(compiler, tokenizer, params, 2)
        assert all(case.is_valid(walk.text) for walk in walks if walk.ended), (case, walks)


@pytest.mark.parametrize(
    ("settings", "closes"),
    [
        ({}, True),
        ({"backend": "xgrammar"}, True),
        ({"backend": "guidance"}, False),
        ({"backend": "guidance", "disable_additional_properties": True}, True),
    ],
)
def test_settings(settings: dict[str, Any], closes: bool) -> None:
    assert StructuredOutputsConfig(**settings).closes_objects is closes


def parts(count: int, properties: int = 1, **fields: Any) -> list[dict[str, Any]]:
    """Make schemas that list properties of their own."""
    return [{"properties": {f"p{i}_{j}": INTEGER for j in range(properties)}, **fields} for i in range(count)]


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    return json.loads(
        schema_text("json", schema, StructuredOutputsParams(json=schema, disable_additional_properties=True))
    )


def test_each_part_gets_the_names_of_the_others_once() -> None:
    branches = closed({"allOf": parts(20, 20)})["allOf"]
    assert [len(part["properties"]) for part in branches] == [400] * 20
    assert all(part["properties"][f"p{i}_3"] == INTEGER for i, part in enumerate(branches))
    assert [part["additionalProperties"] for part in branches] == [False] * 20


def test_alternatives_do_not_get_the_names_of_each_other() -> None:
    branches = closed({"properties": {"k": INTEGER}, "anyOf": parts(4_000)})["anyOf"]
    assert [list(part["properties"]) for part in branches] == [[f"p{i}_0", "k"] for i in range(4_000)]


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": parts(2_000)},
        {"allOf": parts(20_000)},
        {"allOf": [{"patternProperties": {f"^p{i}$": INTEGER}} for i in range(2_000)]},
        {"properties": {f"k{i}": INTEGER for i in range(2_000)}, "anyOf": parts(4_000)},
        {
            "$defs": {"a": {**A, "required": [f"r{i}" for i in range(2_000)], "additionalProperties": True}},
            "anyOf": [{"required": [f"p{i}"], "$ref": "#/$defs/a"} for i in range(4_000)],
        },
    ],
    ids=["2,000 parts", "20,000 parts", "2,000 patterns", "alternatives", "required"],
)
def test_parts_that_would_get_too_many_names_are_refused_at_once(schema: dict[str, Any]) -> None:
    start = time.perf_counter()
    with pytest.raises(
        VLLMValidationError, match=r"^structured_outputs\.json: .*give them additionalProperties"
    ) as error:
        closed(schema)
    assert error.value.parameter == "json"
    assert time.perf_counter() - start < 10.0  # without a bound: minutes


def test_a_pattern_is_compared_with_the_names_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr(name_patterns, "matches_only", lambda pattern, _: compared.append(pattern) or False)
    patterns = [f"^{i}x" for i in range(20)]
    branches = closed({"allOf": [*({"patternProperties": {each: INTEGER}} for each in patterns), *parts(20)]})["allOf"]
    assert [len(part["patternProperties"]) for part in branches] == [20] * 40
    assert sorted(compared) == sorted(patterns)


def test_parts_that_give_additional_properties_are_as_many_as_they_like() -> None:
    schema = {"allOf": parts(2_000, additionalProperties=True)}
    assert closed(schema)["allOf"] == schema["allOf"]


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {f"{i}{'a' * 2_000}": INTEGER}} for i in range(400)]},
        {
            "$defs": {"a": {"properties": {"a": {"x-note": [0] * 60_000}}}},
            "anyOf": [{"required": [f"p{i}"], "$ref": "#/$defs/a"} for i in range(1_000)],
        },
    ],
    ids=["long names", "a keyword of one's own"],
)
def test_closed_objects_that_would_be_too_long_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(
        VLLMValidationError, match=r"^structured_outputs\.json: more than \d+ characters .*additionalPr"
    ):
        closed(schema)
