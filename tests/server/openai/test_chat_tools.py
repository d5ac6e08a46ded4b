"""Tools and reasoning in chat completions, of answers that the model's core is told to give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.support import Answer, Served
from tests.server.tool_support import ARGUMENTS, CALL, REPLIES, TOOL, WEATHER, tool_served

PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tool_served(tokenizer, tmp_path_factory.mktemp("replies")) as server:
        yield server


def ask(server: Served, content: str, **fields: Any) -> Answer:
    messages = [{"role": "user", "content": content}]
    return server.post(PATH, {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 400} | fields)


def message_of(events: list[Any]) -> dict[str, Any]:
    """Put the deltas of a stream together, as clients do."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for delta in (each["choices"][0]["delta"] for each in events if each["choices"]):
        message["content"] += delta.get("content", "")
        message["reasoning"] += delta.get("reasoning", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({"id": call["id"], "type": call["type"], "function": call["function"]})
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


def without_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert len({call["id"] for call in calls}) == len(calls)
    return [{name: value for name, value in call.items() if name != "id"} for call in calls]


CASES = [
    ("weather?", {"tools": [TOOL]}, "tool_calls"),
    ("both?", {"tools": [TOOL]}, "tool_calls"),
    ("broken?", {"tools": [TOOL]}, "stop"),
    ("think?", {}, "stop"),
    ("think?", {"include_reasoning": False}, "stop"),
    ("think and call?", {"tools": [TOOL]}, "tool_calls"),
    ("weather?", {"tools": [TOOL], "tool_choice": "none"}, "stop"),
    ("weather?", {}, "stop"),
]


@pytest.mark.parametrize(("content", "fields", "reason"), CASES)
def test_a_stream_joined_is_the_whole_answer(server: Served, content: str, fields: dict[str, Any], reason: str) -> None:
    whole = ask(server, content, **fields).json["choices"][0]
    events = ask(server, content, stream=True, **fields).events
    streamed = message_of(events)
    assert streamed["content"] == (whole["message"]["content"] or "")
    assert streamed["reasoning"] == (whole["message"]["reasoning"] or "")
    assert without_ids(streamed["tool_calls"]) == without_ids(whole["message"].get("tool_calls", []))
    assert ("tool_calls" in whole["message"]) == (reason == "tool_calls")
    ends = [each["choices"][0]["finish_reason"] for each in events if each["choices"]]
    assert [end for end in ends if end] == [reason]
    assert whole["finish_reason"] == reason


def test_a_call_is_read_from_the_text(server: Served) -> None:
    message = ask(server, "weather?", tools=[TOOL]).json["choices"][0]["message"]
    assert message["content"] is None
    function = {"name": "get_weather", "arguments": ARGUMENTS}
    assert without_ids(message["tool_calls"]) == [{"type": "function", "function": function}]
    both = ask(server, "both?", tools=[TOOL]).json["choices"][0]["message"]
    assert both["content"].strip() == "I look."
    assert [call["function"]["arguments"] for call in both["tool_calls"]] == [
        ARGUMENTS,
        ARGUMENTS.replace("Ulm", "Bonn"),
    ]


def test_the_arguments_of_a_stream_come_in_pieces(server: Served) -> None:
    events = ask(server, "weather?", tools=[TOOL], stream=True).events
    deltas = [each["choices"][0]["delta"].get("tool_calls", []) for each in events]
    assert sum(map(len, deltas)) > 5


def test_reasoning_is_split_off_or_left_out(server: Served) -> None:
    message = ask(server, "think?").json["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("Hm, two.",) * 2 + ("It is 4.",)
    hidden = ask(server, "think?", include_reasoning=False).json["choices"][0]["message"]
    assert (hidden["reasoning"], hidden["content"]) == (None, "It is 4.")
    opened = ask(server, "weather?", chat_template_kwargs={"thinks": True}).json["choices"][0]["message"]
    assert (opened["reasoning"], opened["content"]) == (CALL, None)


def test_a_call_ends_reasoning_that_nothing_else_has_ended(server: Served) -> None:
    fields = {"tools": [TOOL], "chat_template_kwargs": {"thinks": True}}
    whole = ask(server, "both?", **fields).json["choices"][0]
    message = whole["message"]
    assert (message["reasoning"], message["content"], whole["finish_reason"]) == ("I look.", None, "tool_calls")
    assert len(message["tool_calls"]) == 2
    streamed = message_of(ask(server, "both?", stream=True, **fields).events)
    assert (streamed["reasoning"], streamed["content"]) == ("I look.", "")
    assert without_ids(streamed["tool_calls"]) == without_ids(message["tool_calls"])


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_is_cut_leaves_no_marks_in_the_text(server: Served, choice: Any) -> None:
    for most in (1, 2, 5, 12, 25):
        fields = {"tools": [TOOL], "tool_choice": choice, "max_tokens": most}
        whole = ask(server, "weather?", **fields).json["choices"][0]
        assert whole["finish_reason"] == "length"
        assert not whole["message"]["content"]
        streamed = message_of(ask(server, "weather?", stream=True, **fields).events)
        assert streamed["content"] == ""
        assert without_ids(streamed["tool_calls"]) == without_ids(whole["message"].get("tool_calls", []))


def test_malformed_calls_are_text(server: Served) -> None:
    message = ask(server, "broken?", tools=[TOOL]).json["choices"][0]["message"]
    assert message["content"] == '<tool_call>\n{"name": get_weather}</tool_call>'
    assert "tool_calls" not in message  # an empty list, sent back, is a call to many templates


def test_a_malformed_call_is_text_unless_a_stream_has_begun_it(server: Served) -> None:
    whole = ask(server, "malformed?", tools=[TOOL]).json["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == (REPLIES["malformed?"], "stop")
    assert "tool_calls" not in whole["message"]
    streamed = message_of(ask(server, "malformed?", tools=[TOOL], stream=True).events)
    [call] = streamed["tool_calls"]
    assert (call["function"], streamed["content"]) == (
        {"name": "get_weather", "arguments": ARGUMENTS.replace("2}", "2,}")},
        "",
    )


def test_a_call_that_is_cut_short_keeps_what_was_written(server: Served) -> None:
    fields = {"tools": [TOOL], "max_tokens": 50}
    whole = ask(server, "weather?", **fields).json["choices"][0]
    streamed = message_of(ask(server, "weather?", stream=True, **fields).events)
    for message in (whole["message"], streamed):
        [call] = message["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        assert ARGUMENTS.startswith(call["function"]["arguments"])
        assert '{"city' in call["function"]["arguments"]
        assert not message["content"]
    assert whole["finish_reason"] == "length"


def test_without_tools_calls_are_text(server: Served) -> None:
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        assert ask(server, "weather?", **fields).json["choices"][0]["message"]["content"] == CALL


def test_a_conversation_goes_on_with_the_result(server: Served) -> None:
    call = ask(server, "weather?", tools=[TOOL]).json["choices"][0]["message"]
    messages = [
        {"role": "user", "content": "weather?"},
        call,
        {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "21 degrees"},
    ]
    answer = ask(server, "", messages=messages, tools=[TOOL], return_prompt_text=True).json
    assert answer["choices"][0]["message"]["content"] == "It is warm."
    assert (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Ulm", "days": 2}}</tool_call>'
        in (answer["prompt_text"])
    )


def test_the_template_shows_tools_unless_told_otherwise(server: Served, tokenizer: str, tmp_path: Path) -> None:
    fields = {"tools": [TOOL], "tool_choice": "none", "return_prompt_text": True}
    assert ask(server, "x", max_tokens=1, **fields).json["prompt_text"].startswith("<tools>get_weather;</tools>")
    with tool_served(tokenizer, tmp_path, "--exclude-tools-when-tool-choice-none") as other:
        assert ask(other, "x", max_tokens=1, **fields).json["prompt_text"] == "<user>x<assistant>"


def test_a_named_function_is_no_reason_to_end(server: Served) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = ask(server, "weather?", tools=[TOOL], tool_choice=choice).json["choices"][0]
    assert len(answer["message"]["tool_calls"]) == 1
    assert answer["finish_reason"] == "stop"


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": ""}}]}),
    ("tools", {"tools": [{"type": "function"}]}),
    ("tools", {"tools": [TOOL, TOOL]}),
    ("tools", {"tools": [{"type": "function", "function": {**WEATHER, "parameters": 3}}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": "sometimes"}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}}),
    ("tools", {"tools": [TOOL], "use_beam_search": True}),
]


@pytest.mark.parametrize(("name", "fields"), REFUSED)
def test_what_makes_no_sense_is_refused_by_name(server: Served, name: str, fields: dict[str, Any]) -> None:
    answer = ask(server, "x", **fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, name), answer.body
