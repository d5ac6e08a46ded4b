"""Cohere's chat, of answers that the model's core is told to give."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from jaxllm.server.cohere.input import as_chat
from jaxllm.server.cohere.protocol import CohereChatRequest
from tests.server.support import Answer, Served
from tests.server.tool_support import ARGUMENTS, REPLIES, THINKING_TEMPLATE, TOOL, tool_served

PATH = "/v2/chat"
TEMPLATE = "{{ documents }}{{ safety_mode }}" + THINKING_TEMPLATE


@pytest.fixture(scope="module")
def server(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("replies")
    with tool_served(tokenizer, folder, "--enable-prompt-tokens-details", template=TEMPLATE) as server:
        yield server


@pytest.fixture(scope="module")
def plain(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Return a server whose chat template shows neither documents nor a safety mode."""
    with tool_served(tokenizer, tmp_path_factory.mktemp("replies")) as server:
        yield server


def ask(server: Served, content: Any, *, path: str = PATH, **fields: Any) -> Answer:
    messages = [{"role": "user", "content": content}]
    return server.post(path, {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 400} | fields)


def events_of(answer: Answer) -> list[dict[str, Any]]:
    *lines, last = answer.body.decode().split("\n\n")[:-1]
    assert last == "data: [DONE]"
    events = []
    for name, data in (frame.split("\n") for frame in lines):
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def whole_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the events of a stream together, as clients do."""
    message: dict[str, Any] = {}
    answer: dict[str, Any] = {"message": message}
    for event in events:
        delta = event.get("delta", {}).get("message", {})
        match event["type"]:
            case "message-start":
                answer["id"] = event["id"]
                message |= delta
            case "content-start":
                message.setdefault("content", []).append(delta["content"])
                assert event["index"] == len(message["content"]) - 1
            case "content-delta":
                for name, text in delta["content"].items():
                    message["content"][event["index"]][name] += text
            case "tool-call-start":
                message.setdefault("tool_calls", []).append(delta["tool_calls"])
                assert event["index"] == len(message["tool_calls"]) - 1
            case "tool-call-delta":
                function = message["tool_calls"][event["index"]]["function"]
                function["arguments"] += delta["tool_calls"]["function"]["arguments"]
            case "message-end":
                answer |= event["delta"]
            case kind:
                assert kind in ("content-end", "tool-call-end")
    return answer


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    usage = {name: value for name, value in answer["usage"].items() if name != "cached_tokens"}
    calls = [{**call, "id": ""} for call in answer["message"].get("tool_calls", [])]
    return {**answer, "id": "", "usage": usage, "message": {**answer["message"], "tool_calls": calls}}


CASES: list[tuple[str, dict[str, Any], list[str], int, str]] = [
    ("weather?", {"tools": [TOOL]}, [], 1, "TOOL_CALL"),
    ("both?", {"tools": [TOOL]}, ["text"], 2, "TOOL_CALL"),
    ("think?", {}, ["thinking", "text"], 0, "COMPLETE"),
    ("think and call?", {"tools": [TOOL]}, ["thinking"], 1, "TOOL_CALL"),
    ("weather?", {"tools": [TOOL], "tool_choice": "REQUIRED"}, [], 1, "TOOL_CALL"),
    ("weather?", {"tools": [TOOL], "tool_choice": "NONE"}, ["text"], 0, "COMPLETE"),
    ("think?", {"max_tokens": 3}, ["thinking"], 0, "MAX_TOKENS"),
    ("think?", {"stop_sequences": ["is"]}, ["thinking", "text"], 0, "STOP_SEQUENCE"),
]


@pytest.mark.parametrize(("content", "fields", "kinds", "num_calls", "reason"), CASES)
def test_a_stream_joined_is_the_whole_answer(
    server: Served, content: str, fields: dict[str, Any], kinds: list[str], num_calls: int, reason: str
) -> None:
    whole = ask(server, content, **fields).json
    events = events_of(ask(server, content, path="/cohere/v2/chat", stream=True, **fields))
    assert without_ids(whole_of(events)) == without_ids(whole)
    message = whole["message"]
    assert [block["type"] for block in message.get("content", [])] == kinds
    assert [json.loads(call["function"]["arguments"])["days"] for call in message.get("tool_calls", [])] == (
        [2] * num_calls
    )
    assert whole["finish_reason"] == reason
    assert whole["usage"]["tokens"] == whole["usage"]["billed_units"]
    assert whole["usage"]["tokens"]["output_tokens"] > 0
    assert whole["usage"]["cached_tokens"] <= whole["usage"]["tokens"]["input_tokens"]


def test_the_order_of_events(server: Served) -> None:
    names = [event["type"] for event in events_of(ask(server, "think and call?", tools=[TOOL], stream=True))]
    kept = [name for i, name in enumerate(names) if not name.endswith("-delta") or names[i - 1] != name]
    content = ["content-start", "content-delta", "content-end"]
    call = ["tool-call-start", "tool-call-delta", "tool-call-end"]
    assert kept == ["message-start", *content, *call, "message-end"]


def test_a_call_that_is_cut_short_has_the_arguments_so_far(server: Served) -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "max_tokens": 60}
    whole = ask(server, "weather?", **fields).json
    assert without_ids(whole_of(events_of(ask(server, "weather?", stream=True, **fields)))) == without_ids(whole)
    [call] = whole["message"]["tool_calls"]
    assert ARGUMENTS.startswith(call["function"]["arguments"])
    assert whole["finish_reason"] == "MAX_TOKENS"


def chat_of(*messages: dict[str, Any], knows: bool = True, **fields: Any) -> Any:
    request = msgspec.convert({"messages": list(messages), **fields}, CohereChatRequest)
    return as_chat(request, lambda _: knows)


def test_messages_are_the_same_conversation_in_chat() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    document = {"type": "document", "document": {"id": "d", "data": {"text": "21"}}}
    picture = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:x"}}]
    asking = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": picture},
        {"role": "assistant", "tool_plan": "I ask.", "tool_calls": [call], "citations": None},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}, document]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm"},
                {"type": "text", "text": "It is "},
                {"type": "text", "text": "21."},
            ],
        },
        {"role": "user", "content": "Sure?"},
    ]
    assert chat_of(*asking).messages == [
        *asking[:2],
        {"role": "assistant", "content": None, "reasoning": "I ask.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": 'x\n{"id": "d", "text": "21"}'},
        {"role": "assistant", "content": asking[4]["content"][1:], "reasoning": "hm"},
        asking[5],
    ]


def test_fields_are_those_of_chat() -> None:
    schema = {"type": "object"}
    chat = chat_of(
        {"role": "user", "content": "x"},
        tools=[TOOL],
        strict_tools=True,
        documents=["a", {"data": {"title": "t", "snippet": "b"}, "id": "7"}, {"data": "c"}],
        citation_options={"mode": "OFF"},
        response_format={"type": "json_object", "json_schema": schema},
        safety_mode="STRICT",
        thinking={"type": "enabled", "token_budget": 9},
        chat_template_kwargs={"reasoning": False},
        k=0,
        p=0.5,
        logprobs=True,
    )
    assert chat.tools[0]["function"]["strict"] is True
    assert "strict" not in TOOL["function"]
    assert chat.documents == [{"text": "a"}, {"id": "7", "title": "t", "snippet": "b"}, {"text": "c"}]
    assert chat.response_format["json_schema"]["schema"] == schema
    assert chat.chat_template_kwargs == {"enable_thinking": True, "reasoning": False, "safety_mode": "STRICT"}
    assert (chat.thinking_token_budget, chat.top_k, chat.top_p, chat.num_logprobs) == (9, 0, 0.5, 0)
    off = chat_of({"role": "user", "content": "x"}, safety_mode="OFF", thinking={"type": "disabled", "token_budget": 9})
    assert off.chat_template_kwargs["safety_mode"] == "NONE"
    assert off.thinking_token_budget is None


def test_the_template_gets_documents_and_the_safety_mode(server: Served, plain: Served) -> None:
    asked: list[dict[str, Any]] = [{}, {"documents": ["a longer text"]}, {"safety_mode": "STRICT"}]
    counts = [ask(server, "think?", **fields).json["usage"]["tokens"]["input_tokens"] for fields in asked]
    assert counts[0] < min(counts[1:])
    others: dict[str, Any] = {"documents": ["a"], "safety_mode": "STRICT"}
    for name, value in others.items():
        refused = ask(plain, "think?", **{name: value})
        assert (refused.status, refused.json["message"].startswith(name)) == (400, True)
    assert ask(plain, "think?", safety_mode="OFF", documents=[]).status == 200


@pytest.mark.server
def test_logprobs_are_those_of_all_tokens(tiny_server: Served) -> None:
    fields = {"logprobs": True, "max_tokens": 5}
    whole = ask(tiny_server, "x", **fields).json
    assert len(whole["logprobs"]) == whole["usage"]["tokens"]["output_tokens"]
    assert all(len(each["token_ids"]) == 1 and each["logprobs"][0] <= 0 for each in whole["logprobs"])
    events = events_of(ask(tiny_server, "x", stream=True, **fields))
    streamed = [event["logprobs"] for event in events if "logprobs" in event]
    flat = [token_id for each in streamed for token_id in each["token_ids"]]
    assert flat == [token_id for each in whole["logprobs"] for token_id in each["token_ids"]][: len(flat)]
    assert flat
    assert "logprobs" not in ask(tiny_server, "x", max_tokens=5).json


@pytest.mark.server
def test_an_answer_can_be_held_to_a_schema(tiny_server: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_object", "json_schema": {**schema, "additionalProperties": False}}
    [block] = ask(tiny_server, "x", response_format=form).json["message"]["content"]
    assert json.loads(block["text"])["a"] in (True, False)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages[0]", {"messages": [{"role": "bard", "content": "x"}]}),
    ("messages[0]", {"messages": [{"role": "user", "content": 3}]}),
    ("messages[0].content[0]", {"messages": [{"role": "tool", "content": [{"type": "picture"}]}]}),
    ("messages[0]", {"messages": [{"role": "assistant", "content": "x", "citations": [{"start": 0}]}]}),
    ("messages[0]", {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}),
    ("citation_options", {"citation_options": {"mode": "FAST"}}),
    ("response_format", {"response_format": {"type": "json_schema"}}),
    ("response_format", {"response_format": {"type": "text", "json_schema": {}}}),
    ("tool_choice", {"tool_choice": "REQUIRED"}),
    ("tools", {"tools": [{"type": "function"}], "strict_tools": True}),
    ("stop_sequences", {"stop_sequences": [""]}),
    ("safety_mode", {"safety_mode": "LOUD"}),
    ("thinking", {"thinking": {"type": "enabled", "token_budget": 9}}),
    ("documents", {"documents": [{"text": "a"}]}),
    ("k: ", {"k": -2}),
    ("p: ", {"p": 0}),
    ("kv_transfer_params", {"kv_transfer_params": {"a": 1}}),
]


@pytest.mark.parametrize(("name", "fields"), REFUSED)
def test_errors_have_coheres_form(server: Served, name: str, fields: dict[str, Any]) -> None:
    answer = ask(server, "x", **fields)
    assert answer.status == 400, answer.body
    assert answer.json.keys() == {"message", "id"}
    assert name in answer.json["message"]


def test_an_unknown_model_is_not_found(server: Served) -> None:
    for path in (PATH, "/cohere/v2/chat"):
        answer = ask(server, "x", path=path, model="other")
        assert (answer.status, answer.json.keys()) == (404, {"message", "id"})
    assert server.get("/cohere/v2/other").json.keys() == {"message", "id"}


def test_a_reply_is_the_models_text(server: Served) -> None:
    said = ask(server, "think?").json["message"]["content"]
    assert f"<think>\n{said[0]['thinking']}\n</think>\n\n{said[1]['text']}" == REPLIES["think?"]
