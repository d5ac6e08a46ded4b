"""Anthropic's messages, of answers that the model's core is told to give."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from jaxllm.server.anthropic.input import as_chat
from jaxllm.server.anthropic.protocol import MessagesRequest
from tests.server.support import Answer, Served
from tests.server.tool_support import WEATHER, tool_served

PATH = "/v1/messages"
TOOL = {"name": "get_weather", "description": "d", "input_schema": WEATHER["parameters"]}


@pytest.fixture(scope="module")
def server(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tool_served(tokenizer, tmp_path_factory.mktemp("replies"), "--enable-prompt-tokens-details") as server:
        yield server


def ask(server: Served, content: Any, **fields: Any) -> Answer:
    messages = [{"role": "user", "content": content}]
    return server.post(PATH, {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 400} | fields)


DOCUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"source": {"type": "text", "media_type": "text/plain", "data": "It rains."}}, "It rains."),
    (
        {"source": {"type": "content", "content": "It rains."}, "title": "Ulm", "context": "Today", "citations": {}},
        "Ulm\nToday\nIt rains.",
    ),
    ({"source": {"type": "content", "content": [{"type": "text", "text": each} for each in "ab"]}}, "a\nb"),
]
SEARCH = {"type": "search_result", "source": "http://a", "title": "T", "content": [{"type": "text", "text": "found"}]}


def test_documents_and_search_results_are_text() -> None:
    def said(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
        request = MessagesRequest(messages=[{"role": "user", "content": content}], max_tokens=1)
        return as_chat(request, has_thinking_tokens=False).messages

    for document, text in DOCUMENTS:
        assert said([{"type": "document", **document}]) == [{"role": "user", "content": text}]
    assert said([SEARCH, {"type": "text", "text": "x"}]) == [{"role": "user", "content": "T\nhttp://a\nfound\n\nx"}]
    references = [{"type": "tool_reference", "tool_name": name} for name in ("f", "g")]
    result = {"type": "tool_result", "tool_use_id": "1", "content": [SEARCH, *references]}
    assert said([result]) == [{"role": "tool", "tool_call_id": "1", "content": "T\nhttp://a\nfound\nf\ng"}]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aa"}},
        {"type": "document", "source": {"type": "text", "data": 3}},
        {"type": "document", "source": None},
        {"type": "document", "source": {"type": "content", "content": [{"type": "image"}]}},
        {"type": "search_result", "content": "x"},
        {"type": "tool_reference"},
    ],
)
def test_documents_that_are_no_text_are_refused(server: Served, block: dict[str, Any]) -> None:
    refused = ask(server, [block])
    assert (refused.status, refused.json["error"]["type"]) == (400, "invalid_request_error")
    assert "messages[0].content[0]" in refused.json["error"]["message"]


def test_models_have_what_anthropics_clients_read(server: Served) -> None:
    listed = server.get("/v1/models", {"anthropic-version": "2023-06-01"}).json
    [card] = listed["data"]
    assert (card["type"], card["id"], card["display_name"]) == ("model", "tiny", "tiny")
    assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "tiny", "tiny")
    assert server.get("/v1/models/tiny").json == card


def events_of(answer: Answer) -> list[dict[str, Any]]:
    events = []
    for frame in answer.body.decode().split("\n\n")[:-1]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the events of a stream together, as clients do."""
    message = events[0]["message"]
    partial = ""
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                partial = ""
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "input_json_delta":
                        partial += delta["partial_json"]
            case "content_block_stop":
                if message["content"][event["index"]]["type"] == "tool_use":
                    message["content"][event["index"]]["input"] = json.loads(partial)
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {name: value for name, value in message.items() if name != "id"} | {"content": content}


CASES = [
    ("weather?", {"tools": [TOOL]}, ["tool_use"], "tool_use"),
    ("both?", {"tools": [TOOL]}, ["text", "tool_use", "tool_use"], "tool_use"),
    ("think?", {}, ["thinking", "text"], "end_turn"),
    ("think and call?", {"tools": [TOOL]}, ["thinking", "tool_use"], "tool_use"),
    ("weather?", {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}, ["tool_use"], "tool_use"),
    ("think?", {"max_tokens": 3}, ["thinking"], "max_tokens"),
    ("think?", {"stop_sequences": ["is"]}, ["thinking", "text"], "stop_sequence"),
]


