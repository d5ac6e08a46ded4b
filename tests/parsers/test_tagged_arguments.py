"""Arguments between tags: what ends a value, and whether it is a string."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.pieces import gather
from jaxllm.parsers.registry import ToolParserManager
from jaxllm.parsers.value_types import allowed_types
from tests.parsers.outputs import Call, Form, calls_of, read

DEFINITIONS: dict[str, Any] = {
    "word": {"type": "string"},
    "a/b": {"$ref": "#/$defs/word"},
    "count": {"type": "integer"},
    "loop": {"$ref": "#/$defs/loop"},
    "tree": {"anyOf": [{"$ref": "#/$defs/tree"}] * 60},
}
SCHEMAS: list[tuple[Any, set[str]]] = [
    ({"type": "string"}, {"string"}),
    ({"$ref": "#/$defs/word"}, {"string"}),
    ({"$ref": "#/$defs/a~1b", "description": "x"}, {"string"}),
    ({"allOf": [{"$ref": "#/$defs/word"}], "default": "x"}, {"string"}),
    ({"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]}, {"string"}),
    ({"anyOf": [{"$ref": "#/$defs/word"}, {"type": "null"}]}, {"string", "null"}),
    ({"oneOf": [{"$ref": "#/$defs/count"}, {"type": "boolean"}]}, {"integer", "boolean"}),
    ({"type": "string", "anyOf": [{"format": "date"}, {"format": "time"}]}, {"string"}),
    ({"type": ["string", "null"]}, {"string", "null"}),
    ({"type": "number"}, {"number", "integer"}),
    ({"allOf": [{"type": "number"}, {"type": "integer"}]}, {"integer"}),
    ({"enum": ["on", "off"]}, {"string"}),
    ({"const": 1.5}, {"number", "integer"}),
    ({"$ref": "#/$defs/loop"}, set()),
    ({"$ref": "#/$defs/tree"}, set()),
    ({"$ref": "#/nowhere"}, set()),
    ({"$ref": 3, "type": "boolean"}, {"boolean"}),
    ({"type": "float"}, {"number", "integer"}),
    ({"type": ["Bool", "None"]}, {"boolean"}),
    ({"type": "any"}, set()),
    ({"description": "x"}, set()),
    (True, set()),
]


@pytest.mark.parametrize(("schema", "types"), SCHEMAS)
def test_types_are_found_wherever_a_schema_says_them(schema: Any, types: set[str]) -> None:
    assert allowed_types(schema, {"$defs": DEFINITIONS}) == types


def qwen(key: str, value: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"


def glm(key: str, value: str) -> str:
    return f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"


@pytest.mark.parametrize(("parser", "write"), [("qwen3_xml", qwen), ("glm45", glm)])
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"$ref": "#/$defs/word"}, "99", "99"),
        ({"allOf": [{"$ref": "#/$defs/word"}]}, "true", "true"),
        ({"anyOf": [{"$ref": "#/$defs/word"}, {"type": "null"}]}, "99", "99"),
        ({"anyOf": [{"$ref": "#/$defs/word"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, '"use strict"', '"use strict"'),
        ({"type": ["string", "integer"]}, '"5"', '"5"'),
        ({"oneOf": [{"type": "string"}, {"$ref": "#/$defs/count"}]}, "99", 99),
        ({"oneOf": [{"type": "string"}, {"$ref": "#/$defs/count"}]}, "9.5", "9.5"),
        ({"$ref": "#/$defs/count"}, "99", 99),
        ({"type": ["boolean", "null"]}, "True", True),
        ({"type": "integer"}, "soon", "soon"),
        ({"type": "integer"}, "[1]", [1]),
        ({"type": "integer"}, "007", 7),
        ({"type": "number"}, ".5", 0.5),
        ({"type": "number"}, "inf", "inf"),
        ({"type": "number"}, f"+{'9' * 400}", f"+{'9' * 400}"),
        ({"type": ["integer", "string"]}, "007", "007"),
        ({"type": ["null", "string"]}, "None", "None"),
        ({"type": ["null", "integer"]}, "None", None),
        ({"description": "a code"}, "0012", "0012"),
        ({"description": "a code"}, "12", "12"),
        (None, "12", "12"),
    ],
)
def test_types_decide_whether_a_bare_value_is_a_string(
    parser: str, write: Any, schema: Any, text: str, value: Any
) -> None:
    properties = {} if schema is None else {"a": schema}
    tool = FunctionTool(name="f", parameters={"type": "object", "properties": properties, "$defs": DEFINITIONS})
    parsed = gather(read(Form(parser, str), write("a", text), tools=[tool]))
    assert calls_of(parsed) == [("f", {"a": value})]


TOOL = FunctionTool(name="f", parameters={"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}})
BOTH: list[Call] = [("f", {"a": "x", "b": 2})]
QWEN: list[tuple[str, list[Call], str]] = [
    ("<parameter=a>\nx\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>", BOTH, ""),
    ("<parameter=a>\nx\n<parameter=b>\n2\n</function>\n</tool_call>", BOTH, ""),
    ("<parameter=a>\nx\n<parameter=b>\n2\n</tool_call>", BOTH, ""),
    ("<parameter=a>x<parameter=b>2</function></tool_call> So.", BOTH, " So."),
    (
        "<parameter=a>\nx\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n<parameter=b>2</parameter>\n</function>",
        [("f", {"a": "x"}), ("f", {"b": 2})],
        "",
    ),
    ("<parameter=a>\nx\n<function=f>\n</function>", [("f", {"a": "x\n<function=f>"})], ""),
    (
        "<parameter=a>\nfirst <tool_call> then <function=rm> end\n</parameter>\n</function>\n</tool_call>",
        [("f", {"a": "first <tool_call> then <function=rm> end"})],
        "",
    ),
    (
        "<parameter=a>\nthe </function> tag\n</parameter>\n</function>\n</tool_call>",
        [("f", {"a": "the </function> tag"})],
        "",
    ),
    ("<parameter=a>\n<tool_call>\n</parameter>\n</function>\n</tool_call>", [("f", {"a": "<tool_call>"})], ""),
]
QWEN += [
    (
        "\nso\n<parameter=a>\nx\n</parameter>\nand\n<parameter=b>2</parameter>\n</function>\n</tool_call>",
        BOTH,
        "so and\n",
    ),
    ("<parameter= a >\nx\n</parameter>\n<parameter=b>2</parameter>", BOTH, ""),
    ("<parameter=b\n<parameter=a>\nx\n</parameter>\n</function>", [("f", {"a": "x"})], "b\n"),
]
GLM: list[tuple[str, list[Call], str]] = [
    ("<arg_key>a</arg_key>\n<arg_value>x\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>", BOTH, ""),
    ("<arg_key>a</arg_key>\n<arg_value>x\n<arg_key>b</arg_key>\n<arg_value>2\n</tool_call> So.", BOTH, " So."),
    (
        "<arg_key>a</arg_key><arg_value>x<tool_call>f\n<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>",
        [("f", {"a": "x<tool_call>f", "b": 2})],
        "",
    ),
    (
        "<arg_key>a</arg_key><arg_value>run <tool_call>rm</tool_call> now</arg_value></tool_call>",
        [("f", {"a": "run <tool_call>rm</tool_call> now"})],
        "",
    ),
    ("<arg_key>a</arg_key><arg_value></tool_call></arg_value></tool_call>", [("f", {"a": "</tool_call>"})], ""),
]
GLM += [
    ("<arg_key>a</arg_key>x<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>", [("f", {"b": 2})], "a x\n"),
    ("<arg_key>a</arg_key><arg_value>x</arg_value><arg_key>b</arg_key><arg_value>2</arg_value>", BOTH, ""),
    ("", [("f", {})], ""),
]
ENDS = [("qwen3_xml", "<tool_call>\n<function=f>\n", *each) for each in QWEN]
ENDS += [("glm45", "<tool_call>f\n", *each) for each in GLM]


@pytest.mark.parametrize(("parser", "head", "body", "calls", "text"), ENDS)
def test_a_value_without_its_end_ends_at_the_next_mark(
    parser: str, head: str, body: str, calls: list[Call], text: str
) -> None:
    form, output = Form(parser, str), head + body
    pieces = read(form, output, tools=[TOOL])
    parsed = gather(pieces)
    assert calls_of(parsed) == calls
    assert parsed.text == text
    assert read(form, *output, tools=[TOOL]) == pieces
    for i in range(len(output)):
        assert read(form, output[:i], output[i:], tools=[TOOL]) == pieces


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("f</function>", [("f", {})]),
        ("f</tool_call>", [("f", {})]),
        ("f\n<parameter=a>\nx\n</parameter>", [("f", {"a": "x"})]),
        ("f<tool_call><function=f></function></tool_call>", [("f", {}), ("f", {})]),
        (" f >", [("f", {})]),
    ],
)
def test_a_name_without_its_end_ends_at_the_next_mark(name: str, calls: list[Call]) -> None:
    output = f"<tool_call>\n<function={name}"
    for texts in ([output], list(output)):
        parsed = gather(read(Form("qwen3_xml", str), *texts, tools=[TOOL]))
        assert (calls_of(parsed), parsed.text) == (calls, "")


def test_a_call_that_is_cut_stays_open() -> None:
    parser = ToolParserManager.get_tool_parser("qwen3_xml")([TOOL])
    pieces = parser.feed("<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n") + parser.finish(is_cut=True)
    assert gather(pieces).calls[0].arguments == '{"a": "x"'


@pytest.mark.parametrize("tail", ["", "\n", "\n</param", "</param", "\n</tool", "\n</function"])
def test_a_value_that_is_cut_has_no_part_of_a_mark(tail: str) -> None:
    output = f"<tool_call>\n<function=f>\n<parameter=a>\nx{tail}"
    [call] = gather(read(Form("qwen3_xml", str), output, tools=[TOOL])).calls
    assert call.arguments == '{"a": "x'


@pytest.mark.parametrize(("parser", "write"), [("qwen3_xml", qwen), ("glm45", glm)])
def test_a_string_comes_as_the_model_writes_it(parser: str, write: Any) -> None:
    """A file that is written by a call takes minutes, in which a stream must not be silent."""
    value = 'def f():\n    return "é"\n\n# a < b\n'
    output = write("a", value)
    seen = 0
    for length in range(output.index(value), output.index(value) + len(value)):
        reading = ToolParserManager.get_tool_parser(parser)([TOOL])
        shown = gather(reading.feed(output[:length])).calls[0].arguments
        written = output[output.index(value) : length]
        assert json.dumps({"a": written}, ensure_ascii=False)[:-2].startswith(shown)
        assert len(json.dumps({"a": written}, ensure_ascii=False)) - len(shown) <= 6
        seen = max(seen, len(shown))
    assert seen > len(value)
    assert calls_of(gather(read(Form(parser, str), *output, tools=[TOOL]))) == [("f", {"a": value})]
