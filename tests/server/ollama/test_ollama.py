"""Ollama's routes, of answers that the model's core is told to give."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import UNSET

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.parsers.pieces import CallArguments, CallStart
from jaxllm.server.ollama.answers import AnswerBuilder
from jaxllm.server.ollama.protocol import OllamaMessage
from jaxllm.server.ollama.serving import messages_in_chat
from tests.e2e.tiny_engine import CASE
from tests.models.tiny import read_tensors
from tests.server.pooled_support import EMBED, PooledEngine
from tests.server.support import Answer, Served, served
from tests.server.tool_support import CALL, TOOL, tool_served


@pytest.fixture(scope="module")
def server(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tool_served(tokenizer, tmp_path_factory.mktemp("replies")) as server:
        yield server


def chat(server: Served, content: str, **fields: Any) -> Answer:
    messages = [{"role": "user", "content": content}]
    body = {"model": "tiny:latest", "messages": messages, "options": {"temperature": 0, "num_ctx": 4096}}
    return server.post("/api/chat", body | fields)


def lines(answer: Answer) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    pieces = [json.loads(line) for line in answer.body.splitlines()]
    assert [line["done"] for line in pieces] == [False] * (len(pieces) - 1) + [True]
    return pieces


def test_the_model_is_found(server: Served) -> None:
    assert server.get("/api/version").json.keys() == {"version"}
    [model] = server.get("/api/tags").json["models"]
    assert model["name"] == "tiny:latest"
    assert len(model["digest"]) == 64
    stored = server.llm.front.ready
    assert (model["size"], model["details"]["quantization_level"]) == (stored.num_weight_bytes, "BF16")
    assert model["size"] == 2 * sum(tensor.size for tensor in read_tensors(CASE).values())
    [running] = server.get("/api/ps").json["models"]
    assert (running["context_length"], running["size_vram"]) == (4096, model["size"])
    shown = server.post("/api/show", {"model": model["name"]}).json
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["jaxllm.context_length"] == 4096
    assert server.post("/api/show", {"name": "tiny"}).json == shown
    missing = server.post("/api/show", {"model": "other"})
    assert (missing.status, missing.json.keys()) == (404, {"error"})


@pytest.mark.parametrize("path", ["/api/pull", "/api/chat", "/api/nothing/here", "/api"])
def test_errors_of_paths_have_ollamas_form(server: Served, path: str) -> None:
    answer = server.ask("DELETE", path)
    assert answer.status in (404, 405)
    assert type(answer.json["error"]) is str
    assert server.get("/v1/messages/batches").json["type"] == "error"
    for other in ("/v1/nothing", "/nothing"):
        assert server.get(other).json["error"]["type"] == "NotFoundError"


def test_the_last_line_of_a_stream_has_only_its_end(server: Served) -> None:
    for content in ("weather?", "think and call?", "think?"):
        *_, before, last = lines(chat(server, content, tools=[TOOL]))
        assert last["message"] == {"role": "assistant", "content": ""}
        assert before["message"].get("tool_calls") or before["message"]["content"]
        assert "done_reason" not in before


@pytest.mark.parametrize("content", ["weather?", "both?", "think?", "think and call?", "broken?", "malformed?"])
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


def test_a_call_that_cannot_be_read_is_text(server: Served) -> None:
    options = {"temperature": 0, "num_predict": 50}
    for content, fields, begin, reason in (
        ("malformed?", {}, CALL[:30], "stop"),
        ("weather?", {"options": options}, 'get_weather {"city', "length"),
    ):
        whole = chat(server, content, tools=[TOOL], stream=False, **fields).json
        streamed = lines(chat(server, content, tools=[TOOL], **fields))
        text = "".join(line["message"]["content"] for line in streamed)
        assert text == whole["message"]["content"]
        assert text.startswith(begin)
        assert whole["done_reason"] == streamed[-1]["done_reason"] == reason
        assert not any("tool_calls" in line["message"] for line in [whole, *streamed])


def test_arguments_that_are_no_object_are_text() -> None:
    def answer(arguments: str, reason: str = "stop") -> tuple[str, Any]:
        builder, output = (
            AnswerBuilder("tiny", is_chat=True),
            CompletionOutput(0, "", [], None, None, finish_reason=reason),
        )
        pieces = [CallStart(0, "f", "id"), CallArguments(0, arguments)]
        line = builder.whole(pieces, output, RequestOutput("id", None, [], None, [output], finished=True))
        assert isinstance(line.message, OllamaMessage)
        return line.message.content, line.message.tool_calls

    for arguments, values in (('{"a": 1}', {"a": 1}), ("", {})):
        assert answer(arguments) == ("", [{"function": {"name": "f", "arguments": values}}])
    assert answer('{"a": ') == ('f {"a": ', UNSET)
    assert answer("[1]") == ("f [1]", UNSET)
    assert answer("", "length") == ("f ", UNSET)


def test_calls_get_ids_that_their_results_refer_to() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    other = {"id": "mine", "function": {"name": "g", "arguments": {}}}
    messages = messages_in_chat(
        [
            {"role": "user", "content": "x", "images": []},
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call, other, call]},
            {"role": "tool", "content": "3", "tool_name": "g"},
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2", "tool_name": "f"},
        ]
    )
    assert messages[1]["reasoning"] == "hm"
    assert messages[1]["tool_calls"] == [
        {"id": "call_1_0", "type": "function", **call},
        {"type": "function", **other},
        {"id": "call_1_2", "type": "function", **call},
    ]
    assert [message["tool_call_id"] for message in messages[2:]] == ["mine", "call_1_0", "call_1_2"]


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


@pytest.mark.server
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


@pytest.fixture(scope="module")
def embeds(mock: AsyncLLM) -> Iterator[Served]:
    with served(PooledEngine(mock, EMBED)) as server:  # type: ignore[arg-type]
        yield server


def test_embeddings(embeds: Served) -> None:
    vectors = [each["embedding"] for each in embeds.post("/v1/embeddings", {"input": ["a b", "c"]}).json["data"]]
    answer = embeds.post("/api/embed", {"model": "tiny:latest", "input": ["a b", "c"], "keep_alive": 0}).json
    assert answer["model"] == "tiny:latest"
    assert np.allclose(answer["embeddings"], vectors)
    assert answer["prompt_eval_count"] == 3
    assert answer["total_duration"] > answer["load_duration"] == 0
    assert embeds.post("/api/embed", {"model": "tiny", "input": "c"}).json["embeddings"] == answer["embeddings"][1:]
    short = embeds.post("/api/embed", {"model": "tiny", "input": "a b", "dimensions": 3}).json["embeddings"]
    assert np.allclose(short, np.array(vectors[:1])[:, :3] / np.linalg.norm(vectors[0][:3]))
    for empty in ({}, {"input": ""}, {"input": []}, {"input": None}):
        assert embeds.post("/api/embed", {"model": "tiny", **empty}).json["embeddings"] == []


def test_texts_to_embed_are_cut_unless_that_is_forbidden(embeds: Served) -> None:
    body = {"model": "tiny", "input": ["a " * 5000]}
    longest = embeds.get("/v1/models").json["data"][0]["max_model_len"]
    assert longest - 1 <= embeds.post("/api/embed", body).json["prompt_eval_count"] <= longest
    refused = embeds.post("/api/embed", body | {"truncate": False})
    assert refused.status == 400
    assert str(longest) in refused.json["error"]


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings"])
def test_a_model_that_generates_makes_no_embeddings(server: Served, path: str) -> None:
    answer = server.post(path, {"model": "tiny", "input": "a b", "prompt": "a b"})
    assert (answer.status, answer.json) == (400, {"error": "The model does not support Embeddings API"})


def test_one_embedding_in_the_older_form(embeds: Served) -> None:
    answer = embeds.post("/api/embeddings", {"model": "tiny", "prompt": "a b", "options": {"num_ctx": 8}})
    plain = embeds.post("/v1/embeddings", {"input": "a b", "use_activation": False}).json["data"][0]["embedding"]
    assert np.allclose(answer.json["embedding"], plain)
    assert embeds.post("/api/embeddings", {"model": "tiny", "prompt": ""}).json == {"embedding": []}
    for body in ({"model": "other", "prompt": "a"}, {"prompt": "a"}, {"model": "tiny", "prompt": 3}):
        assert type(embeds.post("/api/embeddings", body).json["error"]) is str
    assert embeds.post("/api/embed", {"model": "tiny", "input": [3]}).status == 400


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


@pytest.mark.parametrize(("route", "name", "fields"), REFUSED)
def test_errors_have_ollamas_form(server: Served, route: str, name: str, fields: dict[str, Any]) -> None:
    body = {"model": "tiny", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    answer = server.post(f"/api/{route}", body | fields)
    assert answer.status == 400, answer.body
    assert name in answer.json["error"]


class Name(str):
    """A function's name that counts how often it is compared with another."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        Name.num_compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_results_find_their_calls_however_many_there_are() -> None:
    """A result belongs to the first call of its function without one, or of any function if it names none."""
    count = 300
    names = [Name("f" if i % 2 else "g") for i in range(count)]
    calls = [{"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": {}}}]} for name in names]
    results = [{"role": "tool", "content": "r", "tool_name": Name("f")} for _ in range(5)]
    results += [{"role": "tool", "content": "r", "tool_name": Name("h")} for _ in range(count)]
    results += [{"role": "tool", "content": "r"} for _ in range(4)]
    told = messages_in_chat([*calls, *results])[count:]
    assert [each["tool_call_id"] for each in told[:5]] == [f"call_{i}_0" for i in (1, 3, 5, 7, 9)]
    assert not any("tool_call_id" in each for each in told[5:-4])
    assert [each["tool_call_id"] for each in told[-4:]] == [f"call_{i}_0" for i in (0, 2, 4, 6)]
    assert Name.num_compared < 4 * count
