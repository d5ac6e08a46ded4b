"""Reasoning is split off where its marks say, however the output comes."""

from __future__ import annotations

import random

import pytest

from jaxllm.parsers.output_parser import OutputParser
from jaxllm.parsers.pieces import Piece, Reasoning, Text, gather, merge
from jaxllm.parsers.reasoning import MARKS, MarkedReasoning
from jaxllm.parsers.registry import ToolParserManager
from tests.parsers.outputs import TOOLS, calls_of, is_linear


def read(name: str, prompt: str, *texts: str) -> list[Piece]:
    parser, pieces = MarkedReasoning(MARKS[name], prompt), list[Piece]()
    for text in texts:
        pieces += parser.feed(text)
    return merge(pieces + parser.finish())


@pytest.mark.parametrize("name", MARKS)
def test_reasoning_is_split_off(name: str) -> None:
    start, end = MARKS[name]
    for prompt, output, reasoning, text in [
        ("", f"{start}\nI think.\n\n So.\n{end}\n\nYes. ", "I think.\n\n So.", "Yes. "),
        ("", f" {start}{end}Yes", "", "Yes"),
        ("", f"Yes {start}no{end}", "", f"Yes {start}no{end}"),
        ("", " \n Yes", "", " \n Yes"),
        ("", f"{start} cut short \n", "cut short", ""),
        ("", start[:-1], "", start[:-1]),
        ("", f"{start}a{end[:-1]}", f"a{end[:-1]}", ""),
        ("", f"{start}a{end}b{end}", "a", f"b{end}"),
        (f"user{start}\n", f"I think{end}Yes", "I think", "Yes"),
        (f"user{start}\n\n{end}\n\n", f"Yes{end}", "", f"Yes{end}"),
    ]:
        pieces = read(name, prompt, output)
        parsed = gather(pieces)
        assert (parsed.reasoning, parsed.text) == (reasoning, text), output
        assert read(name, prompt, *output) == pieces
        for i in range(len(output)):
            assert read(name, prompt, output[:i], output[i:]) == pieces


def test_no_reasoning_or_text_is_lost() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        output = "".join(rng.choices(["<think>", "</think>", "<", "th", "a", " ", "\n"], k=rng.randint(0, 12)))
        pieces = read("qwen3", "", output)
        assert read("qwen3", "", *output) == pieces
        shown = "".join(piece.text for piece in pieces if isinstance(piece, Text | Reasoning))
        assert shown.count("a") == output.count("a")
        if not output.lstrip().startswith("<think>"):
            assert shown == output


def test_calls_are_read_after_the_reasoning() -> None:
    parser = OutputParser(MarkedReasoning(MARKS["qwen3"], ""), ToolParserManager.get_tool_parser("hermes")(TOOLS))
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    pieces = [piece for letter in f"<think>not {call}</think>\n{call}" for piece in parser.feed(letter)]
    parsed = gather(pieces + parser.finish())
    assert parsed.reasoning == f"not {call}"
    assert (calls_of(parsed), parsed.text) == ([("now", {})], "")


@pytest.mark.parametrize("head", ["", "<think>", "<think>a", "<think>a</think>"])
@pytest.mark.parametrize("part", [" ", "<", "</think"])
def test_reading_takes_a_time_that_grows_with_the_text_alone(head: str, part: str) -> None:
    assert is_linear(lambda length: list(head + part * (length // len(part))), lambda text: read("qwen3", "", *text))
