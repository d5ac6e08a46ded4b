"""All tool parsers: what they read, however it comes, and what they do not lose."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter

import pytest

from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Reading
from jaxllm.parsers.json_calls import JsonCall
from jaxllm.parsers.pieces import CallArguments, CallStart, gather
from jaxllm.parsers.registry import ToolParserManager
from tests.parsers.outputs import ARGUMENTS, FORMS, TOOLS, Call, Form, calls_of, is_linear, read, whole

pytestmark = pytest.mark.parsers

NUM_MUTATIONS = 10_000
INSERTED = "QZ"
"""Letters that are in no mark, and in nothing else that an output may begin with."""
TOLD = (INSERTED, "Ulm", "city", "days", "wet", "names", "1500", "true", "false")
"""Words of the arguments."""
MARKS = [
    *("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", "<arg_key>"),
    *("</arg_value>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json"),
    *("<|tool_call|>", "functools[", "<|action_end|>", "<|START_ACTION|>[", "<|tool_call_argument_begin|>"),
    *(
        '<invoke name="',
        "</invoke>",
        '<parameter name="',
        "</parameter>",
        '" string="true">',
        "<｜DSML｜",
        "<tool_sep>",
    ),
    *("<|tool_call_end|>", "<function_calls>", "<|tool_call>call:", '<|"|>', "<tool_call|>"),
    *("<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant", "functions.", "{", "}", '"', "\\", "\n", "[", "("),
    *(INSERTED, INSERTED, INSERTED),
    *(")", "=", ":", ",", ";", "\\ud800", "\ud83d\ude00", '{"name": "now", "arguments": '),
]
HEADS = {
    "deepseek_v3": r"(?<=<｜tool▁call▁begin｜>)[^<]*",
    "openai": r"<\|(start|channel)\|>[^{}\"]*?<\|message\|>",
    **dict.fromkeys(("minimax_m2", "deepseek_v32", "deepseek_v4"), r"\sstring=([\"'])(true|false)\1"),
}
"""What is said of a call or message beside its name, where that may be anything."""
JSON_ALONE = ("hermes", "llama3_json", "pythonic", "granite", "jamba", "phi4_mini_json", "internlm", "xlam", "lfm2")
"""The parsers that hold a call until its arguments are JSON."""
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
CASES: list[list[Call]] = [[("get_weather", arguments)] for arguments in ARGUMENTS] + [
    [("now", {})],
    [("get_weather", ARGUMENTS[1]), ("now", {}), ("get_weather", ARGUMENTS[0])],
]


@forms
@pytest.mark.parametrize("calls", CASES)
def test_calls_are_read(form: Form, calls: list[Call]) -> None:
    parsed = whole(form, form.write(calls))
    assert calls_of(parsed) == calls
    assert parsed.text == ""


@forms
def test_text_passes(form: Form) -> None:
    for text in ("", "Hello.", "  a\n", "x < y [1] {2} (3) <|", '{"a": 1}', "[1, 2]", "\n"):
        assert whole(form, text).text == text
        assert whole(form, text).calls == []


@forms
def test_text_before_and_after_calls(form: Form) -> None:
    if not form.takes_text_before:
        pytest.skip("calls are the whole answer")
    parsed = whole(form, f"I look.\n{form.write(CASES[-1])}\nThere.")
    assert calls_of(parsed) == CASES[-1]
    assert parsed.text == "I look.\n\nThere."


@forms
def test_a_stream_is_the_whole_at_every_split(form: Form) -> None:
    texts = [form.write(CASES[1]), form.write(CASES[-1]), form.write(CASES[2]).replace("}", "", 1)]
    if form.takes_text_before:
        texts.append(f"a <b {form.write(CASES[2])} c\n")
    for text in texts:
        expected = read(form, text)
        assert read(form, *text) == expected
        for i in range(len(text)):
            assert read(form, text[:i], text[i:]) == expected


@forms
def test_arguments_come_in_pieces(form: Form) -> None:
    pieces = []
    for length in range(len(text := form.write(CASES[1]))):
        pieces.append(sum(isinstance(piece, CallArguments) for piece in read(form, text[:length])))
    assert 1 in pieces


@forms
def test_an_output_that_is_cut_short_begins_the_same_call(form: Form) -> None:
    text = form.write(CASES[1])
    [full] = whole(form, text).calls
    for length in range(len(text)):
        parsed = whole(form, text[:length])
        assert len(parsed.calls) <= 1
        for call in parsed.calls:
            assert call.name == full.name
            assert full.arguments.startswith(call.arguments.removesuffix("}").rstrip())


@forms
def test_an_output_that_ends_at_its_most_tokens_keeps_its_call_where_calls_are_held(form: Form) -> None:
    text = form.write(CASES[1])
    for length in range(len(text)):
        calls = []
        for holds_calls in (True, False):
            parser = ToolParserManager.get_tool_parser(form.parser)(TOOLS)
            parser.holds_calls = holds_calls
            parsed = gather(parser.feed(text[:length]) + parser.finish(is_cut=True))
            calls.append([(call.name, call.arguments) for call in parsed.calls])
        assert calls[0] == calls[1]


@forms
def test_an_unknown_function_is_a_call_where_marks_tell(form: Form) -> None:
    text = form.write([("unknown", {"a": "x"})])
    parsed = whole(form, text)
    if form.parser in ("llama3_json", "pythonic", "xlam"):
        assert (parsed.calls, parsed.text) == ([], text)
    else:
        assert calls_of(parsed) == [("unknown", {"a": "x"})]


def mutated(rng: random.Random, text: str) -> str:
    """Return a text in which some characters are gone, doubled, exchanged, or marks have come between."""
    for _ in range(rng.randint(1, 4)):
        i, j = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        match rng.randrange(5):
            case 0:
                text = text[:i] + text[min(j, i + 8) :]
            case 1:
                text = text[:i] + rng.choice(MARKS) + text[i:]
            case 2:
                text = text[:j] + text[i:j] + text[j:]
            case 3:
                text = text[:i]
            case _:
                text = text[:i] + rng.choice('"{}[]<>\\x\n ') + text[i + 1 :]
    return text


def cut(rng: random.Random, text: str) -> list[str]:
    places = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(rng.randint(0, 6)))})
    return [text[i:j] for i, j in itertools.pairwise(places)]


def told(text: str) -> Counter[str]:
    """Count the words in a text that are of the arguments, and so of no mark."""
    return Counter({word: text.count(word) for word in TOLD})


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the members of calls that mean nothing, once they are read."""
    calls, read_other = list[str](), JsonCall._other

    def record(call: JsonCall, key: str) -> Reading[bool]:
        incoming = call._incoming
        start = incoming.trial()
        is_value = yield from read_other(call, key)
        value = incoming.settle(start)
        if is_value:
            calls.append(key + value)
        return is_value

    monkeypatch.setattr(JsonCall, "_other", record)
    return calls


