"""Log-probabilities of responses: those of chat, at the tokens of the messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from jaxllm.logprobs import Logprob
from jaxllm.outputs import CompletionOutput
from jaxllm.parsers.output_parser import OutputParser
from jaxllm.parsers.pieces import Reasoning, Text
from jaxllm.parsers.reasoning import ReasoningMarks
from jaxllm.server.openai.turns import AnswerReader
from jaxllm.server.responses.logprobs import ScoredReader, ScoredText
from tests.server.response_support import events_of, without_ids
from tests.server.support import Served
from tests.server.tool_support import WEATHER, tool_served

PATH = "/v1/responses"
INCLUDE = {"include": ["message.output_text.logprobs"]}
TOOL = {"type": "function", **WEATHER}


@pytest.fixture(scope="module")
def server(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tool_served(tokenizer, tmp_path_factory.mktemp("replies")) as server:
        yield server


def parts_of(response: Any) -> list[Any]:
    return [part for item in response["output"] if item["type"] == "message" for part in item["content"]]


def texts(entries: Sequence[Any]) -> str:
    return b"".join(bytes(entry["bytes"]) for entry in entries).decode()


@pytest.mark.server
@pytest.mark.parametrize("fields", [{}, {"stop": ["e", "a"], "seed": 3}, {"top_logprobs": 3, "temperature": 1.0}])
def test_they_are_those_of_chat(tiny_server: Served, fields: dict[str, Any]) -> None:
    common = {"temperature": 0.0, "seed": 7, "ignore_eos": True} | fields
    chat = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 30, "logprobs": True}
    [choice] = tiny_server.post("/v1/chat/completions", common | chat).json["choices"]
    request = common | INCLUDE | {"input": "ab", "max_output_tokens": 30}
    [part] = parts_of(tiny_server.post(PATH, request).json)
    entries = choice["logprobs"]["content"]
    assert part["text"] == choice["message"]["content"]
    assert part["logprobs"] == entries[: len(part["logprobs"])]
    assert texts(part["logprobs"]).startswith(part["text"].replace("\ufffd", ""))
    assert len(entries) - len(part["logprobs"]) in ((0, 1) if "stop" in fields else (0,))
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {fields.get("top_logprobs", 0)}
    events = events_of(tiny_server.post(PATH, request | {"stream": True}))
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert len(deltas) > 1
    assert list(itertools.chain(*deltas)) == part["logprobs"]
    [done] = [event["logprobs"] for event in events if event["type"] == "response.output_text.done"]
    assert done == part["logprobs"] == parts_of(events[-1]["response"])[0]["logprobs"]
    assert events[-1]["response"]["top_logprobs"] == fields.get("top_logprobs", 0)


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        ("think?", {}),
        ("think?", {"include_reasoning": False}),
        ("both?", {"tools": [TOOL]}),
        ("broken?", {"tools": [TOOL]}),
        ("think and call?", {"tools": [TOOL]}),
        ("21 degrees", {}),
    ],
)
def test_texts_have_their_tokens_alone(server: Served, content: str, fields: dict[str, Any]) -> None:
    request = {"input": content, "temperature": 0} | INCLUDE | fields
    whole = server.post(PATH, request).json
    for part in parts_of(whole):
        assert texts(part["logprobs"]).strip() == part["text"].strip()
    events = events_of(server.post(PATH, request | {"stream": True}))
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    plain = server.post(PATH, {name: value for name, value in request.items() if name != "include"}).json
    assert [part["text"] for part in parts_of(plain)] == [part["text"] for part in parts_of(whole)]
    assert not any(part["logprobs"] for part in parts_of(plain))


def test_the_conversation_goes_on_without_them(server: Served) -> None:
    first = server.post(PATH, {"input": "21 degrees", "temperature": 0} | INCLUDE).json
    assert parts_of(first)[0]["logprobs"]
    assert server.get(f"{PATH}/{first['id']}").json == first
    turns = server.app.state.kept_responses.store.find(first["id"], "response_id").turns
    assert b'"logprobs":[]' in turns[-1]
    second = server.post(PATH, {"input": "weather?", "previous_response_id": first["id"]})
    assert second.status == 200


def output(words: Sequence[str | None], text: str, finish_reason: str | None = None) -> CompletionOutput:
    """Return an output with tokens of these texts."""
    ids = list(range(5, 5 + len(words)))
    positions = [{token_id: Logprob(-1.0, 1, word)} for token_id, word in zip(ids, words, strict=True)]
    return CompletionOutput(0, text, ids, None, positions, finish_reason=finish_reason)


CASES: list[tuple[list[str | None], str, list[tuple[str, list[str]]]]] = [
    (["a", "b", "c"], "abc", [("abc", ["a", "b", "c"])]),
    (["a", "", "é", "<|end|>"], "aé", [("aé", ["a", "", "é"])]),
    (["a", "<|x|>", "b"], "ab", [("ab", ["a", "b"])]),
    (["ab", "cd"], "abc", [("abc", ["ab", "cd"])]),
    (["a", "b", "STOP"], "ab", [("ab", ["a", "b"])]),
    (["a", "\ufffd\ufffd", "b"], "a\ufffdb", [("a\ufffdb", ["a", "\ufffd\ufffd", "b"])]),
    (["<think>", "It", "</think>", "\n\n", "It", " is", "<", "<"], "<think>It</think>\n\nIt is<<", []),
    (["<th", "ink>h", "m</thi", "nk>", "It"], "<think>hm</think>It", [("It", ["It"])]),
]


def test_what_is_held_back_for_a_stop_string_waits_for_its_text() -> None:
    reader = ScoredReader(AnswerReader(), 0)
    steps = [(["ab", "cd"], "a"), (["ef"], "bcde"), (["g", "h"], "f"), ([], "")]
    shown = []
    for number, (words, text) in enumerate(steps, 1):
        reason = "stop" if number == len(steps) else None
        pieces = [piece for piece in reader.pieces(output(words, text, reason)) if isinstance(piece, ScoredText)]
        shown.append([(piece.text, [each.token for each in piece.logprobs]) for piece in pieces])
    assert shown == [[], [("ab", ["ab"]), ("cd", ["cd"])], [("ef", ["ef"])], []]


@pytest.mark.parametrize(("words", "text", "expected"), CASES)
@pytest.mark.parametrize("shows_reasoning", [True, False])
def test_tokens_meet_their_texts(
    words: list[str | None], text: str, expected: list[tuple[str, list[str]]], *, shows_reasoning: bool
) -> None:
    marks = ReasoningMarks("<think>", "</think>")
    reader = AnswerReader(lambda: OutputParser(marks, None), shows_reasoning=shows_reasoning)
    pieces = ScoredReader(reader, 0).pieces(output(words, text, "stop"))
    assert [piece for piece in pieces if isinstance(piece, Text | Reasoning)]
    shown = [piece for piece in pieces if isinstance(piece, ScoredText)]
    got = ("".join(piece.text for piece in shown), [each.token for piece in shown for each in piece.logprobs])
    assert [got] == (expected or [("It is<<", ["It", " is", "<", "<"])])