def test_a_call_that_is_cut_short_is_text_unless_a_stream_has_begun_it(server: Served) -> None:
    fields = {"tools": [TOOL], "max_tokens": 50}
    whole = ask(server, "weather?", **fields).json
    [block] = whole["content"]
    assert block["type"] == "text"
    assert block["text"].startswith('get_weather {"city')
    events = events_of(ask(server, "weather?", stream=True, **fields))
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert block["text"] == "get_weather " + "".join(delta["partial_json"] for delta in deltas)
    ends = [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"]
    assert [whole["stop_reason"], *ends] == ["max_tokens"] * 2


@pytest.mark.parametrize(("content", "fields", "kinds", "reason"), CASES)
def test_a_stream_joined_is_the_whole_message(
    server: Served, content: str, fields: dict[str, Any], kinds: list[str], reason: str
) -> None:
    whole = ask(server, content, **fields).json
    events = events_of(ask(server, content, stream=True, **fields))
    streamed = message_of(events)
    for message in (whole, streamed):
        usage = message.pop("usage")
        assert usage["output_tokens"] > 0
    assert without_ids(streamed) == without_ids(whole)
    assert [block["type"] for block in whole["content"]] == kinds
    assert whole["stop_reason"] == reason
    assert whole["stop_sequence"] == ("is" if reason == "stop_sequence" else None)
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]


def test_the_order_of_events(server: Served) -> None:
    names = [event["type"] for event in events_of(ask(server, "think and call?", tools=[TOOL], stream=True))]
    kept = [name for i, name in enumerate(names) if name != "content_block_delta" or names[i - 1] != name]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kept == ["message_start", "ping", *block, *block, "message_delta", "message_stop"]


def test_blocks_are_the_same_message_in_chat() -> None:
    request = MessagesRequest(
        max_tokens=5,
        system=[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}],
        messages=[
            {"role": "system", "content": "c"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I ask."},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                    {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "r"}]},
                    {"type": "tool_result", "tool_use_id": "t2", "content": "no such file", "is_error": True},
                    {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}},
                ],
            },
            {"role": "system", "content": "be quick"},
            {"role": "user", "content": "now"},
            {"role": "assistant", "content": "I"},
        ],
    )
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "t2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    chat = as_chat(request, has_thinking_tokens=False)
    assert chat.messages == [
        {"role": "system", "content": "a\n\nb\n\nc"},
        {"role": "user", "content": "hi\n\nthere"},
        {"role": "assistant", "content": "I ask.", "reasoning": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "r"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no such file"},
        {"role": "user", "content": "and?\n\nbe quick\n\nnow"},
        {"role": "assistant", "content": "I"},
    ]
    assert chat.continue_final_message
    assert not chat.add_generation_prompt


def test_the_billing_header_of_claude_code_is_left_out() -> None:
    header = "x-anthropic-billing-header: cc_version=2.1.63.a43; cc_entrypoint=cli; cch=0a1b2;"
    block = {"type": "text", "text": header, "cache_control": {"type": "ephemeral"}}
    request = MessagesRequest(
        max_tokens=5,
        system=[block, {"type": "text", "text": "a"}],
        messages=[
            {"role": "system", "content": [block]},
            {"role": "user", "content": "hi"},
            {"role": "system", "content": f"{header}\nbe quick"},
            {"role": "assistant", "content": "x"},
            {"role": "system", "content": header},
            {"role": "user", "content": header},
        ],
    )
    assert as_chat(request, has_thinking_tokens=False).messages == [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "hi\n\nbe quick"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": header},
    ]
    alone = MessagesRequest(max_tokens=5, system=header, messages=[{"role": "user", "content": "hi"}])
    assert as_chat(alone, has_thinking_tokens=False).messages == [{"role": "user", "content": "hi"}]


def test_thinking_and_choices() -> None:
    base: dict[str, Any] = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}

    def chat(**fields: Any) -> Any:
        return as_chat(MessagesRequest(**base | fields), has_thinking_tokens=True)

    on = chat(thinking={"type": "enabled", "budget_tokens": 7})
    assert (on.thinking_token_budget, on.chat_template_kwargs) == (7, {"enable_thinking": True})
    assert chat(thinking={"type": "adaptive"}).chat_template_kwargs is None
    assert chat(output_config={"effort": "max"}).reasoning_effort == "high"
    assert chat(thinking={"type": "disabled"}).chat_template_kwargs == {"enable_thinking": False}
    assert chat(tool_choice={"type": "any", "disable_parallel_tool_use": True}).tool_choice == "required"
    assert chat(tool_choice={"type": "any", "disable_parallel_tool_use": True}).parallel_tool_calls is False
    assert (
        chat(tools=[{"type": "web_search_20250305", "name": "web_search"}], tool_choice={"type": "auto"}).tools is None
    )


