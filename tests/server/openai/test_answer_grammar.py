"""Constraints hold for the answer, whatever the model reasons before it."""

from __future__ import annotations

import pytest

from jaxllm.constraints.compiler import GrammarCompiler
from jaxllm.params.structured_outputs import StructuredOutputsParams
from jaxllm.parsers.formats import as_format
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.registry import ToolParserManager
from jaxllm.parsers.tools.openai import OpenAIParser
from jaxllm.server.openai.answer_grammar import answer_grammar
from jaxllm.server.openai.tools import ToolUse
from tests.constraints.grammar_walks import make_compiler, takes

CHOICE = StructuredOutputsParams(choice=["yes", "no"])
NO_TOOLS = ToolUse([])


@pytest.fixture(scope="module")
def compiler(smollm2_path: str) -> GrammarCompiler:
    return make_compiler(smollm2_path)


@pytest.mark.parametrize(
    ("reasoning", "prompt", "taken", "refused"),
    [
        ("qwen3", "user", ["yes", "<think>maybe\n</think>\n\nno", "<think></think>yes"], ["maybe", "<think>yes"]),
        ("qwen3", "user<think>\n", ["so </think>yes", "</think>\nno"], ["yes", "a</think>b"]),
        ("qwen3", "user<think>\n\n</think>\n\n", ["yes"], ["<think></think>yes", "maybe"]),
        ("openai_gptoss", "user", ["<|channel|>final<|message|>yes"], ["yes"]),
        (
            "openai_gptoss",
            "user",
            ["<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>no"],
            ["<|channel|>analysis<|message|>no"],
        ),
        (None, "user", ["yes"], ["<think></think>yes"]),
    ],
)
def test_a_format_holds_after_the_reasoning(
    compiler: GrammarCompiler,
    smollm2_path: str,
    reasoning: str | None,
    prompt: str,
    taken: list[str],
    refused: list[str],
) -> None:
    params = answer_grammar(CHOICE, NO_TOOLS, None, reasoning, prompt)
    assert params is not None
    assert [text for text in taken if not takes(compiler, smollm2_path, params, text)] == []
    assert [text for text in refused if takes(compiler, smollm2_path, params, text)] == []


@pytest.mark.parametrize(
    ("params", "taken", "refused"),
    [
        (StructuredOutputsParams(json={"type": "integer"}), "12", "x"),
        (StructuredOutputsParams(json='{"type": "integer"}'), "12", "x"),
        (StructuredOutputsParams(json_object=True), '{"a": 1}', "[]"),
        (StructuredOutputsParams(regex="[a-c]+"), "abc", "abd"),
        (StructuredOutputsParams(choice=["a b", "c"]), "a b", "a"),
        (StructuredOutputsParams(grammar='root ::= "x" "y"'), "xy", "x"),
        (StructuredOutputsParams(grammar='start: "x" "y"'), "xy", "x"),
    ],
)
def test_every_kind_of_constraint_is_a_format(
    compiler: GrammarCompiler, smollm2_path: str, params: StructuredOutputsParams, taken: str, refused: str
) -> None:
    assert as_format(params) is not None
    wrapped = answer_grammar(params, NO_TOOLS, None, "qwen3", "")
    assert wrapped is not None
    for before in ("", "<think>x</think>\n\n"):
        assert takes(compiler, smollm2_path, wrapped, before + taken)
        assert not takes(compiler, smollm2_path, wrapped, before + refused)


def test_gpt_oss_calls_or_answers_in_channels_of_their_own(compiler: GrammarCompiler, smollm2_path: str) -> None:
    tool = FunctionTool(name="now", parameters={"type": "object", "properties": {}, "additionalProperties": False})
    params = answer_grammar(CHOICE, ToolUse([tool]), OpenAIParser, "openai_gptoss", "user")
    assert params is not None
    thoughts = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    for text in (call, thoughts + call, "<|channel|>final<|message|>yes", f"{thoughts}<|channel|>final<|message|>no"):
        assert takes(compiler, smollm2_path, params, text), text
    for text in ("yes", "<|channel|>final<|message|>maybe", thoughts):
        assert not takes(compiler, smollm2_path, params, text), text


def test_no_call_gets_round_its_schema_within_the_reasoning(compiler: GrammarCompiler, smollm2_path: str) -> None:
    """A call ends reasoning that has no end of its own, so one there would be a call of any form."""
    tool = FunctionTool(name="now", parameters={"type": "object", "properties": {}, "additionalProperties": False})
    use, parser = ToolUse([tool], is_required=True), ToolParserManager.get_tool_parser("hermes")
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    other = call.replace("now", "rm")
    for prompt, start in (("user<think>", ""), ("user", "<think>")):
        params = answer_grammar(None, use, parser, "qwen3", prompt)
        assert params is not None
        assert takes(compiler, smollm2_path, params, f"{start}I <b>see</b>.</think>{call}")
        assert not takes(compiler, smollm2_path, params, f"{start}I see. {other}</think>{call}")


def test_calls_are_enforced_as_far_as_a_grammar_can(compiler: GrammarCompiler, smollm2_path: str) -> None:
    tags = {"type": "array", "items": {"type": "string", "format": "slug"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"tags": tags, "key": {"type": "string", "format": "password"}}}
    parser = ToolParserManager.get_tool_parser("hermes")
    for use in (
        ToolUse([FunctionTool(name="f", parameters=schema)], is_required=True),
        ToolUse([FunctionTool(name="f", parameters=schema, strict=True)]),
    ):
        params = answer_grammar(None, use, parser, None, "")
        assert params is not None
        for arguments, is_taken in (('{"tags": ["a", "a"], "key": "b"}', True), ('{"tags": [1]}', False)):
            call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
            assert takes(compiler, smollm2_path, params, call) is is_taken


def test_nothing_asked_is_nothing_constrained() -> None:
    assert answer_grammar(None, NO_TOOLS, None, "qwen3", "") is None
