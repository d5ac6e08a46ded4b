"""One request that would cost much is refused, or takes its turn, before it costs anything."""

from __future__ import annotations

import argparse
import json
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from jaxllm.config.server_arguments import MAX_QUEUED, with_queue_bound
from jaxllm.engine.online.admission import Admission
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.engine.online.running_requests import RunningRequests
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.server.http import decoding
from jaxllm.server.http.log_once import MAX_KNOWN, MAX_LINE, LogOnce
from jaxllm.server.openai.prompt_fields import MAX_MESSAGES, MAX_TOOLS
from jaxllm.text.tokenizer import cut_ids
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


def test_names_in_the_log_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    log = LogOnce("unknown: %s")
    log.note(f"{'x' * 100}{i}" for i in range(1_000))  # they begin alike
    log.note(f"{i}{'x' * 100}" for i in range(1_000_000))
    assert [message.count("'") for message in caplog.messages] == [2, 2 * MAX_LINE]
    assert max(map(len, caplog.messages)) < MAX_LINE * 80
    for _ in range(MAX_KNOWN):
        log.note(map(str, range(MAX_KNOWN)))
    num_lines = len(caplog.messages)

    def unread() -> Iterator[str]:
        yield pytest.fail("all names are known, and one is read")

    log.note(unread())
    assert len(caplog.messages) == num_lines


def test_long_bodies_are_decoded_in_a_thread(mock_server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def note(body: bytes) -> None:
        threads.append(threading.current_thread().name)

    monkeypatch.setattr(decoding, "check_shape", note)
    for size in (10, decoding.LONG_BODY * 2):
        body = json.dumps({"prompt": [5], "max_tokens": 1}).encode().ljust(size)
        assert mock_server.post("/v1/completions", body).status == 200
    assert threads[0] == "server"
    assert threads[1] != "server"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/tokenize"])
def test_messages_and_tools_of_a_request_are_bounded(mock_server: Served, path: str) -> None:
    for name, most in (("messages", MAX_MESSAGES), ("tools", MAX_TOOLS)):
        message = {"role": "user", "content": "a"}
        body = {"model": "tiny", "max_tokens": 1, "messages": [message], name: [message] * (most + 1)}
        refusal = mock_server.post(path, body)
        assert refusal.status == 400
        assert f"{name}: Expected `array` of length <= {most}" in refusal.body.decode()


def test_ids_that_cannot_fit_are_refused_by_their_number(mock: AsyncLLM) -> None:
    """They are not looked at: the first is none."""
    ids: list[Any] = [None] * (mock.front.ready.max_model_len + 1)
    with pytest.raises(VLLMValidationError, match=f"{len(ids)} input tokens"):
        mock.front.inputs.encode({"prompt_token_ids": ids})
    cut = mock.front.inputs.encode({"prompt_token_ids": [*ids, 5, 6]}, TRUNCATED)
    assert cut.token_ids == [5, 6]


TRUNCATED = {"truncate_prompt_tokens": 2, "truncation_side": "left"}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("special", [True, False])
def test_a_text_is_cut_before_it_is_tokenized(mock: AsyncLLM, side: str, special: bool) -> None:
    """The tokens are those of the whole text, though few of its characters are tokenized."""
    tokenizer = mock.front.require_tokenizer()
    rng = random.Random(3)
    text = " ".join("".join(rng.choices("abcdefü", k=rng.randrange(1, 9))) for _ in range(3_000))
    lengths: list[int] = []
    encode = tokenizer.encode

    def note(texts: Sequence[str], **how: Any) -> list[list[int]]:
        lengths.extend(map(len, texts))
        return encode(texts, **how)

    for keep in (1, 7, 60):
        whole = encode([text], add_special_tokens=special)[0]
        options = {"truncate_prompt_tokens": keep, "truncation_side": side, "add_special_tokens": special}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenizer, "encode", note)
            cut = mock.front.inputs.encode(text, options)
        assert cut.token_ids == cut_ids(whole, keep, side)
        assert lengths.pop() == (keep + 1) * tokenizer.longest_token < len(text)
    assert not lengths
