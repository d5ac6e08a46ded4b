"""Structural tags: free text, and constrained parts where a trigger stands."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from jaxllm.constraints.compiler import GrammarCompiler
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.structured_outputs import StructuredOutputsParams
from tests.constraints import grammar_walks
from tests.constraints.grammar_walks import make_compiler, smollm2_tokenizer, walk_all

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
LEGACY = {
    "structures": [
        {"begin": "<f=point>", "schema": POINT, "end": "</f>"},
        {"begin": "<f=flag>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
TAGS = [
    {
        "type": "tag",
        "begin": one["begin"],
        "content": {"type": "json_schema", "json_schema": one["schema"]},
        "end": "</f>",
    }
    for one in LEGACY["structures"]
]


@pytest.fixture(scope="module")
def compiler(smollm2_path: str) -> GrammarCompiler:
    return make_compiler(smollm2_path)


def params(form: dict[str, Any], **options: Any) -> StructuredOutputsParams:
    tag = form if "type" not in form else {"type": "structural_tag", "format": form}
    return StructuredOutputsParams(structural_tag=json.dumps(tag), **options)


def takes(compiler: GrammarCompiler, path: str, form: dict[str, Any], text: str, **options: Any) -> bool:
    """Return whether the whole of `text`, with special tokens in it, is allowed and may end there."""
    return grammar_walks.takes(compiler, path, params(form, **options), text)


TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}
SEPARATED = {"type": "tags_with_separator", "tags": TAGS, "separator": ";"}
THINK = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}
WORD = {"type": "regex", "pattern": "[a-z]+"}


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (
            LEGACY,
            ["", "hi < there", '<f=point>{"x": 1}</f>', "a<f=flag>true</f>b<f=flag>false</f>"],
            ["<f=", "<f=no>", "<f=flag>1</f>", "a<f=flag>true", "a<f=flag>true</f> <f=z"],
        ),
        (
            {**THINK, "end": "</<|im_start|>t>"},
            ["<t>a</b></<|im_start|>t>", "<t></<|im_start|>t>"],
            ["<t>a<|im_start|>t>", "<t>a</b>", "<t>a</t>", "<t>a<|im_start|></<|im_start|>t>"],
        ),
        (TRIGGERED, ["text only", "a<f=flag>true</f>b"], ["a<f=flag>maybe</f>"]),
        (
            {**TRIGGERED, "at_least_one": True},
            ["<f=flag>true</f>", "<f=flag>true</f> and <f=flag>false</f>."],
            ["", "x", "a<f=flag>true</f>"],
        ),
        (
            {**TRIGGERED, "stop_after_first": True},
            ["no tag", "a<f=flag>true</f>"],
            ["<f=flag>true</f>b", "<f=flag>true</f><f=flag>true</f>"],
        ),
        (
            {**TRIGGERED, "at_least_one": True, "stop_after_first": True},
            ["<f=flag>true</f>"],
            ["", "a", "<f=flag>true</f>a"],
        ),
        (SEPARATED, ["", "<f=flag>true</f>", "<f=flag>true</f>;<f=flag>false</f>"], [";", "<f=flag>true</f>;", "x"]),
        (
            {**SEPARATED, "at_least_one": True, "stop_after_first": True},
            ["<f=flag>true</f>"],
            ["", "<f=flag>true</f>;<f=flag>true</f>"],
        ),
        (
            {"type": "sequence", "elements": [THINK, TRIGGERED]},
            ["<t>so</t>", "<t></t>a<f=flag>true</f>"],
            ["<t>so", "a", "<t></t><f=q"],
        ),
        (
            {"type": "or", "elements": [THINK, {"type": "const_string", "value": "no"}]},
            ["no", "<t>x</t>"],
            ["", "non", "<t>x</t>no"],
        ),
        (
            {"type": "sequence", "elements": [WORD, {"type": "grammar", "grammar": 'root ::= "!" | "?"'}]},
            ["ab!", "c?"],
            ["ab", "!"],
        ),
        ({"type": "any_text", "excluded_str": ["bad", "/w(or)se/"]}, ["", "good\nba d"], ["a bad one", "/w(or)se/"]),
        (
            {**THINK, "content": {"type": "any_text", "excluded_str": ["no"]}},
            ["<t>yes</t>"],
            ["<t>no</t>", "<t>yes</t>x"],
        ),
        (
            {**THINK, "content": TRIGGERED},
            ["<t>a<f=flag>true</f>b</t>", "<t></t>"],
            ["<t>a<f=flag>true</f>b", "<t><f=q"],
        ),
        ({**THINK, "begin": "", "content": WORD, "end": ""}, ["ab"], ["", "1"]),
        # special tokens in strings are those tokens
        (
            {**THINK, "begin": "<|im_start|>", "end": "<repo_name>"},
            ["<|im_start|>any</t><repo_name>"],
            ["<|im_start|>x"],
        ),
        (
            {**TRIGGERED, "triggers": ["<|im_start|>"], "tags": [{**THINK, "begin": "<|im_start|>f", "content": WORD}]},
            ["ab<|im_start|>fab</t>c"],
            ["<|im_start|>g"],
        ),
    ],
)
def test_what_is_allowed(
    compiler: GrammarCompiler, smollm2_path: str, form: dict[str, Any], good: list[str], bad: list[str]
):
    assert [text for text in good if not takes(compiler, smollm2_path, form, text)] == []
    assert [text for text in bad if takes(compiler, smollm2_path, form, text)] == []


def test_walks(compiler: GrammarCompiler, smollm2_path: str):
    form = {**TRIGGERED, "at_least_one": True, "stop_after_first": True}
    for walk in walk_all(compiler, smollm2_tokenizer(smollm2_path), params(form), 20):
        assert walk.ended
        match = re.fullmatch(r"<f=(point|flag)>(.*)</f>", walk.text, re.DOTALL)
        assert match
        assert isinstance(json.loads(match[2]), {"point": dict, "flag": bool}[match[1]])


def test_options_reach_the_schemas(compiler: GrammarCompiler, smollm2_path: str):
    spaced = '<f=point>{"x": 1}</f>'
    assert takes(compiler, smollm2_path, LEGACY, spaced)
    assert not takes(compiler, smollm2_path, LEGACY, spaced, disable_any_whitespace=True)


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ({"type": "star"}, "'star'"),
        ({"type": "const_string"}, "'value'"),
        ({"type": "const_string", "value": "a", "color": 1}, "'color'"),
        ({"type": "or", "elements": []}, "or needs"),
        ({**TRIGGERED, "triggers": []}, "triggers"),
        ({**TRIGGERED, "triggers": ["<g="]}, "starts with none of the triggers"),
        ({**TRIGGERED, "tags": []}, "list of tags"),
        ({**TRIGGERED, "at_least_one": 1}, "at_least_one"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, WORD]}, "must come last"),
        ({**THINK, "end": ["a", "b"]}, "'end'"),
        ({"type": "json_schema", "json_schema": {"uniqueItems": True}}, "uniqueItems"),
        ({"type": "regex", "pattern": "(" * 200 + ")" * 200}, "parentheses"),
        ({"structures": [{"begin": "a"}], "triggers": ["a"]}, "schema"),
        ({"structures": [{"begin": 1, "schema": {}, "end": ""}], "triggers": ["a"]}, "'begin'"),
        ({"structures": []}, "triggers"),
    ],
)
def test_refusals(compiler: GrammarCompiler, form: dict[str, Any], named: str):
    with pytest.raises(VLLMValidationError, match=named) as raised:
        compiler.check(params(form))
    assert raised.value.parameter == "structural_tag"
