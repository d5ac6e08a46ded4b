"""What the grammar of a tool parser lets through, the parser reads, and the arguments match the tool's schema."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from jaxllm.constraints.compiler import GrammarCompiler
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.structured_outputs import StructuredOutputsParams
from jaxllm.parsers.formats import from_format
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.pieces import ParsedOutput
from jaxllm.parsers.registry import ToolParserManager
from tests.constraints.grammar_walks import Walk, make_compiler, smollm2_tokenizer, takes, walk_all
from tests.parsers.outputs import ARGUMENTS, FORMS, TOOLS, Call, Form, calls_of, whole

ENUM = FunctionTool(
    name="set_mode",
    parameters={
        "type": "object",
        "properties": {"mode": {"enum": ["on", "off"]}, "level": {"$ref": "#/$defs/level"}},
        "required": ["mode", "level"],
        "additionalProperties": False,
        "$defs": {"level": {"type": "integer", "minimum": 1, "maximum": 12}},
    },
    strict=True,
)
NAMED = FunctionTool(
    name="mcp-x:größe",
    parameters={
        "type": "object",
        "properties": {"max-n": {"type": "integer"}, "$ä": {"type": "boolean"}},
        "required": ["max-n", "$ä"],
        "additionalProperties": False,
    },
)
ALL = [*TOOLS, ENUM, NAMED]
SCHEMAS = {tool.name: tool.schema for tool in ALL}
PARSERS = sorted({form.parser for form in FORMS.values()})
ONE_CALL = ("openai",)
"""The parsers whose models make one call at a time."""
NEWEST = {name: form for name, form in FORMS.items() if name != "mistral, listed"}
"""The forms that grammars write."""


@pytest.fixture(scope="module")
def compiler(smollm2_path: str) -> GrammarCompiler:
    return make_compiler(smollm2_path)


def constraint(form: Form, *, at_least_one: bool, parallel: bool) -> StructuredOutputsParams:
    parser = ToolParserManager.get_tool_parser(form.parser)
    return from_format(parser.grammar(ALL, at_least_one=at_least_one, parallel=parallel))


def walks(compiler: GrammarCompiler, path: str, params: StructuredOutputsParams, num: int) -> list[Walk]:
    walks = walk_all(compiler, smollm2_tokenizer(path), params, num, max_tokens=300)
    ended = [walk for walk in walks if walk.ended]
    assert len(ended) >= num // 4
    return ended


def check(parsed: ParsedOutput) -> None:
    for call in parsed.calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def grammatical(form: Form, calls: list[Call]) -> str | None:
    """Return calls as the grammar of a form writes them; None if Python's escapes are not JSON's."""
    text = form.write(calls).removesuffix("<|call|>")  # it ends the output
    if form.parser not in ("pythonic", "lfm2", "olmo3"):
        return text
    text = text.replace("True", "true").replace("False", "false").replace("'", '"')
    return None if "\\" in text else text


@pytest.mark.parametrize("form", NEWEST.values(), ids=NEWEST)
@pytest.mark.parametrize("parallel", [False, True])
def test_required_calls_match_their_schemas(
    compiler: GrammarCompiler, smollm2_path: str, form: Form, parallel: bool
) -> None:
    params = constraint(form, at_least_one=True, parallel=parallel)
    counts = []
    for walk in walks(compiler, smollm2_path, params, 12):
        parsed = whole(form, walk.text, ALL)
        assert parsed.text == "", walk.text
        check(parsed)
        counts.append(len(parsed.calls))
    assert min(counts) >= 1
    takes_two = parallel and form.parser not in ONE_CALL
    assert max(counts) == 1 or takes_two
    two = grammatical(form, [("get_weather", ARGUMENTS[0]), ("now", {})])
    assert two is not None
    assert takes(compiler, smollm2_path, params, two) == takes_two


@pytest.mark.parametrize("form", NEWEST.values(), ids=NEWEST)
def test_free_calls_match_their_schemas_too(compiler: GrammarCompiler, smollm2_path: str, form: Form) -> None:
    params = constraint(form, at_least_one=False, parallel=True)
    head = "<|channel|>final<|message|>" if form.parser == "openai" else ""
    assert takes(compiler, smollm2_path, params, f"{head}Hello, all is well.")
    for arguments in ARGUMENTS:
        text = grammatical(form, [("get_weather", arguments)])
        assert text is None or takes(compiler, smollm2_path, params, text), text
    bad: dict[str, Any] = {"city": "Ulm", "days": "soon"}
    text = form.write([("get_weather", bad)])
    if whole(form, text).calls:
        assert not takes(compiler, smollm2_path, params, text.removesuffix("<|call|>"))


@pytest.mark.parametrize("parser", ["qwen3_xml", "glm45", "gemma4", "deepseek_v32"])
def test_strings_behind_references_are_bare(compiler: GrammarCompiler, smollm2_path: str, parser: str) -> None:
    properties = {
        "mode": {"$ref": "#/$defs/mode", "default": "on", "description": "what to do"},
        "unit": {"anyOf": [{"enum": ["km", "mi"], "type": "string"}, {"type": "null"}], "default": None},
        "note": {"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]},
    }
    definitions = {"mode": {"enum": ["on", "off"], "description": "a mode"}, "text": {"type": "string"}}
    parameters = {"properties": properties, "required": ["mode", "note"], "$defs": definitions}
    tool = FunctionTool(name="f", parameters={"type": "object", **parameters})
    params = from_format(ToolParserManager.get_tool_parser(parser).grammar([tool], at_least_one=True, parallel=False))
    form = next(form for form in FORMS.values() if form.parser == parser)
    for mode, is_taken in (("on", True), ('"on"', False), ("up", False)):
        text = form.write([("f", {"mode": mode, "note": "12"})])
        assert takes(compiler, smollm2_path, params, text) == is_taken
    for unit, is_taken in (("km", True), (None, True), ("m", False)):
        text = form.write([("f", {"mode": "on", "unit": unit, "note": "12"})])
        assert takes(compiler, smollm2_path, params, text) == is_taken
    assert calls_of(whole(form, form.write([("f", {"mode": "on", "note": "12"})]), [tool])) == [
        ("f", {"mode": "on", "note": "12"})
    ]


@pytest.mark.parametrize("parser", ["pythonic", "gemma4"])
@pytest.mark.parametrize(("num", "has_required"), [(3, False), (3, True), (12, False), (12, True)])
def test_any_of_the_optional_arguments_may_be_left_out(
    compiler: GrammarCompiler, smollm2_path: str, parser: str, num: int, *, has_required: bool
) -> None:
    keys = [f"k{i}" for i in range(num)]
    required = keys[-1:] if has_required else []
    parameters = {"type": "object", "properties": {key: {"type": "integer"} for key in keys}, "required": required}
    tool = FunctionTool(name="f", parameters=parameters)
    params = from_format(ToolParserManager.get_tool_parser(parser).grammar([tool], at_least_one=True, parallel=False))
    form, rng = next(form for form in FORMS.values() if form.parser == parser), random.Random(num)
    for _ in range(6):
        shown = {key: 1 for key in keys if key in required or rng.random() < 0.4}
        text = form.write([("f", shown)])
        if num > 8 and not required and shown:  # the last one has its separator too
            text = text.replace(")]", ", )]").replace("}<", ",}<")
        assert takes(compiler, smollm2_path, params, text), text
        assert calls_of(whole(form, text, [tool])) == [("f", shown)]
        twice = text.replace("k0", "k1")
        if twice != text and "k1" in shown:
            assert not takes(compiler, smollm2_path, params, twice)
    if required:
        assert not takes(compiler, smollm2_path, params, form.write([("f", {"k0": 1})]))


@pytest.mark.parametrize("form", NEWEST.values(), ids=NEWEST)
def test_a_tool_without_a_schema_takes_any_arguments(compiler: GrammarCompiler, smollm2_path: str, form: Form) -> None:
    tools = [FunctionTool(name="get_weather"), ENUM]
    parser = ToolParserManager.get_tool_parser(form.parser)
    params = from_format(parser.grammar(tools, at_least_one=False, parallel=True))
    text = grammatical(form, [("get_weather", {"city": "Ulm", "days": 3})])
    assert text is not None
    assert takes(compiler, smollm2_path, params, text)


def test_a_call_of_llama3_after_text_matches_its_schema_too(compiler: GrammarCompiler, smollm2_path: str) -> None:
    form = FORMS["llama3_json"]
    params = constraint(form, at_least_one=False, parallel=True)
    for before in ("I look: ", "```json\n", "[", "f() { return {}; } "):
        for arguments, is_taken in (({"city": "Ulm"}, True), ({"city": "Ulm", "days": "soon"}, False)):
            text = before + form.write([("get_weather", arguments)])
            assert takes(compiler, smollm2_path, params, text) == is_taken, text
    assert not takes(compiler, smollm2_path, params, '{"a": 1}')


@pytest.mark.parametrize(
    ("parser", "key"),
    [("qwen3_xml", "a>b"), ("glm45", "a\nb"), ("pythonic", "a b"), ("minimax_m2", 'a"b'), ("gemma4", "a b")],
)
def test_a_key_that_could_not_be_read_is_refused_by_name(parser: str, key: str) -> None:
    tool = FunctionTool(name="f", parameters={"type": "object", "properties": {key: {"type": "integer"}}})
    with pytest.raises(VLLMValidationError, match=re.escape(f"the key {key!r}")):
        ToolParserManager.get_tool_parser(parser).grammar([tool], at_least_one=True, parallel=False)


@pytest.mark.parametrize("parser", ["qwen3_xml", "glm45", "gemma4"])
def test_what_cannot_be_enforced_is_refused_by_name(parser: str) -> None:
    refused: list[dict[str, Any]] = [{"a": {"type": "string", "pattern": "x+"}}]
    if parser != "gemma4":  # whose strings have marks
        refused.append({"a": {"type": ["string", "integer"]}})
    for properties in refused:
        tool = FunctionTool(name="f", parameters={"type": "object", "properties": properties})
        with pytest.raises(VLLMValidationError, match="'a'"):
            ToolParserManager.get_tool_parser(parser).grammar([tool], at_least_one=True, parallel=False)
    tool = FunctionTool(name="f", parameters={"type": "object", "anyOf": []})
    with pytest.raises(VLLMValidationError, match="'anyOf' at its top"):
        ToolParserManager.get_tool_parser(parser).grammar([tool], at_least_one=True, parallel=False)