@forms
def test_malformed_outputs_lose_nothing(form: Form, dropped: list[str]) -> None:
    """Without a call all is text; with one, what the marks do not say is text or arguments."""
    rng, kind = random.Random(form.parser), ToolParserManager.get_tool_parser(form.parser)
    originals = [form.write(calls) for calls in CASES]
    for _ in range(NUM_MUTATIONS // (2 if "mistral" in form.parser else 1)):
        text = mutated(rng, rng.choice(originals))
        dropped.clear()
        pieces = read(form, text)
        names = " ".join(piece.name for piece in pieces if isinstance(piece, CallStart)) + " ".join(dropped)
        assert read(form, *cut(rng, text)) == pieces, text
        shown = "".join(piece.text for piece in pieces if not isinstance(piece, CallStart))
        if not any(isinstance(piece, CallStart) for piece in pieces) and form.parser != "openai":
            assert shown == text
        said = re.sub(HEADS[form.parser], "", text) if form.parser in HEADS else text
        assert told(f"{shown} {names}") >= told(said), (text, pieces)
        if form.parser != "openai":  # what stands around the end of a message may look like a mark without that
            texts = [piece.text for piece in pieces if not isinstance(piece, CallStart)]
            seen = {mark: sum(each.count(mark) for each in texts) for mark in kind.marks}
            assert [mark for mark in kind.marks if seen[mark] > text.count(mark)] == [], (text, pieces)


@forms
def test_held_calls_are_whole(form: Form) -> None:
    """What is no whole call is text; where marks or a head make certain what it is, the model's arguments are kept."""
    rng = random.Random(form.parser)
    originals = [form.write(calls) for calls in CASES]
    for _ in range(NUM_MUTATIONS // 10):
        text = mutated(rng, rng.choice(originals))
        pieces = read(form, text, holds_calls=True)
        assert read(form, *cut(rng, text), holds_calls=True) == pieces, text
        parsed = gather(pieces)
        if not parsed.calls and form.parser != "openai":
            assert parsed.text == text
        for call in parsed.calls if form.parser in JSON_ALONE else ():
            json.loads(call.arguments)


@forms
@pytest.mark.parametrize(
    "part", ["<tool_call>", "[TOOL_CALLS]", "{", '{"a', "<", "[", " ", "\\", "[now(", "<|channel|>"]
)
def test_reading_takes_a_time_that_grows_with_the_text_alone(form: Form, part: str) -> None:
    def pieces(length: int) -> list[str]:
        text = form.write(CASES[0])[:-12] + part * (length // len(part))
        return [text[i : i + 4] for i in range(0, len(text), 4)]

    assert is_linear(pieces, lambda texts: read(form, *texts))


@pytest.mark.parametrize(("parser", "part"), [("mistral", "[TOOL_CALLS]? "), ("hermes", "a ")])
def test_the_marks_of_a_thousand_tools_are_compiled_once(
    monkeypatch: pytest.MonkeyPatch, parser: str, part: str
) -> None:
    compiled = list[int]()
    monkeypatch.setattr(re, "escape", lambda text, escape=re.escape: (compiled.append(1), escape(text))[1])
    tools = [FunctionTool(name=f"f_{i}") for i in range(1000)]
    assert gather(read(Form(parser, str), *part * 50, tools=tools)).text == part * 50
    assert len(compiled) <= 2 * 1002


def test_a_held_call_takes_a_time_that_grows_with_the_text_alone() -> None:
    def feed(texts: list[str]) -> None:
        parser = ToolParserManager.get_tool_parser("hermes")(TOOLS)
        parser.holds_calls = True
        for text in texts:
            assert parser.feed(text) == []

    assert is_linear(lambda length: [*'<tool_call>{"name": "now", "arguments": {"a": "', *"x" * length], feed)


@pytest.mark.parametrize(
    ("parser", "output", "arguments"),
    [
        (
            "deepseek_v3",
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"x": 1,}\n```<｜tool▁call▁e',
            '{"x": 1,}',
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1,}}</tool_', '{"x": 1,}'),
        ("mistral", '[TOOL_CALLS]f{"x": 1,}[TOOL_', '{"x": 1,}'),
        ("openai", '<|channel|>commentary to=functions.f<|message|>{"x": oops <|ca', '{"x": oops '),
        ("openai", '<|channel|>commentary to=functions.f<|message|>{"x": 1}<|ca', '{"x": 1}'),
    ],
)
def test_the_arguments_of_a_malformed_call_that_is_cut_have_no_part_of_a_mark(
    parser: str, output: str, arguments: str
) -> None:
    for texts in ([output], list(output)):
        parsed = gather(read(Form(parser, str), *texts))
        assert ([call.arguments for call in parsed.calls], parsed.text) == ([arguments], "")
