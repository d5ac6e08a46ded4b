"""Every kind of constraint: what random walks of its grammar write is valid, and they get to the end."""

from __future__ import annotations

import json
import re

import jsonschema
import pydantic
import pytest

from jaxllm.constraints.compiler import GrammarCompiler
from jaxllm.constraints.schemas.name_patterns import matches_only, matching, property_names
from jaxllm.params.limits import MAX_PROPERTIES
from jaxllm.params.structured_outputs import StructuredOutputsParams
from tests.constraints.grammar_walks import EOS, allowed, make_compiler, smollm2_tokenizer, walk_all
from tests.constraints.schema_corpus import corpus

pytestmark = pytest.mark.constraints

ARITHMETIC = """
?start: sum
sum: product (("+" | "-") product)*
product: NUMBER | "(" sum ")"
NUMBER: /[0-9]{1,2}/
"""


def is_arithmetic(text: str) -> bool:
    """Return whether `text` can be reduced to one number: by hand, so as to owe nothing to the grammar."""
    while (shorter := re.sub(r"\((\d+)\)|\d+[-+]\d+(?![0-9])", "0", text)) != text:
        text = shorter
    return text.isdigit()


class Dish(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    price: int = pydantic.Field(ge=0, le=99)
    is_hot: bool | None = None


@pytest.fixture(scope="module")
def compiler(smollm2_path: str) -> GrammarCompiler:
    return make_compiler(smollm2_path)


def texts(compiler: GrammarCompiler, path: str, params: StructuredOutputsParams, count: int = 20) -> list[str]:
    """Walk, and say what was written; nothing may be cut off, and not every walk may be the same."""
    walks = walk_all(compiler, smollm2_tokenizer(path), params, count)
    assert all(walk.ended for walk in walks)
    texts = [walk.text for walk in walks]
    assert len(set(texts)) > 1
    return texts


@pytest.mark.parametrize("pattern", ["[a-z]{3}-[0-9]{2,4}", "^(yes|no)$", "(?i)abc", r"\d{4}/\d\d", '"[^"\\\\]{0,9}"'])
def test_regex(compiler: GrammarCompiler, smollm2_path: str, pattern: str):
    for text in texts(compiler, smollm2_path, StructuredOutputsParams(regex=pattern)):
        assert re.fullmatch(pattern, text)


def test_choice(compiler: GrammarCompiler, smollm2_path: str):
    choices = ["a", "ab", 'say "hi"\n', "C:\\dir", "日本 🙂", "/slash/", "tab\t#{}"]
    assert set(texts(compiler, smollm2_path, StructuredOutputsParams(choice=choices), 60)) == set(choices)


def test_json_object(compiler: GrammarCompiler, smollm2_path: str):
    walks = walk_all(compiler, smollm2_tokenizer(smollm2_path), StructuredOutputsParams(json_object=True), 20)
    ended = [walk.text for walk in walks if walk.ended]
    assert len(ended) > 5
    assert all(isinstance(json.loads(text), dict) for text in ended)


@pytest.mark.parametrize("schema", [Dish, Dish.model_json_schema(), json.dumps(Dish.model_json_schema())])
def test_pydantic_model(compiler: GrammarCompiler, smollm2_path: str, schema: object):
    for text in texts(compiler, smollm2_path, StructuredOutputsParams(json=schema, disable_additional_properties=True)):
        Dish.model_validate_json(text)


def test_every_schema_of_the_corpus(compiler: GrammarCompiler, smollm2_path: str):
    refused: dict[str, str] = {}
    for case in corpus():
        try:
            walks = walk_all(compiler, smollm2_tokenizer(smollm2_path), StructuredOutputsParams(json=case.schema), 3)
        except ValueError as error:
            refused[case.name] = str(error)
            continue
        assert all(walk.ended for walk in walks), case
        assert all(case.is_valid(walk.text) for walk in walks), (case, walks)
    assert len(refused) <= 0.15 * 250, refused


def test_whitespace(compiler: GrammarCompiler, smollm2_path: str):
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}
    flexible = texts(compiler, smollm2_path, StructuredOutputsParams(json=schema))
    assert any(re.search(r"\s", text) for text in flexible)
    assert not any(re.search(r"\s{43}|\n[ \t]*\n", text) for text in flexible)  # never without a bound
    compact = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    assert not any(re.search(r"\s", text) for text in texts(compiler, smollm2_path, compact))
    spaced = StructuredOutputsParams(json=schema, whitespace_pattern=" {1,2}")
    assert all(re.fullmatch(r"[^ ]*( {1,2}[^ ]+)*", text) for text in texts(compiler, smollm2_path, spaced))


