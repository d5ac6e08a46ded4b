"""R13: every field of every request has its bounds, and what lies beyond is refused by name, before any work."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest

from jaxllm.server.anthropic.protocol import MessagesRequest
from jaxllm.server.cohere.protocol import CohereChatRequest
from jaxllm.server.decisions.openai_protocol import DecisionRequest
from jaxllm.server.decisions.systemone_protocol import SystemOneRequest
from jaxllm.server.openai.chat_protocol import ChatCompletionRequest
from jaxllm.server.openai.tokenization_protocol import DetokenizeRequest, TokenizeRequest
from jaxllm.server.pooling.classification_protocol import ClassificationRequest
from jaxllm.server.pooling.cohere_protocol import CohereEmbedRequest
from jaxllm.server.pooling.embedding_protocol import EmbeddingRequest
from jaxllm.server.pooling.pooling_protocol import PoolingRequest
from jaxllm.server.pooling.scoring_protocol import RerankRequest, ScoreRequest
from jaxllm.server.responses.request import ResponsesRequest
from jaxllm.server.tokens.protocol import GenerateRequest
from jaxllm.server.tokens.scoring import GenerativeScoringRequest
from tests.server import request_bounds as bounds_of
from tests.server.request_bounds import ANYWHERE, CHAT, CHAT_ALL, DETOKENIZE, LONG, TOKENIZE, Bound
from tests.server.support import Answer, Served

pytestmark = pytest.mark.server

ROUTES: dict[str, tuple[Any, dict[str, Bound], dict[str, str]]] = {
    "/v1/chat/completions": (
        ChatCompletionRequest,
        CHAT,
        {"messages": CHAT_ALL, "max_tokens": "5", "temperature": "0.5", "n": "1"},
    ),
    "/v1/responses": (
        ResponsesRequest,
        bounds_of.RESPONSES,
        {"input": CHAT_ALL, "max_output_tokens": "5", "temperature": "0.5"},
    ),
    "/inference/v1/generate": (
        GenerateRequest,
        bounds_of.GENERATE,
        {"token_ids": "[5]", "sampling_params": '{"max_tokens":2}'},
    ),
    "/generative_scoring": (
        GenerativeScoringRequest,
        bounds_of.SCORED_ITEMS,
        {"query": '"a"', "items": '["a"]', "label_token_ids": "[5]"},
    ),
    "/v1/messages": (MessagesRequest, bounds_of.ANTHROPIC, {"messages": CHAT_ALL, "max_tokens": "2"}),
    "/v2/chat": (CohereChatRequest, bounds_of.COHERE_CHAT, {"messages": CHAT_ALL, "max_tokens": "2"}),
    "/tokenize": (TokenizeRequest, TOKENIZE, {"prompt": '"a"'}),
    "/detokenize": (DetokenizeRequest, DETOKENIZE, {"tokens": "[5]"}),
    "/v1/embeddings": (EmbeddingRequest, bounds_of.EMBEDDINGS, {"input": '"a"'}),
    "/pooling": (PoolingRequest, bounds_of.POOLING, {"input": '"a"'}),
    "/classify": (ClassificationRequest, bounds_of.INPUTS, {"input": '"a"'}),
    "/score": (ScoreRequest, bounds_of.SCORE, {"text_1": '"a"', "text_2": '"a"'}),
    "/rerank": (RerankRequest, bounds_of.RERANK, {"query": '"a"', "documents": '["a"]'}),
    "/v2/embed": (CohereEmbedRequest, bounds_of.COHERE, {"texts": '["a"]'}),
    "/v1/systemone": (SystemOneRequest, bounds_of.SYSTEMONE, {"state": '"a"', "questions": bounds_of.NOUL}),
    "/v1/decisions": (
        DecisionRequest,
        bounds_of.DECISION,
        {"input": '"a"', "questions": '[{"type":"predicate","instructions":"a"}]'},
    ),
}
"""By path: the request, the bounds of its fields, and fields of a good one."""
KNOWN_BY_CORE = ("structured_outputs", "response_format", "text", "logprob_token_ids", "prompt_logprobs")
"""The core says what it takes of these, once it gets the request; one without a model takes none."""
POOLED = ("/v1/embeddings", "/pooling", "/classify", "/score", "/rerank", "/v2/embed")
"""The routes of pooling models."""
OF_MESSAGES = (
    *("messages", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"),
    *("documents", "reasoning_effort", "tools", "tool_choice", "mm_processor_kwargs", "media_io_kwargs"),
)
CASES = [(path, name) for path, (_, bounds, _) in ROUTES.items() for name in bounds]


def send(server: Served, path: str, **fields: str) -> Answer:
    base = ROUTES[path][2]
    asks_of_messages = fields.keys() & set(OF_MESSAGES) and not fields.keys() & {"prompt", "input"}
    if asks_of_messages and (
        path == "/tokenize" or ("input" in base and path not in ("/v1/responses", "/v1/decisions"))
    ):
        base = {"messages": CHAT_ALL, "add_generation_prompt": "false"}
    body = "{" + ",".join(f'"{name}":{value}' for name, value in (base | fields).items()) + "}"
    return server.ask("POST", path, body.encode())


@pytest.fixture
def server(request: pytest.FixtureRequest, path: str) -> Served:
    """Return a server whose model can do what a route is for."""
    name = "classifying_server" if path == "/classify" else "embedding_server" if path in POOLED else "mock_server"
    return request.getfixturevalue(name)


@pytest.fixture
def tokenized(mock_server: Served, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the texts that are tokenized from now on."""
    texts: list[str] = []
    tokenizer = mock_server.llm.front.require_tokenizer()
    encode = tokenizer.encode

    def note(batch: list[str], **how: Any) -> Any:
        texts.extend(batch)
        return encode(batch, **how)

    monkeypatch.setattr(tokenizer, "encode", note)
    return texts


