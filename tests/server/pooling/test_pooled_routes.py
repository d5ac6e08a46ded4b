"""Routes of models that pool: tasks by their names, classes, what a model cannot do, and clients that leave."""

from __future__ import annotations

import base64
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.pooling_params import PoolingParams
from jaxllm.server.openai.model_tasks import check_generates
from jaxllm.server.pooling import requests as pooled_requests
from tests.server.hostile import pooled_requests as pooled_requests_of
from tests.server.pooled_support import CLASSIFY, CROSS, EMBED, LABELS, LATE, SIZE, PooledEngine, output_of
from tests.server.support import Served, served

GENERATE = {
    "/v1/completions": ({"prompt": "a"}, "Completions"),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "a"}]}, "Chat Completions"),
    "/v1/responses": ({"input": "a"}, "Responses"),
}
POOL = {
    "/pooling": ({"input": "a"}, "Pooling"),
    "/v1/embeddings": ({"input": "a"}, "Embeddings"),
    "/v2/embed": ({"texts": ["a"]}, "Embeddings"),
    "/api/embed": ({"model": "tiny", "input": "a"}, "Embeddings"),
    "/api/embeddings": ({"model": "tiny", "prompt": "a"}, "Embeddings"),
    "/classify": ({"input": "a"}, "Classification"),
    "/score": ({"text_1": "a", "text_2": "b"}, "Score"),
    "/v1/score": ({"text_1": "a", "text_2": "b"}, "Score"),
    "/rerank": ({"query": "a", "documents": ["b"]}, "Rerank (Score)"),
    "/v1/rerank": ({"query": "a", "documents": ["b"]}, "Rerank (Score)"),
    "/v2/rerank": ({"query": "a", "documents": ["b"]}, "Rerank (Score)"),
}
SCORES = ["/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"]
EMBEDS = ["/v1/embeddings", "/v2/embed", "/api/embed", "/api/embeddings"]


@pytest.mark.parametrize(
    ("settings", "paths"),
    [
        (None, [*GENERATE]),
        (EMBED, ["/pooling", *EMBEDS, *SCORES]),
        (CLASSIFY, ["/pooling", "/classify"]),
        (CROSS, ["/pooling", "/classify", *SCORES]),
        (LATE, ["/pooling", "/v1/embeddings", *SCORES]),
    ],
)
def test_a_model_has_the_routes_of_its_tasks(
    mock: AsyncLLM, mock_server: Served, settings: Any, paths: list[str]
) -> None:
    def check(server: Served) -> None:
        for path, (body, api) in (GENERATE | POOL).items():
            answer = server.post(path, body)
            if path in paths:
                assert answer.status == 200, (path, answer.body)
            else:
                assert answer.status == 400
                error = answer.json["error"] if path.startswith("/api/") else answer.json["error"]["message"]
                assert error == f"The model does not support {api} API"
        assert [each["id"] for each in server.get("/v1/models").json["data"]] == ["tiny"]

    if settings is None:
        check(mock_server)
        return
    with served(PooledEngine(mock, settings)) as server:  # type: ignore[arg-type]
        check(server)


def test_a_model_of_token_embeddings_gives_one_for_each_token(mock: AsyncLLM) -> None:
    with served(PooledEngine(mock, LATE)) as server:  # type: ignore[arg-type]
        [shown] = server.post("/v1/embeddings", {"input": "ab c"}).json["data"]
        [pooled] = server.post("/pooling", {"input": "ab c"}).json["data"]
        assert shown["embedding"] == pooled["data"]
        assert np.shape(shown["embedding"]) == (len(server.post("/tokenize", {"prompt": "ab c"}).json["tokens"]), SIZE)


def test_an_engine_that_pools_besides_generates(mock: AsyncLLM) -> None:
    both: Any = PooledEngine(mock, EMBED, runner="generate")
    check_generates(both, "Completions")
    assert both.front.ready.pooling is EMBED


