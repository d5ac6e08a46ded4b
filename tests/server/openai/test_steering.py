"""Steering in requests over HTTP, as `vllm_xargs`: what offline requests get, and refusals that name the field."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm.engine.online.async_llm import AsyncLLM
from tests.async_engine.support import tiny_args
from tests.server.support import TEMPLATE, Answer, Served, served

pytestmark = pytest.mark.server

VECTORS = Path(__file__).parents[2] / "data" / "steering" / "llama3_tied" / "vectors.safetensors"
IDS = list(range(30, 42))


@pytest.fixture(scope="module")
def server(tokenizer: str) -> Iterator[Served]:
    """Return a server whose requests may name vectors."""
    args = tiny_args(tokenizer, chat_template=TEMPLATE, batch_invariant=True, steering=str(VECTORS))
    with AsyncLLM.from_engine_args(args, disable_frontend_multiprocessing=True) as llm, served(llm) as server:
        yield server


def complete(server: Served, steering: Any, **fields: Any) -> Answer:
    xargs = {"vllm_xargs": {"steering": steering}}
    request = {"model": "tiny", "prompt": IDS, "temperature": 0, "max_tokens": 6, "logprobs": 2}
    return server.ask("POST", "/v1/completions", request | xargs | fields, seconds=200)  # a slow machine compiles first


def logprobs_of(answer: Answer) -> Any:
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["logprobs"]


def test_a_request_names_a_vector(server: Served) -> None:
    plain = complete(server, {"name": "all", "scale": 0})
    assert logprobs_of(plain) == logprobs_of(complete(server, None, vllm_xargs=None))
    steered = [logprobs_of(complete(server, {"name": "all", "scale": scale})) for scale in (1, 1.0, -1)]
    assert steered[0] == steered[1]
    assert logprobs_of(plain) != steered[0] != steered[2]


def test_hidden_states_are_refused(server: Served) -> None:
    answer = complete(server, {"name": "all"}, vllm_xargs={"hidden_states": "last"})
    assert answer.status == 400, answer.body
    assert answer.json["error"]["param"] == "vllm_xargs"
    assert "over HTTP" in answer.json["error"]["message"]
    sampling = {"extra_args": {"hidden_states": "last"}}
    answer = server.post("/inference/v1/generate", {"token_ids": IDS, "sampling_params": sampling})
    assert answer.status == 400, answer.body
    assert "over HTTP" in answer.json["error"]["message"]


@pytest.mark.parametrize("steering", [{"name": "sad"}, "all", {"name": "all", "scale": 1e9}, {}, None])
def test_other_vectors_are_refused(server: Served, steering: Any) -> None:
    answer = complete(server, steering)
    assert answer.status == 400, answer.body
    assert answer.json["error"]["param"] == "vllm_xargs"
