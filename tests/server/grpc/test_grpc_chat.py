"""Chat and Embed answer over gRPC what /v1/chat/completions and /v1/embeddings answer over HTTP, errors too."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf import json_format

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.grpc import fields as grpc_fields
from jaxllm.server.grpc.chat import chat_request
from jaxllm.server.grpc.inference_pb2 import ChatRequest, ChatResponse, EmbedRequest
from jaxllm.server.grpc.service import SERVICE
from jaxllm.server.openai.chat_protocol import ChatCompletionRequest
from jaxllm.server.pooling.embedding_protocol import EmbeddingRequest
from tests.async_engine.support import metric
from tests.server.bad_requests import Bad, bad_requests
from tests.server.grpc_support import Client, chat_message_of, client_of, grpc_opened, refusal
from tests.server.pooled_support import LATE, PooledEngine
from tests.server.support import Answer, Served, served
from tests.server.tool_support import TOOL, tool_served

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(mock_server: Served) -> Iterator[Client]:
    with grpc_opened(mock_server) as address, client_of(address) as client:
        yield client


@pytest.fixture(scope="module")
def tools(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Client]]:
    folder = tmp_path_factory.mktemp("replies")
    with tool_served(tokenizer, folder) as server, grpc_opened(server) as address, client_of(address) as client:
        yield server, client


@pytest.fixture(scope="module")
def embedding(embedding_server: Served) -> Iterator[Client]:
    with grpc_opened(embedding_server) as address, client_of(address) as client:
        yield client


def call_of(call: Any) -> tuple[str, str, str]:
    return call["type"], call["function"]["name"], call["function"]["arguments"]


def http_choices(answer: Any) -> list[tuple[Any, ...]]:
    """Return what gRPC shows too of HTTP's choices."""
    return [
        (
            each["index"],
            each["message"]["role"],
            each["message"]["content"] or "",
            each["message"]["reasoning"] or "",
            [call_of(call) for call in each["message"].get("tool_calls", [])],
            each["finish_reason"],
            each["stop_reason"],
            each["token_ids"] or [],
        )
        for each in answer["choices"]
    ]


def grpc_choices(messages: list[ChatResponse]) -> list[tuple[Any, ...]]:
    """Return the same of a whole answer, or of all pieces of a stream."""
    whole: dict[int, dict[str, Any]] = {}
    for choice in (each for message in messages for each in message.choices):
        assert choice.HasField("message") != choice.HasField("delta")
        part = choice.message if choice.HasField("message") else choice.delta
        made = whole.setdefault(choice.index, {"texts": ["", "", ""], "calls": {}, "end": (None, None), "ids": []})
        texts = (part.role, part.content, part.reasoning)
        made["texts"] = [before + text for before, text in zip(made["texts"], texts, strict=True)]
        for number, call in enumerate(part.tool_calls):
            known = made["calls"].setdefault(call.index if call.HasField("index") else number, ["", "", ""])
            for i, text in enumerate((call.type, call.function.name, call.function.arguments)):
                known[i] += text
        if choice.HasField("finish_reason"):
            kind = choice.WhichOneof("stop_reason")
            made["end"] = (choice.finish_reason, kind and getattr(choice, kind))
        made["ids"] += choice.token_ids
    return [
        (index, *made["texts"], [tuple(call) for call in made["calls"].values()], *made["end"], made["ids"])
        for index, made in sorted(whole.items())
    ]


def check_same(server: Served, client: Client, fields: dict[str, Any]) -> None:
    answer = server.post(PATH, fields)
    assert answer.status == 200, answer.body
    whole = client.chat(chat_message_of(fields))
    assert grpc_choices([whole]) == http_choices(answer.json)
    pieces = list(client.chat_stream(chat_message_of(fields)))
    assert grpc_choices(pieces) == http_choices(answer.json)
    assert len(pieces) > 1
    usage = answer.json["usage"]
    for message in (whole, pieces[-1]):
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert {name: getattr(message.usage, name) for name in names} == {name: usage[name] for name in names}
        details = usage["completion_tokens_details"]
        told = message.usage.reasoning_tokens if message.usage.HasField("reasoning_tokens") else None
        assert told == (details and details["reasoning_tokens"])
        assert (message.model, message.id[:9]) == (answer.json["model"], "chatcmpl-")
    assert not any(message.HasField("usage") for message in pieces[:-1])
    for message in (whole, pieces[0]):
        assert list(message.prompt_token_ids) == (answer.json["prompt_token_ids"] or [])


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 8, "seed": 7},
        {"max_tokens": 8, "seed": 7, "n": 3, "temperature": 0.9, "return_token_ids": True},
        {"max_tokens": 30, "seed": 7, "stop": ["e", "a"], "include_stop_str_in_output": True},
        {"max_completion_tokens": 30, "seed": 7, "stop_token_ids": list(range(60, 200))},
        {"max_tokens": 8, "seed": 7, "logit_bias": {"5": 50.0}, "chat_template_kwargs": {"a": [1, None, {"b": 0.5}]}},
        {"max_tokens": 3, "seed": 7, "messages": [*HELLO, {"role": "assistant", "content": "Yes"}], "echo": True,
         "add_generation_prompt": False, "continue_final_message": True},
    ],
)  # fmt: skip
def test_chat_is_that_of_http(mock_server: Served, client: Client, fields: dict[str, Any]) -> None:
    check_same(mock_server, client, {"messages": HELLO, **fields})


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        ("both?", {"tools": [TOOL]}),
        ("weather?", {"tools": [TOOL], "tool_choice": "none"}),
        ("weather?", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}),
        ("think?", {}),
        ("think?", {"include_reasoning": False}),
        ("think and call?", {"tools": [TOOL]}),
    ],
)
def test_calls_and_reasoning_are_those_of_http(
    tools: tuple[Served, Client], content: str, fields: dict[str, Any]
) -> None:
    check_same(*tools, {"messages": [{"role": "user", "content": content}], "temperature": 0.0, **fields})


