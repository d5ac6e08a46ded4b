"""Reasoning is split off where its marks say, however the output comes."""

from __future__ import annotations

import dataclasses
import random

import pytest

from jaxllm.parsers.output_parser import OutputParser
from jaxllm.parsers.pieces import CallStart, Piece, Reasoning, Text, gather, merge
from jaxllm.parsers.reasoning import MARKS, MarkedReasoning
from jaxllm.parsers.registry import ToolParserManager
from tests.parsers.outputs import FORMS, TOOLS, Form, calls_of, is_linear


def read(name: str, prompt: str, *texts: str) -> list[Piece]:
    parser, pieces = MarkedReasoning(MARKS[name], has_begun=MARKS[name].has_begun(prompt)), list[Piece]()
    for text in texts:
        pieces += parser.feed(text)
    return merge(pieces + parser.finish())


@pytest.mark.parametrize("name", MARKS)
def test_reasoning_is_split_off(name: str) -> None:
    start, end = MARKS[name][:2]
    for prompt, output, reasoning, text in [
        ("", f"{start}\nI think.\n\n So.\n{end}\n\nYes. ", "I think.\n\n So.", "Yes. "),
        ("", f" {start}{end}Yes", "", "Yes"),
        ("", " \n Yes", "", " \n Yes"),
        ("", f"{start} cut short \n", "cut short", ""),
        ("", start[:-1], "", start[:-1]),
        ("", f"{start}a{end[:-1]}", f"a{end[:-1]}", ""),
        ("", f"{start}a{start}b{end}c", "ab", "c"),
        (f"user{start}", f"{start}\na{end}b", "a", "b"),
        (f"user{start}\n", f"I think{end}Yes", "I think", "Yes"),
        (f"user{start}\n\n{end}\n\n", "Yes", "", "Yes"),
    ]:
        pieces = read(name, prompt, output)
        parsed = gather(pieces)
        assert (parsed.reasoning, parsed.text) == (reasoning, text), output
        assert read(name, prompt, *output) == pieces
        for i in range(len(output)):
            assert read(name, prompt, output[:i], output[i:]) == pieces


@pytest.mark.parametrize(
    ("name", "output", "text"),
    [
        ("hunyuan_a13b", "<think>\nSo.\n</think>\n<answer>\nYes. <b>\n\nNo.\n</answer>", "Yes. <b>\n\nNo."),
        ("hunyuan_a13b", "<think>So.</think>Yes.\n", "Yes.\n"),
        ("ernie45", "So.\n</think>\n\n<response>\nYes.\n</response>", "\nYes.\n"),
        ("ernie45", "<think>So.</think>\nYes.", "Yes."),
    ],
)
def test_tags_of_an_answer_are_left_out(name: str, output: str, text: str) -> None:
    pieces = read(name, "<think>" if name == "ernie45" else "", output)
    parsed = gather(pieces)
    assert (parsed.reasoning, parsed.text) == ("So.", text)
    assert read(name, "<think>" if name == "ernie45" else "", *output) == pieces


def test_marks_in_the_text_mean_what_they_mean_to_vllms_parser_of_the_name() -> None:
    once, ends, both = ("a", "b<think>c</think> d</think>"), ("a", "b<think>c d"), ("ac", "bd")
    expected = {
        **dict.fromkeys(
            ("deepseek_r1", "deepseek_v3", "deepseek_v4", "hy_v3", "olmo3", "granite", "hunyuan_a13b"), once
        ),
        **dict.fromkeys(("glm45", "glm47", "mistral", "gemma4"), both),
        **dict.fromkeys(("cohere_command3", "cohere_command4"), ("ac", "bd</think>")),
    }
    for name, (start, end, *_) in MARKS.items():
        output = f"{start}a{end}b{start}c{end} d{end}"
        parsed = gather(read(name, "", output))
        text = parsed.text.replace(start, "<think>").replace(end, "</think>")
        assert (parsed.reasoning, text) == expected.get(name, ends), name
        assert gather(read(name, "", *output)) == parsed