def test_r13_every_field_has_its_row() -> None:
    for kind, bounds, _ in ROUTES.values():
        aliases = set() if kind is not ScoreRequest else {"queries", "documents", "items", "data_1", "data_2"}
        assert bounds.keys() == set(kind.__struct_fields__) - aliases


@pytest.mark.parametrize(("path", "name"), CASES)
def test_r13_a_value_is_taken_or_refused_by_its_name(
    server: Served, tokenized: list[str], path: str, name: str
) -> None:
    bound = ROUTES[path][1][name]
    taken = send(server, path, **bound.beside, **{name: bound.most})
    assert taken.status == 200, taken.body[:500]
    tokenized.clear()
    refused = [*bound.beyond, *(value for value in ANYWHERE if value not in bound.takes)]
    for value in refused:
        answer = send(server, path, **bound.beside, **{name: value})
        if name in ("model", "previous_response_id") and value in ('""', LONG):
            assert answer.status == 404
        else:
            assert answer.status == 400, (value[:100], answer.body[:500])
        error = answer.json if path == "/v2/chat" else answer.json["error"]
        if path in ("/v1/messages", "/v2/chat"):
            assert value == "NaN" or name in error["message"], (value[:100], answer.body[:500])
        else:
            assert error["param"] == (None if value == "NaN" else name), (value[:100], answer.body[:500])
        assert len(answer.body) <= 4096
    if name not in KNOWN_BY_CORE:
        assert not any("<user>" in text or path == "/tokenize" for text in tokenized)
    for value in bound.takes:
        assert send(server, path, **bound.beside, **{name: value}).status == 200, value[:100]


def test_fields_of_conversations_do_not_go_with_a_text(mock_server: Served) -> None:
    for name, value in (("chat_template", '"{{ 1 }}"'), ("chat_template_kwargs", "{}")):
        answer = send(mock_server, "/tokenize", prompt='"a"', **{name: value})
        assert (answer.status, answer.json["error"]["param"]) == (400, name)


def test_r13_refusals_come_soon(mock_server: Served) -> None:
    times = []
    for name, bound in CHAT.items():
        for value in bound.beyond:
            if len(value) < 10_000:
                began = time.perf_counter()
                send(mock_server, "/v1/chat/completions", **bound.beside, **{name: value})
                times.append(time.perf_counter() - began)
    assert len(times) > 80
    assert statistics.median(times) < 0.05


@pytest.mark.parametrize("name", ["vllm_xargs", "metadata", "documents", "structured_outputs", "nobody_knows"])
@pytest.mark.parametrize("depth", [201, 900, 100_000])
def test_r16_values_that_lie_deep_in_each_other_are_refused(mock_server: Served, name: str, depth: int) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    answer = send(mock_server, "/v1/chat/completions", **{name: f"[{deep}]" if name == "documents" else deep})
    assert answer.status == 400, answer.body
    assert "levels deep" in answer.json["error"]["message"]


def test_brackets_in_texts_and_beside_each_other_are_not_deep(mock_server: Served) -> None:
    message = '{"role":"user","content":"%s"}' % ('[{\\"[' * 40)
    answer = send(mock_server, "/v1/chat/completions", messages="[" + ",".join([message] * 3) + "]", metadata="{}")
    assert answer.status == 200
    many = '{"a":[' + ",".join(["[{}]"] * 1000) + "]}"
    assert send(mock_server, "/v1/chat/completions", metadata=many).status == 200
