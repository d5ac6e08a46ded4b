"""GBNF becomes a Lark grammar that allows the same texts; what is not covered is refused with its line."""

from __future__ import annotations

import re

import pytest

from jaxllm.constraints.compiler import GrammarCompiler
from jaxllm.constraints.gbnf import gbnf_to_lark
from jaxllm.constraints.lark import is_gbnf
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.structured_outputs import StructuredOutputsParams
from tests.constraints.grammar_walks import make_compiler, smollm2_tokenizer, walk_all


@pytest.fixture(scope="module")
def compiler(smollm2_path: str) -> GrammarCompiler:
    return make_compiler(smollm2_path)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('root ::= "yes" | "no"', "yes|no"),
        ('root ::= a "-" b\na ::= [a-c]+\nb ::= [0-9]{2}', "[a-c]+-[0-9]{2}"),
        ('root ::= [a-z]{1,3} "b"', "[a-z]{1,3}b"),  # two terminals would be split greedily
        ('root ::= (\n  "x" |\n  "y"\n)? "z" # the end', "[xy]?z"),
        ('root ::= "\\"q\\"" "\\x41\\u00e9\\U0001F642" "\\\\"', '"q"Aé🙂\\\\'),
        ('root ::= [^a-z\\n"] [\\]\\-^]', '[^a-z\\n"][\\]\\-^]'),
        ("root ::= [-a]+ [a-]", "[-a]+[-a]"),
        ('root ::= . "end"', "(?s:.)end"),
        ('root ::= nest\nnest ::= "(" nest ")" | ""', r"\(*\)*"),
        ('root-1 ::= "x"\nroot ::= root-1{2} | root-1{3,} "y" | root-1{0,1} "w"', "xx|xxx+y|x?w"),
        ('root ::= list\nlist ::= item ("," item)*\nitem ::= [0-9] | "[" list "]"', r"[][0-9,]+"),
    ],
)
def test_texts(compiler: GrammarCompiler, smollm2_path: str, grammar: str, pattern: str):
    walks = walk_all(compiler, smollm2_tokenizer(smollm2_path), StructuredOutputsParams(grammar=grammar), 15)
    ended = [walk.text for walk in walks if walk.ended]
    assert len(ended) > 10
    assert all(re.fullmatch(pattern, text) for text in ended), ended
    if "nest" in grammar:
        assert all(text.count("(") == text.count(")") for text in ended)


def test_recursion_decides_what_is_a_terminal():
    lark = gbnf_to_lark('root ::= "a" b [0-9] word\nb ::= "(" b ")" | word\nword ::= [a-z] digit\ndigit ::= [0-9]')
    rules = dict(line.split(": ", 1) for line in lark.strip().splitlines())
    assert rules["start"] == "r0"
    assert rules["r0"] == "T0 r1 T1"  # the stretch after the recursive rule is one terminal
    assert rules["T1"].endswith("R2")
    assert rules["R2"].endswith("R3")


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        ('start ::= "a"', "root"),
        ("root ::= missing", "'missing'"),
        ('root ::= "a"\nroot ::= "b"', "line 2: rule 'root' is defined twice"),
        ('root ::= "a" )', "line 1: parentheses"),
        ('root ::= ("a"', "parentheses"),
        ("root ::= \"a\"\n  | 'b'", "line 2"),
        ('root ::= "a', "line 1"),
        ("root ::= *", "nothing to repeat"),
        ('root ::= "a"**', "nothing to repeat"),
        ("root ::= []", "line 1"),
        ('root ::= "\\q"', "escape"),
        ('root ::= "\\ud800"', "no character"),
        ('root ::= (= "a") "b"', "line 1"),
        ('root "a"', "expected `name ::=`"),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "parentheses"),
        ("root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(10_001)) + 'r10001 ::= "a"', "10000 levels"),
    ],
)
def test_refusals(grammar: str, named: str):
    with pytest.raises(VLLMValidationError, match=re.escape(named)) as raised:
        gbnf_to_lark(grammar)
    assert raised.value.parameter == "grammar"


@pytest.mark.parametrize(
    ("text", "expected"),
    [('root ::= "a"', True), ('start: "::="', False), ("start: /::=/ # ::=", False), ("a\n  ::= b", True)],
)
def test_is_gbnf(text: str, expected: bool):
    assert is_gbnf(text) is expected