def test_tokens_are_counted_as_they_are_used(server: Served) -> None:
    fields = {"system": "s", "tools": [TOOL], "messages": [{"role": "user", "content": "weather?"}]}
    counted = server.post(f"{PATH}/count_tokens", fields).json["input_tokens"]
    usage = ask(server, "", **fields).json["usage"]
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(usage[name] for name in parts) == counted


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": None}),
    ("messages", {"messages": []}),
    ("messages", {"messages": [{"role": "bard", "content": "x"}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
    ("messages", {"messages": [{"role": "user", "content": 3}]}),
    ("system", {"system": [{"type": "image"}]}),
    ("stop_sequences", {"stop_sequences": [""]}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "maybe"}}),
    ("thinking", {"thinking": {"type": "loud"}}),
    ("temperature", {"temperature": -1}),
    ("messages", {"messages": "x"}),
    ("output_format", {"output_format": {"type": "json_schema", "schema": {}}}),
]


@pytest.mark.parametrize(("name", "fields"), REFUSED)
def test_errors_have_anthropics_form(server: Served, name: str, fields: dict[str, Any]) -> None:
    answer = ask(server, "x", **fields)
    assert answer.status == 400, answer.body
    assert answer.json["type"] == "error"
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert name in answer.json["error"]["message"]


def test_an_unknown_model_is_not_found(server: Served) -> None:
    answer = ask(server, "x", model="other")
    assert (answer.status, answer.json["error"]["type"]) == (404, "not_found_error")
    assert answer.json["request_id"] == answer.headers["request-id"]


def test_a_prompt_that_is_too_long_is_told_of_as_clients_expect(server: Served) -> None:
    long = [{"role": "user", "content": "a " * 4096}]
    counted = server.post(f"{PATH}/count_tokens", {"messages": long}).json["input_tokens"]
    message = ask(server, "", messages=long).json["error"]["message"]
    assert message.startswith(f"prompt is too long: {counted} tokens > 4095 maximum")


def test_an_answer_goes_on_with_what_has_begun(server: Served) -> None:
    begun = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]
    asked = begun[:1]
    counts = [server.post(f"{PATH}/count_tokens", {"messages": each}).json["input_tokens"] for each in (asked, begun)]
    assert counts[0] < counts[1] < counts[0] + len("It is<user>") + 1
    assert ask(server, "", messages=begun, max_tokens=2).status == 200


@pytest.mark.server
def test_an_answer_can_be_held_to_a_schema(tiny_server: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    config = {"format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}}
    [block] = ask(tiny_server, "x", output_config=config).json["content"]
    assert json.loads(block["text"])["a"] in (True, False)


def test_a_key_may_come_as_anthropics_clients_send_it(tokenizer: str, tmp_path: Any) -> None:
    with tool_served(tokenizer, tmp_path, "--api-key", "secret") as server:
        body = {"max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
        assert server.post(f"{PATH}?beta=true", body, {"x-api-key": "secret"}).status == 200
        assert server.post(PATH, body, {"authorization": "Bearer secret"}).status == 200
        refused = server.post(PATH, body, {"x-api-key": "other"})
        assert (refused.status, refused.json["error"]["type"]) == (401, "authentication_error")
        assert server.post(PATH, body, {"x-api-key": "secret", "authorization": "Bearer x"}).status == 401
