"""Ollama's routes, of answers that the model's core is told to give."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm.server.serving_ollama import messages_in_chat
from tests.server.support import Answer, Served
from tests.server.tool_support import CALL, TOOL, tool_served


@pytest.fixture(scope="module")
def server(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tool_served(tokenizer, tmp_path_factory.mktemp("replies")) as server:
        yield server


def chat(server: Served, content: str, **given: Any) -> Answer:
    messages = [{"role": "user", "content": content}]
    body = {"model": "tiny:latest", "messages": messages, "options": {"temperature": 0, "num_ctx": 4096}}
    return server.post("/api/chat", body | given)


def lines(answer: Answer) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    found = [json.loads(line) for line in answer.body.splitlines()]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    return found


def test_the_model_is_found(server: Served) -> None:
    assert server.get("/api/version").json.keys() == {"version"}
    [model] = server.get("/api/tags").json["models"]
    assert model["name"] == "tiny:latest"
    assert len(model["digest"]) == 64
    [running] = server.get("/api/ps").json["models"]
    assert running["context_length"] == 4096
    shown = server.post("/api/show", {"model": model["name"]}).json
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["jaxllm.context_length"] == 4096
    assert server.post("/api/show", {"name": "tiny"}).json == shown
    missing = server.post("/api/show", {"model": "other"})
    assert (missing.status, missing.json.keys()) == (404, {"error"})


@pytest.mark.parametrize("content", ["weather?", "both?", "think?", "think and call?", "broken?"])
def test_a_stream_joined_is_the_whole_answer(server: Served, content: str) -> None:
    whole = chat(server, content, tools=[TOOL], stream=False).json
    streamed = lines(chat(server, content, tools=[TOOL]))
    messages = [line["message"] for line in streamed]
    assert "".join(message["content"] for message in messages) == whole["message"]["content"]
    assert "".join(message.get("thinking", "") for message in messages) == whole["message"].get("thinking", "")
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    assert calls == whole["message"].get("tool_calls", [])
    for last in (streamed[-1], whole):
        assert (last["done_reason"], last["model"]) == ("stop", "tiny:latest")
        assert last["eval_count"] == whole["eval_count"] > 0
        assert last["total_duration"] >= last["eval_duration"] > 0


def test_calls_have_their_arguments_as_objects(server: Served) -> None:
    answer = chat(server, "weather?", tools=[TOOL], stream=False).json
    arguments = {"city": "Ulm", "days": 2}
    assert answer["message"]["tool_calls"] == [{"function": {"name": "get_weather", "arguments": arguments}}]
    messages = [
        {"role": "user", "content": "weather?"},
        answer["message"],
        {"role": "tool", "tool_name": "get_weather", "content": "21 degrees"},
    ]
    assert chat(server, "", messages=messages, stream=False).json["message"]["content"] == "It is warm."


def test_calls_get_ids_that_their_results_refer_to() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    other = {"id": "mine", "function": {"name": "g", "arguments": {}}}
    found = messages_in_chat(
        [
            {"role": "user", "content": "x", "images": []},
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call, other, call]},
            {"role": "tool", "content": "3", "tool_name": "g"},
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2", "tool_name": "f"},
        ]
    )
    assert found[1]["reasoning"] == "hm"
    assert found[1]["tool_calls"] == [
        {"id": "call_1_0", "type": "function", **call},
        {"type": "function", **other},
        {"id": "call_1_2", "type": "function", **call},
    ]
    assert [message["tool_call_id"] for message in found[2:]] == ["mine", "call_1_0", "call_1_2"]


def test_thinking_can_be_hidden(server: Served) -> None:
    assert chat(server, "think?", stream=False).json["message"]["thinking"] == "Hm, two."
    hidden = chat(server, "think?", stream=False, think=False).json["message"]
    assert hidden == {"role": "assistant", "content": "It is 4."}


def test_generate(server: Served) -> None:
    body = {"model": "tiny", "prompt": "think?", "system": "s"}
    streamed = lines(server.post("/api/generate", body))
    assert "".join(line["response"] for line in streamed) == "It is 4."
    assert "".join(line.get("thinking", "") for line in streamed) == "Hm, two."
    whole = server.post("/api/generate", body | {"stream": False, "options": {"num_predict": 4}}).json
    assert (whole["eval_count"], whole["done_reason"]) == (4, "length")


def test_a_raw_prompt_is_no_message(server: Served) -> None:
    body = {"model": "tiny", "prompt": "weather?", "stream": False, "options": {"num_predict": 2}}
    raw = server.post("/api/generate", body | {"raw": True}).json
    assert raw["prompt_eval_count"] < server.post("/api/generate", body).json["prompt_eval_count"]
    whole = server.post("/api/generate", body | {"raw": True, "options": {}}).json
    assert whole["response"] == CALL


def test_fields_that_clients_send_empty_have_no_effect(server: Served) -> None:
    empty = {"suffix": "", "template": "", "system": "", "context": [], "images": [], "format": "", "options": {}}
    body = {"model": "tiny", "prompt": "think?", "stream": False, "raw": None, "keep_alive": "5m", "think": None}
    assert server.post("/api/generate", body | empty).json["response"] == "It is 4."


@pytest.mark.parametrize("fields", [{}, {"messages": [], "prompt": ""}])
def test_without_anything_to_answer_the_model_is_loaded(server: Served, fields: dict[str, Any]) -> None:
    for route, name, empty in (("chat", "message", {"role": "assistant", "content": ""}), ("generate", "response", "")):
        answer = server.post(f"/api/{route}", {"model": "tiny", "keep_alive": -1, **fields}).json
        assert (answer["done"], answer["done_reason"], answer[name]) == (True, "load", empty)


def test_an_answer_can_be_held_to_a_schema(tiny_server: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {**schema, "additionalProperties": False}
    answer = chat(tiny_server, "x", format=form, stream=False).json
    assert json.loads(answer["message"]["content"])["a"] in (True, False)
    assert answer["eval_duration"] > 1


def test_a_missing_key_is_told_of_in_ollamas_form(tokenizer: str, tmp_path: Path) -> None:
    with tool_served(tokenizer, tmp_path, "--api-key", "secret") as server:
        refused = server.get("/api/tags")
        assert (refused.status, type(refused.json["error"])) == (401, str)
        assert server.get("/api/tags", {"authorization": "Bearer secret"}).status == 200


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("chat", "images", {"messages": [{"role": "user", "content": "x", "images": ["aa"]}]}),
    ("chat", "format", {"format": "xml"}),
    ("chat", "options.temperature", {"options": {"temperature": -1}}),
    ("chat", "options.temperature", {"options": {"temperature": "hot"}}),
    ("chat", "options.repeat_penalty", {"options": {"repeat_penalty": 0}}),
    ("chat", "options.num_predict", {"options": {"num_predict": 2**31}}),
    ("chat", "think", {"think": 3}),
    ("chat", "messages", {"messages": [{"content": "x"}]}),
    ("chat", "tool_calls", {"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}),
    ("chat", "tools", {"tools": [{"type": "function"}]}),
    ("chat", "model", {"model": None}),
    ("generate", "suffix", {"suffix": "x"}),
    ("generate", "images", {"images": ["aa"]}),
    ("generate", "template", {"template": "x"}),
    ("generate", "context", {"context": [1]}),
    ("generate", "system", {"system": "x", "raw": True}),
]


@pytest.mark.parametrize(("route", "name", "given"), REFUSED)
def test_errors_have_ollamas_form(server: Served, route: str, name: str, given: dict[str, Any]) -> None:
    body = {"model": "tiny", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    answer = server.post(f"/api/{route}", body | given)
    assert answer.status == 400, answer.body
    assert name in answer.json["error"]
