"""One request that would cost much is refused, or takes its turn, before it costs anything."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from jaxllm.config.async_engine_args import AsyncEngineArgs
from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.engine.online.admission import Admission
from jaxllm.engine.online.running_requests import RunningRequests
from jaxllm.server.arguments import MAX_QUEUED, with_queue_bound
from tests.async_engine.support import mock_llm, tiny_args
from tests.server.pooled_support import EMBED, PooledEngine
from tests.server.support import Served, served


def refuse_all(*_: Any, **__: Any) -> Any:
    raise AssertionError("a request has begun")


def test_prompts_times_n_are_bounded_before_anything_is_made(
    mock_server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunningRequests, "take", refuse_all)
    for num_prompts, n in ((1024, 16_384), (1024, 17), (2, 8193)):
        body = {"prompt": ["a"] * num_prompts, "n": n, "max_tokens": 1}
        for streams in ({}, {"stream": True}):
            error = mock_server.post("/v1/completions", body | streams).json["error"]
            assert (error["code"], error["param"]) == (400, "n")
            assert "16384" in error["message"]


def test_all_prompts_have_room_or_none_is_made(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with mock_llm(tiny_args(tokenizer, max_num_queued_reqs=8)) as llm, served(llm) as server:
        assert server.post("/v1/completions", {"prompt": ["a"] * 4, "n": 2, "max_tokens": 1}).status == 200
        monkeypatch.setattr(RunningRequests, "take", refuse_all)
        refusal = server.post("/v1/completions", {"prompt": ["a"] * 3, "n": 3, "max_tokens": 1})
        assert refusal.status == 400  # it never has room: to try again is no use
        assert "max_num_queued_reqs" in refusal.json["error"]["message"]
        chat = {"messages": [{"role": "user", "content": "a"}], "n": 9}
        assert server.post("/v1/chat/completions", chat).status == 400
        llm.admission.reserve_reqs(4)
        refusal = server.post("/v1/completions", {"prompt": ["a"] * 5, "max_tokens": 1})
        assert (refusal.status, refusal.headers["retry-after"]) == (503, "1")
        llm.admission.num_reqs -= 4
        assert llm.admission.num_reqs == 0


def test_all_inputs_that_are_pooled_have_room_or_none_is_made(mock: AsyncLLM) -> None:
    engine = PooledEngine(mock, EMBED, Admission(4, None))
    with served(engine) as server:  # type: ignore[arg-type]
        assert server.post("/v1/embeddings", {"input": ["a"] * 4}).status == 200
        engine.prompts.clear()
        assert server.post("/v1/embeddings", {"input": ["a"] * 5}).status == 400
        assert not engine.prompts


def test_a_server_bounds_what_waits_and_a_program_does_not() -> None:
    args = argparse.Namespace(model="m", max_num_queued_reqs=None)
    assert with_queue_bound(args).max_num_queued_reqs == MAX_QUEUED
    assert with_queue_bound(argparse.Namespace(model="m")).max_num_queued_reqs == MAX_QUEUED
    assert with_queue_bound(argparse.Namespace(max_num_queued_reqs=3)).max_num_queued_reqs == 3
    assert AsyncEngineArgs(model="m").max_num_queued_reqs is None


def test_other_requests_have_a_turn_between_the_prompts_of_one(mock: AsyncLLM, mock_server: Served) -> None:
    """The loop runs what waits at least once for each prompt."""
    turns = 0

    def count() -> None:
        nonlocal turns
        turns += 1
        if is_open:
            mock_server.loop.call_soon(count)

    is_open = True
    mock_server.loop.call_soon_threadsafe(count)
    begun: list[int] = []
    encode = mock.front.inputs.encode

    def note(*args: Any, **kwargs: Any) -> Any:
        begun.append(turns)
        return encode(*args, **kwargs)

    mock.front.inputs.encode = note
    try:
        assert mock_server.post("/v1/completions", {"prompt": ["a"] * 20, "max_tokens": 1}).status == 200
    finally:
        del mock.front.inputs.encode
        is_open = False
    assert len(set(begun)) == 20