def test_marks_around_the_answer_are_left_out() -> None:
    output = "<|START_THINKING|>So.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>"
    for texts in ([output], list(output)):
        parsed = gather(read("cohere_command3", "", *texts))
        assert (parsed.reasoning, parsed.text) == ("So.", "Yes.")


@pytest.mark.parametrize("word", ["Here is", "Here's"])
def test_marks_may_be_written_in_two_ways(word: str) -> None:
    output = f"{word} my thought process:\nI see.\n\n{word} my response:\nYes."
    for texts in ([output], list(output)):
        parsed = gather(read("granite", "", *texts))
        assert (parsed.reasoning, parsed.text) == ("I see.", "Yes.")


def test_no_reasoning_or_text_is_lost() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        output = "".join(rng.choices(["<think>", "</think>", "<", "th", "a", " ", "\n"], k=rng.randint(0, 12)))
        pieces = read("qwen3", "", output)
        assert read("qwen3", "", *output) == pieces
        shown = "".join(piece.text for piece in pieces if isinstance(piece, Text | Reasoning))
        assert shown.count("a") == output.count("a")
        if not output.lstrip().startswith("<think>"):
            assert shown == output.replace("</think>", "")


_HERMES = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CALLS = {
    "hermes": _HERMES,
    "qwen3_xml": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm45": "<tool_call>now\n</tool_call>",
    "mistral": "[TOOL_CALLS]now[ARGS]{}",
    **{
        name: FORMS[name].write([("now", {})])
        for name in ("deepseek_v31", "minimax_m2", "kimi_k2", "seed_oss", "gemma4")
    },
    "cohere_command3": FORMS["cohere"].write([("now", {})]),
}
PAIRS = [
    *(("qwen3", "hermes"), ("qwen3", "qwen3_xml"), ("glm45", "glm45"), ("mistral", "mistral")),
    *(("deepseek_r1", "deepseek_v31"), ("deepseek_r1", "hermes")),
    *((name, name) for name in ("minimax_m2", "kimi_k2", "seed_oss", "gemma4", "cohere_command3")),
    *(("nemotron_v3", "qwen3_xml"), ("olmo3", "hermes")),
]


def parse(reasoning: str, tools: str, prompt: str, *texts: str) -> list[Piece]:
    parser = OutputParser(MARKS[reasoning], ToolParserManager.get_tool_parser(tools)(TOOLS), prompt)
    pieces = [piece for text in texts for piece in parser.feed(text)]
    pieces = merge(pieces + parser.finish())
    return [dataclasses.replace(piece, id="") if isinstance(piece, CallStart) else piece for piece in pieces]


@pytest.mark.parametrize(("reasoning", "tools"), PAIRS)
def test_calls_are_read_after_the_reasoning_or_end_it(reasoning: str, tools: str) -> None:
    (start, end), call = MARKS[reasoning][:2], CALLS[tools]
    mark = ToolParserManager.get_tool_parser(tools).marks[0]
    for prompt, output, thoughts, text, num_calls in [
        ("", f"{start}I see.{end}\n{call}", "I see.", "", 1),
        ("", f"{start}I see.\n\n{call}", "I see.", "", 1),
        (f"user{start}\n", f"I see.\n{call}", "I see.", "", 1),
        (f"user{start}\n", f"I see.{call}{call}", "I see.", "", 2),
        (f"user{start}\n", f"I see.{call}\nSo it is.", "I see.", "\nSo it is.", 1),
        (f"user{start}\n", f"I see.{call}So{end} it is.", "I see.", "So it is.", 1),
        (f"user{start}\n", f"A mark {mark} is none.{end}\n{call}", f"A mark {mark} is none.", "", 1),
        (f"user{start}\n", f"A mark {mark} is none.{end}\nYes.", f"A mark {mark} is none.", "Yes.", 0),
        (f"user{start}\n{end}", f"I see. {call}", "", "I see. ", 1),
        ("", f"I see. {call}", "", "I see. ", 1),
    ]:
        pieces = parse(reasoning, tools, prompt, output)
        parsed = gather(pieces)
        assert (parsed.reasoning, parsed.text.rstrip()) == (thoughts, text.rstrip()), output
        assert calls_of(parsed) == [("now", {})] * num_calls
        assert parse(reasoning, tools, prompt, *output) == pieces
        for i in range(len(output)):
            assert parse(reasoning, tools, prompt, output[:i], output[i:]) == pieces


