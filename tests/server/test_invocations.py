"""SageMaker's route answers as the route does whose fields a request has."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.support import Served

pytestmark = pytest.mark.server

CHANGING = ("id", "created")
GENERATED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0},
    "/v1/completions": {"prompt": "ab", "max_tokens": 4, "temperature": 0},
}
EMBEDDED = {
    "/v1/embeddings": {"input": ["a", "b"]},
    "/pooling": {"input": "a b", "task": "token_embed"},
    "/score": {"text_1": "a", "text_2": ["b", "c"]},
    "/rerank": {"query": "a", "documents": ["b", "c"]},
}


def look(answer: Any) -> Any:
    assert answer.status == 200, answer.body
    return {name: value for name, value in answer.json.items() if name not in CHANGING}


@pytest.mark.parametrize("path", GENERATED)
def test_a_model_that_generates(tiny_server: Served, path: str) -> None:
    body = GENERATED[path]
    assert look(tiny_server.post("/invocations", body)) == look(tiny_server.post(path, body))
    pieces = [each["choices"][0] for each in tiny_server.post("/invocations", body | {"stream": True}).events]
    assert pieces[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("path", EMBEDDED)
def test_a_model_that_embeds(embedding_server: Served, path: str) -> None:
    body = EMBEDDED[path]
    assert look(embedding_server.post("/invocations", body)) == look(embedding_server.post(path, body))


def test_a_model_that_classifies(classifying_server: Served) -> None:
    body = {"input": ["a", "b"]}
    assert look(classifying_server.post("/invocations", body)) == look(classifying_server.post("/classify", body))


def test_other_requests_are_told_what_is_taken(tiny_server: Served, embedding_server: Served) -> None:
    answer = tiny_server.post("/invocations", {"input": "a"})
    assert (answer.status, answer.json["error"]["param"]) == (400, "messages")
    assert "messages, prompt" in answer.json["error"]["message"]
    assert "documents" in embedding_server.post("/invocations", {"prompt": "a"}).json["error"]["message"]
    for body in (b"[]", b"{", b"5"):
        assert tiny_server.ask("POST", "/invocations", body).status == 400
    refused = tiny_server.post("/invocations", {"prompt": "a", "suffix": "b"})
    assert (refused.status, refused.json["error"]["param"]) == (400, "suffix")
