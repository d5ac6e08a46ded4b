"""R12: the routes' answers and errors match the OpenAPI document in every property."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.server.hostile import requests
from tests.server.support import Answer, Served, mock_served

pytestmark = pytest.mark.server

TEXT: dict[str, Any] = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "ignore_eos": True}
RESPONSE: dict[str, Any] = {"input": "a", "max_output_tokens": 3, "ignore_eos": True}
SCORED: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
AGENT: dict[str, Any] = {
    "input": [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    ],
    "tools": [{"type": "function", "name": "f", "strict": False, "parameters": {"type": "object"}}, {"type": "custom"}],
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "reasoning": {"effort": "low"},
    "metadata": {"a": "b"},
    "include": ["reasoning.encrypted_content"],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"x": {"enum": [1, 2]}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
    }
]
SYSTEMONE: dict[str, Any] = {
    "state": "a",
    "questions": {
        "a": {"type": "choice", "instructions": "b", "criteria": {"c": "d", "e": None}},
        "f": {"type": "score", "criteria": ["g", "h"]},
        "i": {"type": "noul", "criteria": {"true": "j"}},
    },
}
DECISION: dict[str, Any] = {
    "input": [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
    ],
    "questions": [
        {"type": "predicate", "instructions": "c", "name": "d"},
        {"type": "choice", "instructions": "e", "choices": [{"value": "f", "description": "g"}, {"value": True}]},
        {"type": "score", "instructions": "h", "levels": [{"label": "i"}, {"label": "j", "description": "k"}]},
    ],
}
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
IDS = {"return_token_ids": True}
GOOD: list[tuple[str, str, Any]] = [
    ("post", "/v1/chat/completions", CHAT),
    ("post", "/v1/chat/completions", CHAT | IDS | {"n": 2, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}),
    ("post", "/v1/chat/completions", CHAT | STREAM | IDS | {"n": 2, "logprobs": True, "return_prompt_text": True}),
    ("post", "/v1/chat/completions", CHAT | {"use_beam_search": True, "n": 2}),
    ("post", "/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}}),
    ("post", "/v1/responses", RESPONSE),
    ("post", "/v1/responses", RESPONSE | {"stream": True}),
    ("post", "/v1/responses", RESPONSE | SCORED),
    ("post", "/v1/responses", RESPONSE | SCORED | {"stream": True}),
    ("post", "/v1/responses", RESPONSE | AGENT),
    ("post", "/v1/responses", RESPONSE | {"background": True}),
    ("post", "/v1/responses", RESPONSE | SCORED | {"background": True, "stream": True}),
    ("post", "/v1/chat/completions", CHAT | {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200}),
    ("post", "/v1/chat/completions", CHAT | STREAM | {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200}),
    ("post", "/v1/messages", {"messages": CHAT["messages"], "max_tokens": 3}),
    *(("post", path, {"messages": CHAT["messages"], "max_tokens": 3}) for path in ("/v2/chat", "/cohere/v2/chat")),
    ("post", "/v2/chat", {"messages": CHAT["messages"], "max_tokens": 3, "stream": True, "logprobs": True}),
    (
        "post",
        "/v2/chat",
        {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 200,
            "tools": TOOLS,
            "tool_choice": "REQUIRED",
            "citation_options": {"mode": "OFF"},
            "thinking": {"type": "disabled"},
            "response_format": {"type": "text"},
        },
    ),
    ("post", "/v1/messages/count_tokens", {"messages": CHAT["messages"]}),
    ("post", "/api/chat", {"model": "tiny", "messages": CHAT["messages"], "stream": False}),
    ("post", "/api/generate", {"model": "tiny", "prompt": "a", "stream": False}),
    ("post", "/api/generate", {"model": "tiny", "prompt": "a", "options": {"num_predict": 3}}),
    ("post", "/api/show", {"model": "tiny"}),
    ("post", "/v1/completions", TEXT),
    ("post", "/v1/completions", TEXT | IDS | {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "echo": True}),
    ("post", "/v1/completions", TEXT | {"prompt": [[5, 6], [7]], "prompt_logprobs": 1, "stop_token_ids": [5]}),
    ("post", "/v1/completions", TEXT | STREAM | IDS | {"logprobs": 2, "n": 2}),
    ("post", "/v1/completions", TEXT | {"echo": True, "max_tokens": 0, "logprobs": 1}),
    ("post", "/v1/chat/completions/batch", CHAT | IDS | {"messages": [CHAT["messages"]] * 2}),
    ("post", "/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3, "n": 2}}),
    ("post", "/inference/v1/generate", {"token_ids": [5], "sampling_params": {"logprobs": 2}} | STREAM),
    ("post", "/generative_scoring", {"query": "a", "items": ["b", "c"], "label_token_ids": [5, 6]}),
    ("post", "/invocations", CHAT),
    ("post", "/invocations", TEXT),
    ("post", "/v1/systemone", SYSTEMONE),
    ("post", "/v1/systemone", SYSTEMONE | {"state": ["a"], "calibrate": True, "num_orders": 2, "priority": 0}),
    ("post", "/v1/decisions", DECISION),
    ("post", "/tokenize", {"prompt": "a b", "return_token_strs": True}),
    ("post", "/tokenize", {"messages": CHAT["messages"]}),
    ("post", "/detokenize", {"tokens": [5, 6]}),
    *(("get", path, None) for path in ("/v1/models", "/v1/models/tiny", "/tokenizer_info", "/version", "/load")),
    *(("get", path, None) for path in ("/health", "/livez", "/ping", "/metrics", "/is_sleeping", "/is_paused")),
    *(("get", path, None) for path in ("/server_info", "/api/version", "/api/tags", "/api/ps")),
    ("post", "/scale_elastic_ep", {"new_data_parallel_size": 1}),
    ("get", "/weight_info", None),
    ("post", "/update_weight_version", {"new_version": "a"}),
    ("post", "/init_weight_transfer_engine", {"init_info": {}}),
    *(
        ("post", path, {})
        for path in (
            "/ping",
            "/reset_prefix_cache",
            "/reset_mm_cache",
            "/reset_encoder_cache",
            "/pause",
            "/resume",
            "/sleep",
            "/wake_up",
        )
    ),
]
POOLED: list[tuple[str, Any]] = [
    ("/v1/embeddings", {"input": "a"}),
    ("/v1/embeddings", {"input": [[5, 6], [7]], "encoding_format": "base64", "dimensions": 4, "request_id": "a"}),
    ("/v1/embeddings", {"messages": CHAT["messages"], "add_generation_prompt": True}),
    ("/api/embed", {"model": "tiny", "input": ["a", "b"], "dimensions": 4}),
    ("/api/embeddings", {"model": "tiny", "prompt": "a"}),
    ("/v2/embed", {"texts": ["a"], "input_type": "search_query", "embedding_types": ["float", "binary", "base64"]}),
    ("/v2/embed", {"texts": ["a", "b"], "embedding_types": ["ubinary"], "truncate": "START", "max_tokens": 5}),
    ("/pooling", {"input": ["a", "b"]}),
    ("/pooling", {"input": "a b", "task": "token_embed", "use_activation": False}),
    ("/pooling", {"input": "a b", "task": "token_embed", "encoding_format": "base64", "embed_dtype": "float16"}),
    *((path, {"text_1": "a", "text_2": ["b", {"text": "c"}]}) for path in ("/score", "/v1/score")),
    *((path, {"query": "a", "documents": ["b", "c"], "top_n": 1}) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    ("/rerank", {"query": "a", "documents": "b", "return_documents": False, "max_tokens_per_doc": 3}),
]
"""The requests for a model that makes embeddings."""
CLASSES: list[tuple[str, Any]] = [
    ("/classify", {"input": ["a", [5]]}),
    ("/pooling", {"input": "a"}),
    ("/score", {"queries": ["a", "b"], "items": ["c", "d"]}),
]
"""The requests for a model with one class."""
BAD: list[tuple[str, str, Any]] = [
    ("post", "/start_weight_update", None),  # the core has no weights
    ("post", "/start_draft_weight_update", None),
    ("post", "/update_weights", {"update_info": {"weights_path": "missing"}}),
    ("post", "/update_weights", {"update_info": {"names": []}}),
    ("post", "/finish_weight_update", {"weight_version": "a"}),
    *(("post", path, body) for path, body in (*POOLED, *CLASSES)),
    *(("post", path, b"{") for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")),
    *(("post", path, CHAT | {"model": "other"}) for path in ("/v1/messages", "/v1/messages/count_tokens", "/api/chat")),
    ("post", "/v2/chat", CHAT | {"model": "other"}),
    ("post", "/api/generate", {"model": "tiny", "suffix": "a"}),
    ("post", "/api/show", {"model": "other"}),
    ("post", "/api/pull", {"model": "org/name"}),
    ("delete", "/api/delete", {"model": "org/name"}),
    *(("post", path, {"model": "other", **TEXT}) for path in ("/v1/completions", "/tokenize")),
    ("post", "/detokenize", {"tokens": [10**9]}),
    ("post", "/inference/v1/generate", {"token_ids": [10**9], "sampling_params": {}}),
    ("post", "/generative_scoring", {"query": "a", "items": [], "label_token_ids": [5]}),
    ("post", "/v1/chat/completions/batch", CHAT),
    ("post", "/invocations", {"input": "a"}),
    ("post", "/v1/systemone", SYSTEMONE | {"model": "other"}),
    ("post", "/v1/decisions", DECISION | {"questions": []}),
    *(("post", path, {"model": "tiny"}) for path in ("/v1/audio/transcriptions", "/v1/audio/translations")),
    ("post", "/v1/responses", {"input": []}),
    *((method, "/v1/responses/resp_x", None) for method in ("get", "delete")),
    ("post", "/v1/responses/resp_x/cancel", None),
    ("get", "/v1/responses/resp_x/input_items?limit=0", None),
    ("get", "/v1/models/other", None),
    ("post", "/sleep?level=7", None),
    ("post", "/pause?mode=never", None),
]


@pytest.fixture(scope="module")
def server(tokenizer: str) -> Iterator[Served]:
    """Return a server with all routes that there are, whose engine has no model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_SERVER_DEV_MODE", "1")
        with mock_served(tokenizer, "--enable-tokenizer-info-endpoint") as server:
            yield server


