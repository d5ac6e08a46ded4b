"""Hy3's marks end in a suffix, which its chat template tells; parsers read the same with it as without."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.parsers.mark_suffix import add_suffix, find_suffix, without_suffix
from jaxllm.parsers.pieces import CallArguments, CallStart, Reasoning, Text
from jaxllm.parsers.reasoning import marks_of
from jaxllm.parsers.registry import ToolParserManager
from jaxllm.server.openai.output_parsers import OutputParsers
from tests.parsers.outputs import FORMS, TOOLS, read
from tests.parsers.test_known_outputs import KNOWN

SUFFIX = ":opensource"
TEMPLATE = "{% set HYTK = ':opensource' %}tools '<tool_calls{}><tool_call{}>f<tool_sep{}><arg_key{}>' '<think{}>'"
_MARK = re.compile("</?(think|tool_calls?|tool_sep|arg_key|arg_value)>")


def suffixed(text: str) -> str:
    return _MARK.sub(lambda mark: add_suffix(mark[0], SUFFIX), text)


@pytest.mark.parametrize(
    ("template", "suffix"),
    [
        (TEMPLATE, SUFFIX),
        ("<tool_sep:6124c78e>", ":6124c78e"),
        ("<think> and <tool_call>", ""),
        ("<tool_call{}>", ""),
        ("<think:>", ""),
        ("", ""),
    ],
)
def test_the_template_tells_the_suffix(template: str, suffix: str) -> None:
    assert find_suffix(template) == suffix


def test_marks_without_their_suffix_are_the_plain_ones() -> None:
    plain = "<tool_calls><tool_call>f<tool_sep><arg_key>k</arg_key><think></think> <b:c> {}>"
    assert without_suffix(suffixed(plain)) == plain
    assert without_suffix("<tool_sep{}>") == "<tool_sep>"


@pytest.mark.parametrize("known", KNOWN["hy_v3"], ids=range(len(KNOWN["hy_v3"])))
def test_outputs_with_a_suffix_are_read_as_those_without(known: Any) -> None:
    plain = read(FORMS["hy_v3"], known.output)
    kind = ToolParserManager.get_tool_parser("hy_v3").with_suffix(SUFFIX)
    for text in (suffixed(known.output), *[list(suffixed(known.output))]):
        parser, calls, shown = kind(TOOLS), list[list[str]](), ""
        for part in text:
            for piece in parser.feed(part):
                calls, shown = gathered(piece, calls, shown)
        for piece in parser.finish():
            calls, shown = gathered(piece, calls, shown)
        assert (calls, without_suffix(shown)) == plain_of(plain)


def plain_of(pieces: list[Any]) -> tuple[list[list[str]], str]:
    calls, shown = list[list[str]](), ""
    for piece in pieces:
        calls, shown = gathered(piece, calls, shown)
    return calls, shown


def gathered(piece: Any, calls: list[list[str]], shown: str) -> tuple[list[list[str]], str]:
    match piece:
        case CallStart():
            return [*calls, [piece.name, ""]], shown
        case CallArguments():
            calls[-1][1] += piece.text
            return calls, shown
        case _:
            return calls, shown + piece.text


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("at_least_one", [False, True])
def test_the_grammar_has_the_suffix(at_least_one: bool, parallel: bool) -> None:
    kind, asked = ToolParserManager.get_tool_parser("hy_v3"), {"at_least_one": at_least_one, "parallel": parallel}
    form = json.dumps(kind.with_suffix(SUFFIX).grammar(TOOLS, **asked))
    assert form == suffixed(json.dumps(kind.grammar(TOOLS, **asked)))
    assert SUFFIX in form


def test_a_server_reads_reasoning_and_calls_with_the_suffix() -> None:
    parsers = OutputParsers(ServerArgs(), "", TEMPLATE)
    assert (parsers.tool_parser_name, parsers.reasoning) == ("hy_v3", "glm45:opensource")
    kind = ToolParserManager.get_tool_parser("hy_v3").with_suffix(SUFFIX)
    assert set(parsers.marks(kind)) >= {"<think:opensource>", "</think:opensource>", "<tool_sep:opensource>"}
    make = parsers.maker(kind, list(TOOLS), "user", holds_calls=False)
    assert make is not None
    parser = make()
    pieces = parser.feed(
        "<think:opensource>So.</think:opensource>Look.<tool_calls:opensource>\n<tool_call:opensource>forecast"
        "<tool_sep:opensource>\n<arg_key:opensource>town</arg_key:opensource>\n"
        "<arg_value:opensource>Oslo</arg_value:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>"
    )
    pieces += parser.finish()
    texts = {
        of: "".join(piece.text for piece in pieces if isinstance(piece, of)) for of in (Reasoning, Text, CallArguments)
    }
    assert texts == {Reasoning: "So.", Text: "Look.", CallArguments: '{"town": "Oslo"}'}
    assert [piece.name for piece in pieces if isinstance(piece, CallStart)] == ["forecast"]


def test_a_named_parser_has_the_suffix_too() -> None:
    parsers = OutputParsers(ServerArgs(tool_call_parser="hy_v3"), "hy_v3", TEMPLATE)
    assert parsers.reasoning == "hy_v3:opensource"
    assert marks_of("hy_v3:opensource").end == "</think:opensource>"
    assert parsers.opened("user", {}) == "user"
    assert OutputParsers(ServerArgs(), "deepseek_r1", TEMPLATE).opened("user", {}) == "user<think:opensource>"