def test_marks_of_reasoning_in_arguments_are_theirs() -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "<think>a</think>"}}</tool_call>'
    parsed = gather(parse("glm45", "hermes", "<think>", f"I see.{call}"))
    assert (parsed.reasoning, parsed.text) == ("I see.", "")
    assert calls_of(parsed) == [("get_weather", {"city": "<think>a</think>"})]


def test_parsers_whose_calls_are_the_whole_answer_read_it_after_the_reasoning() -> None:
    for tools, call in (("llama3_json", '{"name": "now", "parameters": {}}'), ("pythonic", "[now()]")):
        parsed = gather(parse("qwen3", tools, "", *f"<think>{call} or not?</think>\n\n{call}"))
        assert (parsed.reasoning, parsed.text) == (f"{call} or not?", "")
        assert calls_of(parsed) == [("now", {})]


MARKED = {name: form for name, form in FORMS.items() if name not in ("llama3_json", "pythonic", "xlam")}
"""The forms in which a mark begins a call."""


@pytest.mark.parametrize("form", MARKED.values(), ids=MARKED)
def test_an_output_that_is_cut_within_a_call_has_no_text(form: Form) -> None:
    """Marks that have not come whole, and calls that are not known as such, are not shown."""
    call = form.write([("get_weather", {"city": "Ulm"}), ("now", {})])
    before = "I look. " if form.takes_text_before else ""
    for length in range(len(call)):
        for name in (None, "qwen3"):
            marks = None if name is None else MARKS[name]
            parser = OutputParser(marks, ToolParserManager.get_tool_parser(form.parser)(TOOLS), "")
            pieces = parser.feed(before + call[:length]) + parser.finish(is_cut=True)
            assert gather(pieces).text.strip() == before.strip(), call[:length]


@pytest.mark.parametrize(
    ("parser", "output", "shown"),
    [
        ("mistral", "I will check the now", "I will check the now"),
        ("mistral", "I will check the now[TOOL", "I will check the now"),
        ("mistral", "See n", "See n"),
        ("llama3_json", '{"name": "Bob", "age": 3', '{"name": "Bob", "age": 3'),
        ("llama3_json", "Use `foo`", "Use `foo`"),
        ("llama3_json", 'So <|python_tag|>{"na', "So "),
        ("pythonic", "[now(", "[now("),
        ("pythonic", "[1, 2", "[1, 2"),
        ("hermes", "a < b", "a < b"),
        ("hermes", 'a <tool_call>{"na', "a "),
        ("qwen3_xml", "a <function=no", "a "),
        ("openai", " to=functions.no", ""),
        ("openai", "<|channel|>final<|message|>So <|en", "So "),
        ("openai", "<|channel|>analysis<|message|>So <|en", ""),
    ],
)
def test_an_output_that_is_cut_loses_nothing_but_marks(parser: str, output: str, shown: str) -> None:
    for texts in ([output], list(output)):
        for marks in (None, MARKS["qwen3"]):
            reading = OutputParser(marks, ToolParserManager.get_tool_parser(parser)(TOOLS), "")
            pieces = [piece for text in texts for piece in reading.feed(text)]
            parsed = gather(pieces + reading.finish(is_cut=True))
            assert (parsed.text, "<|en" in parsed.reasoning, parsed.calls) == (shown, False, [])


@pytest.mark.parsers
@pytest.mark.parametrize("head", ["", "<think>", "<think>a", "<think>a</think>"])
@pytest.mark.parametrize("part", [" ", "<", "</think"])
def test_reading_takes_a_time_that_grows_with_the_text_alone(head: str, part: str) -> None:
    assert is_linear(lambda length: list(head + part * (length // len(part))), lambda text: read("qwen3", "", *text))