def test_disable_additional_properties(compiler: GrammarCompiler, smollm2_path: str):
    inner = {"type": "object", "properties": {"a": {"type": "boolean"}}}
    schema = {"type": "object", "properties": {"in": inner}, "required": ["in"]}
    params = StructuredOutputsParams(json=schema, disable_additional_properties=True)
    closed = {**schema, "additionalProperties": False, "properties": {"in": {**inner, "additionalProperties": False}}}
    for text in texts(compiler, smollm2_path, params):
        jsonschema.validate(json.loads(text), closed)
    assert "additionalProperties" not in inner


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string"}}, "patternProperties": {"^a$": {"maxLength": 3}}},
        {"properties": {"a": {"type": "boolean"}}, "patternProperties": {"^(?:a|b)$": {"type": ["boolean", "null"]}}},
        {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^a$": {"type": "null"}, "^x": {"const": 1}}},
        {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^[a]$": {"maximum": 5}}},
        {"properties": {"a": {"type": "null"}, "b": {}}, "patternProperties": {"^[ab]$|^a$": {"type": "null"}}},
        {"properties": {"a": {"type": "null"}, "b": {}}, "patternProperties": {"^[a]$": {"type": "null"}, "^[b]$": {}}},
        {"required": ["a"], "patternProperties": {"^[a]$": {"type": "null"}}},
    ],
)
def test_patterns_of_names_that_properties_have_too(compiler: GrammarCompiler, smollm2_path: str, schema: dict):
    schema = {"type": "object", "additionalProperties": False, **schema}
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    walks = walk_all(compiler, smollm2_tokenizer(smollm2_path), params, 30)
    whole = [walk.text for walk in walks if walk.ended]
    assert len(whole) > 15
    for text in whole:
        jsonschema.validate(json.loads(text), schema)


def test_as_many_optional_properties_as_are_allowed(compiler: GrammarCompiler, smollm2_path: str):
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(MAX_PROPERTIES)}}
    grammar = compiler.start(StructuredOutputsParams(json={**schema, "additionalProperties": False})).result()
    token_ids = smollm2_tokenizer(smollm2_path).backend.encode(f'{{"p3": 12, "p{MAX_PROPERTIES - 1}": 7}}').ids

    def follow() -> tuple[bool, str | None]:
        matcher = grammar.matcher()
        return all(allowed(matcher)[each] and matcher.accept(each) for each in token_ids), matcher.error

    assert compiler.submit(follow).result() == (True, None)


def test_patterns_are_compared_with_many_names():
    names = property_names({"patternProperties": {}, "properties": dict.fromkeys(f"key {i}" for i in range(1000))})
    assert matches_only("^key [0-9]{1,3}$", names) is False  # "key 00"
    assert matches_only("^key ([0-9]|[1-9][0-9]{1,2})$", names) is True
    assert matches_only("key 7", names) is False
    assert matching("[17]$", ["key 1", "key 2"]) == ["key 1"]
    assert matches_only("^[x]{80}$", property_names({"propertyNames": {}, "required": ["x" * 80, "y" * 81]})) is True
    assert matches_only("(?=a)", names) is False  # for llguidance to refuse


def test_lark_grammar(compiler: GrammarCompiler, smollm2_path: str):
    for text in texts(compiler, smollm2_path, StructuredOutputsParams(grammar=ARITHMETIC)):
        assert re.fullmatch(r"[-+()0-9]+", text)
        assert is_arithmetic(text)


def test_matchers_are_independent(compiler: GrammarCompiler, smollm2_path: str):
    tokenizer = smollm2_tokenizer(smollm2_path)
    grammar = compiler.start(StructuredOutputsParams(regex="(ab|cd)*")).result()
    a, b = tokenizer.encode(["ab", "c"])

    def run() -> tuple[bool, ...]:
        first, second = grammar.matcher(), grammar.matcher()
        went = [first.accept(token_id) for token_id in a] + [second.accept(token_id) for token_id in b]
        assert all(went)
        return first.may_end, second.may_end, bool(allowed(first)[EOS]), bool(allowed(second)[EOS])

    assert compiler.submit(run).result() == (True, False, True, False)


def test_end_of_an_output(compiler: GrammarCompiler, smollm2_path: str):
    tokenizer = smollm2_tokenizer(smollm2_path)
    grammar = compiler.start(StructuredOutputsParams(choice=["ab"])).result()
    [ids] = tokenizer.encode(["ab"])

    def run() -> None:
        matcher = grammar.matcher()
        assert not matcher.is_complete
        assert all(map(matcher.accept, ids))
        assert matcher.may_end
        assert allowed(matcher).nonzero()[0].tolist() == [EOS]
        assert matcher.is_complete
        assert matcher.error is None
        assert matcher.accept(EOS)
        wrong = grammar.matcher()
        assert not wrong.accept(EOS)
        assert wrong.error
        assert not allowed(wrong).any()

    compiler.submit(run).result()


def test_ids_beyond_the_tokenizer_are_never_allowed(smollm2_path: str):
    wider = GrammarCompiler(smollm2_tokenizer(smollm2_path), 49_152 + 100, [EOS])
    narrower = GrammarCompiler(smollm2_tokenizer(smollm2_path), 49_100, [EOS])
    params = StructuredOutputsParams(grammar="start: <[*]> /[^a]+/")
    for compiler, vocab_size in ((wider, 49_252), (narrower, 49_100)):
        grammar = compiler.start(params).result()
        mask = compiler.submit(lambda grammar=grammar, size=vocab_size: allowed(grammar.matcher(), size)).result()
        assert mask.nonzero()[0].max() == min(vocab_size, 49_152) - 1


def test_several_ids_end_an_output(smollm2_path: str):
    compiler = GrammarCompiler(smollm2_tokenizer(smollm2_path), 49_152, [EOS, 0])
    grammar = compiler.start(StructuredOutputsParams(regex="a?")).result()
    mask = compiler.submit(lambda: allowed(grammar.matcher())).result()
    assert mask[EOS]
    assert mask[0]