@pytest.fixture(scope="module")
def document(server: Served) -> dict[str, Any]:
    return server.get("/openapi.json").json


def strict(schema: Any) -> Any:
    """Return a schema without room for properties that it does not name."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: strict(value) for name, value in schema.items()}
    if closed.get("type") == "object" and "properties" in closed and "additionalProperties" not in closed:
        closed["additionalProperties"] = False
    return closed


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    whole = {**copy.deepcopy(schema), "components": document["components"]}
    Draft202012Validator(strict(whole)).validate(value)


def operation_of(document: dict[str, Any], method: str, path: str) -> dict[str, Any]:
    path = path.partition("?")[0]
    template = "/v1/models/{model}" if path.startswith("/v1/models/") else path
    if path.startswith("/v1/responses/"):
        last = path.rpartition("/")[2]
        template = "/v1/responses/{response_id}" + f"/{last}" * (last in ("cancel", "input_items"))
    return document["paths"][template][method]


def check_answer(document: dict[str, Any], operation: dict[str, Any], answer: Answer) -> None:
    described = operation["responses"].get(str(answer.status), operation["responses"].get("default"))
    assert described is not None, f"status {answer.status} is not described"
    content = described.get("content", {})
    if answer.status >= 400:
        assert len(answer.body) <= 4096
        error = answer.json.get("error", answer.json)
        assert isinstance(error, str) or error.get("code", answer.status) == answer.status
    if not content:
        return
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in content
    if kind == "application/x-ndjson":
        for line in answer.body.splitlines():
            check(document, content[kind]["x-event"], json.loads(line))
    elif kind == "text/event-stream":
        events = answer.named_events if answer.body.startswith(b"event: ") else answer.events
        assert events
        for event in events:
            check(document, content[kind]["x-event"], event)
    else:
        value = answer.body.decode() if kind == "text/plain" else answer.json
        check(document, content[kind]["schema"], value)


@pytest.mark.parametrize(("method", "path", "body"), GOOD)
def test_r12_good_answers_are_as_described(
    server: Served, tiny_server: Served, document: dict[str, Any], method: str, path: str, body: Any
) -> None:
    runs_model = path.startswith(("/v1/", "/v2/chat", "/cohere/", "/generative")) and method == "post"
    answer = (tiny_server if runs_model else server).ask(method.upper(), path, body)
    assert answer.status == 200, answer.body
    check_answer(document, operation_of(document, method, path), answer)
    if isinstance(body, dict) and body:
        request = operation_of(document, method, path)["requestBody"]["content"]["application/json"]["schema"]
        check(document, request, body)


def test_r12_what_is_kept_is_as_described(tiny_server: Served, document: dict[str, Any]) -> None:
    created = tiny_server.post("/v1/responses", RESPONSE | AGENT | {"background": True, "stream": True})
    path = f"/v1/responses/{created.named_events[0]['response']['id']}"
    lists = [("get", f"{path}/input_items"), ("get", f"{path}/input_items?limit=1&order=asc")]
    shown = [("get", path), ("get", f"{path}?stream=true&starting_after=2"), *lists]
    for method, target in (*shown, ("post", f"{path}/cancel"), ("get", path), ("delete", path)):
        answer = tiny_server.ask(method.upper(), target)
        assert answer.status == 200, answer.body
        check_answer(document, operation_of(document, method, target), answer)


@pytest.mark.parametrize(("path", "body"), [*POOLED, *CLASSES])
def test_r12_good_answers_of_models_that_pool_are_as_described(
    embedding_server: Served, cross_server: Served, document: dict[str, Any], path: str, body: Any
) -> None:
    answer = (cross_server if (path, body) in CLASSES else embedding_server).post(path, body)
    assert answer.status == 200, answer.body
    operation = operation_of(document, "post", path)
    check_answer(document, operation, answer)
    check(document, operation["requestBody"]["content"]["application/json"]["schema"], body)
    wrong = {"model": "other"} if path.startswith("/api/") else {"priority": 5}
    failed = embedding_server.post(path, body | wrong)
    assert failed.status in (400, 404)
    check_answer(document, operation, failed)


@pytest.mark.parametrize(("method", "path", "body"), BAD)
def test_r12_bad_answers_are_as_described(
    server: Served, document: dict[str, Any], method: str, path: str, body: Any
) -> None:
    answer = server.ask(method.upper(), path, body)
    assert answer.status in (400, 403, 404, 415)
    check_answer(document, operation_of(document, method, path), answer)


def test_r12_every_operation_is_tried(document: dict[str, Any]) -> None:
    operations = {(method, path) for path, methods in document["paths"].items() for method in methods}
    tried = {(method, path.partition("?")[0]) for method, path, _ in (*GOOD, *BAD)}
    one = "/v1/responses/{response_id}"
    templates = {("get", "/v1/models/{model}"), ("post", f"{one}/cancel"), ("get", f"{one}/input_items")}
    templates |= {(method, one) for method in ("get", "delete")}
    assert operations - templates <= tried


def test_r12_hostile_requests_have_described_answers(tiny_server: Served, document: dict[str, Any]) -> None:
    for request in requests(12, 150):
        if "post" in document["paths"].get(request.target, ()) and request.method == "POST":
            answer = tiny_server.ask("POST", request.target, request.body)
            check_answer(document, operation_of(document, "post", request.target), answer)


def test_the_document_is_one(document: dict[str, Any]) -> None:
    """Each schema in it is a schema."""
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    assert json.dumps(document)