@pytest.mark.server
def test_log_probabilities_and_grammars_are_those_of_http(tiny_server: Served) -> None:
    fields: dict[str, Any] = {"messages": HELLO, "temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    scored = fields | {"logprobs": True, "top_logprobs": 2}
    schema = {"type": "object", "properties": {"a": {"enum": [10, 20]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema | {"additionalProperties": False}}}
    with grpc_opened(tiny_server) as address, client_of(address) as client:
        [choice] = tiny_server.post(PATH, scored).json["choices"]
        whole = client.chat(chat_message_of(scored)).choices[0].logprobs.content
        pieces = [each for piece in client.chat_stream(chat_message_of(scored)) for each in piece.choices]
        check_same(tiny_server, client, fields | {"max_tokens": 60, "ignore_eos": False, "response_format": form})
    shown = [
        {"token": each.token, "logprob": each.logprob, "bytes": list(each.bytes), "top_logprobs": [
            {"token": top.token, "logprob": top.logprob, "bytes": list(top.bytes)} for top in each.top_logprobs
        ]}
        for each in whole
    ]  # fmt: skip
    assert shown == choice["logprobs"]["content"]
    assert [each for piece in pieces for each in piece.logprobs.content] == list(whole)


CHAT_BAD = [
    *(
        bad
        for bad in bad_requests()
        if bad.has_message and bad.parameter not in ("prompt", "logprobs", "prompt_logprobs")
    ),
    Bad({"messages": []}, "messages"),
    Bad({"messages": [{"role": "user"}, {"content": "a"}]}, "messages"),
    Bad({"messages": [{"role": "user", "content": "a" * 20_000}]}, "messages"),
    Bad({"messages": [{"role": "user", "content": [{"type": "nothing"}]}]}, "messages"),
    Bad({"model": "other"}, "model"),
    Bad({"top_logprobs": 2}, "top_logprobs"),
    Bad({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    Bad({"max_completion_tokens": 0}, "max_completion_tokens"),
    Bad({"tools": [{"type": "function"}]}, "tools"),
    Bad({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    Bad({"tool_choice": "some"}, "tool_choice"),
    Bad({"response_format": {"type": "other"}}, "response_format"),
    Bad({"chat_template": "a"}, "chat_template"),
    Bad({"chat_template_kwargs": {"chat_template": "a"}}, "chat_template_kwargs"),
]


@pytest.mark.server
@pytest.mark.parametrize("bad", CHAT_BAD, ids=lambda bad: bad.name)
def test_r13_chat_refuses_what_http_refuses_in_the_same_words(mock_server: Served, client: Client, bad: Bad) -> None:
    fields = {"messages": HELLO, "max_tokens": 5, **bad.fields}
    message = chat_message_of(fields)
    failures = [refusal(lambda: client.chat(message)), refusal(lambda: list(client.chat_stream(message)))]
    for code, details, metadata in failures:
        assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
        assert details
        assert metadata["param"] == (bad.parameter if bad.parameter != "prompt" else "messages")
    if bad.has_json and not _has_no_number(fields):
        error = mock_server.post(PATH, fields).json["error"]
        if fields["messages"]:
            assert failures[0][1] == error["message"][:500]
        assert failures[0][2]["param"] == error["param"]


def _has_no_number(value: Any) -> bool:
    """Return whether JSON lacks some of a value's numbers."""
    match value:
        case dict():
            return any(map(_has_no_number, value.values()))
        case list():
            return any(map(_has_no_number, value))
        case float():
            return not math.isfinite(value)
    return False


def test_values_of_objects_are_those_of_json_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    request = json_format.ParseDict(
        {"messages": HELLO, "toolChoice": None, "chatTemplateKwargs": {"a": 1}}, ChatRequest()
    )
    read = chat_request(request.SerializeToString(), stream=False)
    assert (read.messages, read.chat_template_kwargs, read.tool_choice) == (HELLO, {"a": 1}, None)
    for number in (math.nan, math.inf):
        bad = ChatRequest(messages=[{"role": "user", "content": number}])
        with pytest.raises(VLLMValidationError, match="messages is not JSON"):
            chat_request(bad.SerializeToString(), stream=False)
    for choice in (1, True, ["a"]):
        bad = json_format.ParseDict({"messages": HELLO, "toolChoice": choice}, ChatRequest())
        with pytest.raises(VLLMValidationError, match="tool_choice must be a text or an object"):
            chat_request(bad.SerializeToString(), stream=False)
    monkeypatch.setattr(grpc_fields, "MAX_LISTS", 3)
    with pytest.raises(VLLMValidationError, match="more than 3 values"):
        chat_request(ChatRequest(messages=HELLO * 2).SerializeToString(), stream=False)
    monkeypatch.setitem(grpc_fields._LENGTHS, "messages", 1)
    with pytest.raises(VLLMValidationError, match="messages must have at most 1 entries, got 2"):
        chat_request(ChatRequest(messages=HELLO * 2).SerializeToString(), stream=False)


def test_hostile_messages_are_refused_or_harmless(mock_server: Served, client: Client) -> None:
    """Changed bytes of good messages are read, or refused as bad requests: they are never faults."""
    chat = chat_message_of({"messages": HELLO, "max_tokens": 1, "tools": [TOOL], "tool_choice": "auto", "stop": ["a"]})
    goods = {"Chat": chat, "Embed": EmbedRequest(input=["a"], token_ids=[{"ids": [5]}], messages=HELLO)}
    rng, codes = random.Random(5), set[Any]()
    for name, good in goods.items():
        method = client.channel.unary_unary(f"/{SERVICE}/{name}")
        for _ in range(150):
            data = bytearray(good.SerializeToString())
            for _ in range(rng.randint(1, 3)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            try:
                method(bytes(data[: rng.choice([len(data), rng.randrange(len(data))])]), timeout=20)
            except grpc.RpcError as error:
                failed: Any = error
                codes.add(failed.code())
    assert codes <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    assert mock_server.get("/load").json == {"server_load": 0}


def test_fields_have_the_names_that_they_have_over_http() -> None:
    """What is left out has another form here, or none: one that is new over HTTP has to be thought of."""
    http = {field.name for field in msgspec.structs.fields(ChatCompletionRequest)}
    names = {field.name for field in ChatRequest.DESCRIPTOR.fields}
    assert names <= http
    assert http - names == {
        *("stream", "stream_options", "use_beam_search", "length_penalty", "best_of", "prompt_logprobs"),
        *("return_prompt_text", "session_id", "user", "modalities", "metadata", "store", "service_tier"),
        *("safety_identifier", "prompt_cache_key"),
    }
    http = {field.name for field in msgspec.structs.fields(EmbeddingRequest)}
    names = {field.name for field in EmbedRequest.DESCRIPTOR.fields} - {"token_ids"}
    assert names <= http
    assert http - names == {"user", "late_chunking_params", "encoding_format", "embed_dtype", "endianness"}


def test_r5_a_chat_whose_client_leaves_is_aborted(mock: AsyncLLM, client: Client) -> None:
    before = metric(mock, "request_success", finished_reason="abort")
    stream = client.chat_stream(ChatRequest(messages=HELLO, max_tokens=400, ignore_eos=True))
    next(stream)
    stream.cancel()
    deadline = time.monotonic() + 10
    while mock.front.outputs.num_unfinished_requests:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert metric(mock, "request_success", finished_reason="abort") == before + 1


def test_r24_a_fault_is_told_in_general_words(
    mock_server: Served, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise RuntimeError("<object at 0x7f12345678>, /etc/passwd")

    monkeypatch.setattr(mock_server.app.state.openai_serving_chat, "render", fail)
    message = ChatRequest(messages=HELLO)
    for call in (lambda: client.chat(message), lambda: list(client.chat_stream(message))):
        assert refusal(call)[:2] == (grpc.StatusCode.INTERNAL, "The server could not answer this request.")


def test_a_stream_that_fails_ends_in_its_error(
    mock_server: Served, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxllm.server.openai import chat_events

    def fail(*_: Any) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(chat_events.ChatEvents, "_usage", fail)
    code, details, _ = refusal(lambda: list(client.chat_stream(ChatRequest(messages=HELLO, max_tokens=3))))
    assert (code, details) == (grpc.StatusCode.INTERNAL, "The server could not answer this request.")
    assert mock_server.get("/load").json == {"server_load": 0}


def vectors(answer: Answer) -> list[list[float]]:
    assert answer.status == 200, answer.body
    return [each["embedding"] for each in answer.json["data"]]


EMBED = [
    ({"input": ["a", "b c"]}, {"input": ["a", "b c"]}),
    ({"token_ids": [{"ids": [5, 6]}, {"ids": [7]}]}, {"input": [[5, 6], [7]]}),
    ({"messages": HELLO, "add_generation_prompt": True}, {"messages": HELLO, "add_generation_prompt": True}),
    ({"input": ["a"], "dimensions": 4}, {"input": "a", "dimensions": 4}),
    ({"input": ["a b c d"], "truncate_prompt_tokens": 2}, {"input": "a b c d", "truncate_prompt_tokens": 2}),
    ({"input": ["a"], "use_activation": False}, {"input": "a", "use_activation": False}),
]


@pytest.mark.parametrize(("fields", "body"), EMBED)
def test_embeddings_are_those_of_http(
    embedding_server: Served, embedding: Client, fields: dict[str, Any], body: dict[str, Any]
) -> None:
    http = embedding_server.post("/v1/embeddings", body)
    answer = embedding.embed(EmbedRequest(**fields))
    assert [list(each.embedding) for each in answer.data] == vectors(http)
    assert [each.index for each in answer.data] == list(range(len(answer.data)))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == http.json["usage"]["prompt_tokens"]
    assert (answer.model, answer.id[:5]) == (http.json["model"], "embd-")
    assert not any(each.HasField("num_vectors") for each in answer.data)


def test_a_model_with_a_vector_for_each_token_says_how_many(mock: AsyncLLM) -> None:
    engine: Any = PooledEngine(mock, LATE)
    with served(engine) as server, grpc_opened(server) as address, client_of(address) as client:
        expected: Any = vectors(server.post("/v1/embeddings", {"input": [[5, 6, 7]]}))[0]
        [answer] = client.embed(EmbedRequest(token_ids=[{"ids": [5, 6, 7]}])).data
    assert answer.num_vectors == len(expected) == 3
    assert list(answer.embedding) == [number for vector in expected for number in vector]


EMBED_BAD: list[tuple[dict[str, Any], dict[str, Any] | None, str]] = [
    ({}, {}, "input"),
    ({"input": ["a"], "token_ids": [{"ids": [5]}]}, None, "input"),
    ({"input": ["a"], "messages": HELLO}, {"input": ["a"], "messages": HELLO}, "input"),
    ({"token_ids": [{"ids": [256]}]}, {"input": [[256]]}, "input"),
    ({"token_ids": [{"ids": []}]}, {"input": [[]]}, "input"),
    ({"input": ["a"] * 2049}, {"input": ["a"] * 2049}, "input"),
    ({"token_ids": [{"ids": [5]}] * 2049}, None, "token_ids"),
    ({"input": ["a"], "dimensions": 0}, {"input": ["a"], "dimensions": 0}, "dimensions"),
    ({"input": ["a"], "task": "none"}, {"input": ["a"], "task": "none"}, "task"),
    ({"input": ["a"], "model": "other"}, {"input": ["a"], "model": "other"}, "model"),
    ({"input": ["a"], "chat_template": "x"}, {"input": ["a"], "chat_template": "x"}, "chat_template"),
    ({"input": ["a"], "priority": 5}, {"input": ["a"], "priority": 5}, "priority"),
]


@pytest.mark.parametrize(("fields", "body", "name"), EMBED_BAD)
def test_r13_embed_refuses_what_http_refuses(
    embedding_server: Served, embedding: Client, fields: dict[str, Any], body: dict[str, Any] | None, name: str
) -> None:
    code, details, metadata = refusal(lambda: embedding.embed(EmbedRequest(**fields)))
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    assert metadata["param"] == name
    if body is not None:
        error = embedding_server.post("/v1/embeddings", body).json["error"]
        assert (details, name) == (error["message"][:500], error["param"])


def test_a_model_answers_what_it_can(mock_server: Served, client: Client, embedding: Client) -> None:
    for call, path, body, server in (
        (lambda: client.embed(EmbedRequest(input=["a"])), "/v1/embeddings", {"input": "a"}, mock_server),
        (lambda: embedding.chat(ChatRequest(messages=HELLO)), PATH, {"messages": HELLO}, None),
    ):
        code, details, _ = refusal(call)
        assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
        if server is not None:
            assert details == server.post(path, body).json["error"]["message"]