@pytest.mark.parametrize("task", [None, "embed", "token_embed"])
@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_pooling_does_each_task(
    embedding_server: Served, embedder: PooledEngine, task: str | None, encoding: str
) -> None:
    answer = embedding_server.post("/pooling", {"input": ["ab", "c"], "task": task, "encoding_format": encoding})
    assert answer.status == 200, answer.body
    assert answer.json["id"].startswith("pooling-")
    for text, item in zip(["ab", "c"], answer.json["data"], strict=True):
        ids = embedder.front.inputs.encode(text).token_ids
        array = output_of(EMBED, PoolingParams(task=task or "embed"), ids)
        data = item["data"]
        if encoding == "base64":
            assert base64.b64decode(data) == array.tobytes()
        else:
            assert data == array.tolist()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"task": "classify"}, "Unsupported task: 'classify' Supported tasks: ('embed', 'token_embed')"),
        ({"task": "score"}, "`score` task was removed; use `classify` instead."),
    ],
)
def test_a_task_of_another_model_is_refused(embedding_server: Served, fields: dict[str, Any], words: str) -> None:
    answer = embedding_server.post("/pooling", {"input": "a", **fields})
    assert (answer.status, answer.json["error"]["param"]) == (400, "task")
    assert words in answer.json["error"]["message"]


def test_classes_have_their_labels(classifying_server: Served) -> None:
    answer = classifying_server.post("/classify", {"input": ["ab", "c", "d e"]})
    assert answer.status == 200, answer.body
    for text, item in zip(["ab", "c", "d e"], answer.json["data"], strict=True):
        ids = classifying_server.llm.front.inputs.encode(text).token_ids
        probs = output_of(CLASSIFY, PoolingParams(task="classify"), ids)
        assert item["probs"] == probs.tolist()
        assert item["label"] == LABELS[str(np.argmax(probs))]
        assert item["num_classes"] == 3
    assert answer.json["usage"]["prompt_tokens"] > 0
    plain = classifying_server.post("/classify", {"input": "ab", "use_activation": False}).json["data"][0]
    assert sum(plain["probs"]) != pytest.approx(1)


def test_r14_the_outputs_of_a_request_are_bounded(
    embedding_server: Served, embedder: PooledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooled_requests, "MAX_NUMBERS", 6 * SIZE)
    fields = {"task": "token_embed", "add_special_tokens": False}
    assert embedding_server.post("/pooling", {"input": [[5] * 3, [6] * 3], **fields}).status == 200
    answer = embedding_server.post("/pooling", {"input": [[5] * 3, [6] * 3, [7]], **fields})
    assert (answer.status, answer.json["error"]["param"]) == (400, "input")
    assert "more than 96 numbers" in answer.json["error"]["message"]
    assert not embedder.running


def test_r14_hostile_requests_end_none_but_themselves(embedding_server: Served, classifying_server: Served) -> None:
    expected = embedding_server.post("/v1/embeddings", {"input": "a"}).json["data"]
    statuses = set()
    for request in pooled_requests_of(23, 400):
        server = classifying_server if request.target == "/classify" else embedding_server
        answer = server.ask(request.method, request.target, request.body)
        statuses.add(answer.status)
        assert answer.status in (200, 400, 404), (request, answer.body)
    assert statuses >= {200, 400}
    assert embedding_server.post("/v1/embeddings", {"input": "a"}).json["data"] == expected


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/embeddings", b'{"input":["a","b","c"]}'), ("/rerank", b'{"query":"a","documents":["b","c"]}')],
)
def test_r14_a_client_that_leaves_ends_all_its_requests(
    embedding_server: Served, embedder: PooledEngine, path: str, body: bytes
) -> None:
    embedder.is_held = True
    try:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", embedding_server.port), timeout=5) as connection:
            connection.sendall(head.encode() + body)
            until(lambda: len(embedder.running) == 3)
            assert embedding_server.get("/load").json["server_load"] == 1
            names = [each.rpartition("-") for each in embedder.running]
            assert len({name for name, _, _ in names}) == 1
            assert [number for _, _, number in names] == ["0", "1", "2"]
            running = set(embedder.running)
        until(lambda: not embedder.running)
        assert running <= set(embedder.aborted)
    finally:
        embedder.is_held = False
