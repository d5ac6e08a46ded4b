"""`X-data-parallel-rank` says which replica computes a request, whichever route it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from jaxllm.server.http.caller import RANK_HEADER
from tests.async_engine.support import mock_llm, tiny_args
from tests.server.grpc_support import client_of, grpc_opened, message_of, refusal
from tests.server.support import TEMPLATE, Served, served

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"messages": MESSAGES, "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [[5], [6, 7]], "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi", "max_output_tokens": 2, "store": False},
    "/v1/messages": CHAT,
    "/api/chat": {"model": "tiny", "messages": MESSAGES, "stream": False, "options": {"num_predict": 2}},
    "/api/generate": {"model": "tiny", "prompt": "hi", "stream": False, "options": {"num_predict": 2}},
}
POOLED = {
    "/v1/embeddings": {"input": "hi"},
    "/api/embed": {"model": "tiny", "input": "hi"},
    "/pooling": {"input": "hi"},
}
BEAMS = CHAT | {"use_beam_search": True, "n": 2}


@pytest.fixture(scope="module")
def two(tokenizer: str) -> Iterator[Served]:
    """Return a server of two replicas."""
    args = tiny_args(tokenizer, chat_template=TEMPLATE, data_parallel_size=2)
    with mock_llm(args, in_process=True, tokens_per_second=1000) as llm, served(llm) as server:
        yield server


@pytest.fixture
def ranks(two: Served, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the replicas that requests are given to, as they come."""
    chosen: list[int] = []
    replicas = two.llm._core.remote.replicas  # type: ignore[attr-defined]
    choose = replicas.choose

    def record(request: Any) -> Any:
        replica = choose(request)
        chosen.append(replica.index)
        return replica

    monkeypatch.setattr(replicas, "choose", record)
    return chosen


@pytest.mark.parametrize("path", BODIES)
def test_the_header_chooses_the_replica(two: Served, ranks: list[int], path: str) -> None:
    for rank in (1, 1, 0):
        ranks.clear()
        assert two.post(path, BODIES[path], {RANK_HEADER: str(rank)}).status == 200
        assert ranks
        assert set(ranks) == {rank}


def test_a_stream_and_all_beams_stay_with_one_replica(two: Served, ranks: list[int]) -> None:
    for body in (CHAT | {"stream": True}, BEAMS):
        assert two.post("/v1/chat/completions", body, {RANK_HEADER.upper(): "1"}).status == 200
    assert len(ranks) > 2
    assert set(ranks) == {1}


def test_grpc_takes_it_as_metadata(two: Served, ranks: list[int]) -> None:
    message = message_of({"prompt": "a", "max_tokens": 1})
    with grpc_opened(two) as address, client_of(address) as client:
        client.whole(message, ((RANK_HEADER.lower(), "1"),))
        status, details, _ = refusal(lambda: client.whole(message, ((RANK_HEADER.lower(), "-1"),)))
    assert ranks == [1]
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert RANK_HEADER in details


@pytest.mark.parametrize("rank", ["2", "1023", "99999999"])
def test_a_replica_that_there_is_not_is_refused(two: Served, ranks: list[int], rank: str) -> None:
    for path, body in (*BODIES.items(), ("/v1/chat/completions", BEAMS)):
        answer = two.post(path, body, {RANK_HEADER: rank})
        assert answer.status == 400
        assert "no replica" in answer.body.decode() or "data_parallel_rank must be at most" in answer.body.decode()
    assert ranks == []


@pytest.mark.parametrize("rank", ["", "-1", "+1", "1.0", "1_0", "one", "\u00b2", "9" * 5000])
def test_what_is_no_number_is_refused_by_the_headers_name(mock_server: Served, rank: str) -> None:
    for path, body in BODIES.items():
        answer = mock_server.post(path, body, {RANK_HEADER: rank})
        assert answer.status == 400, path
        assert f"{RANK_HEADER} must be the number of a replica" in answer.body.decode()
    error = mock_server.post("/v1/completions", BODIES["/v1/completions"], {RANK_HEADER: rank}).json["error"]
    assert error["param"] == RANK_HEADER


def test_an_engine_of_one_replica_is_number_0(mock_server: Served) -> None:
    for path, body in (*BODIES.items(), ("/v1/chat/completions", BEAMS)):
        assert mock_server.post(path, body, {RANK_HEADER: "0"}).status == 200, path
        answer = mock_server.post(path, body, {RANK_HEADER: "1"})
        assert answer.status == 400
        assert "data_parallel_rank must be at most 0, got 1." in answer.body.decode()


def test_models_that_pool_take_it_too(embedding_server: Served) -> None:
    for path, body in POOLED.items():
        assert embedding_server.post(path, body, {RANK_HEADER: "0"}).status == 200, path
        answer = embedding_server.post(path, body, {RANK_HEADER: "first"})
        assert answer.status == 400
        assert RANK_HEADER in answer.body.decode()
