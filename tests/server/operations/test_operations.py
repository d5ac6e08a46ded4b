"""What those who run a server ask it."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

import jaxllm
from jaxllm.engine.online.async_llm import AsyncLLM
from tests.async_engine.support import mock_llm, tiny_args
from tests.server.support import Answer, Served, served

BODY = {"prompt": [5], "max_tokens": 40, "ignore_eos": True}


def test_models_health_and_version(mock_server: Served) -> None:
    assert [each["id"] for each in mock_server.get("/v1/models").json["data"]] == ["tiny"]
    assert mock_server.get("/v1/models/tiny").json == mock_server.get("/v1/models").json["data"][0]
    assert mock_server.get("/v1/models/other").status == 404
    assert [mock_server.get(path).status for path in ("/health", "/ping", "/livez")] == [200, 200, 200]
    assert mock_server.post("/ping", {}).status == 200
    assert mock_server.get("/version").json == {"version": jaxllm.__version__}


def test_load_is_what_is_in_hand(mock_server: Served) -> None:
    """Requests that fail, and clients that leave, are in hand no more."""
    seen: list[int] = []

    def look(answer: Answer) -> None:
        assert answer.status == 200

    assert mock_server.get("/load").json == {"server_load": 0}
    threads = [threading.Thread(target=lambda: look(mock_server.post("/v1/completions", BODY))) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen.append(mock_server.get("/load").json["server_load"])
    assert max(seen) == 3
    assert mock_server.post("/v1/completions", {"prompt": 1}).status == 400
    assert mock_server.get("/load").json == {"server_load": 0}


def test_without_dev_mode_the_engine_cannot_be_changed(mock_server: Served) -> None:
    for path in ("/sleep", "/wake_up", "/pause", "/resume", "/reset_prefix_cache"):
        assert mock_server.post(path, {}).status == 404
    assert mock_server.get("/server_info").status == 404


def test_r8_a_full_server_refuses_before_it_reads(tokenizer: str) -> None:
    """What cannot be taken is neither received nor parsed, and counts once."""

    def refusals() -> dict[str, float]:
        lines = server.get("/metrics").body.decode().splitlines()
        counts = (line.rpartition(" ") for line in lines if line.startswith("vllm:admission_rejections_total"))
        return {labels.partition('reason="')[2].rstrip('"}'): float(count) for labels, _, count in counts}

    args = tiny_args(tokenizer, max_num_queued_reqs=2, max_num_queued_tokens=4)
    with mock_llm(args, tokens_per_second=20) as llm, served(llm) as server:
        long = {"prompt": [5], "max_tokens": 400, "ignore_eos": True, "n": 2, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(long), {"content-type": "application/json"})
            assert connection.getresponse().readline().startswith(b"data: ")
            for path, body in (("/v1/completions", b"no JSON"), ("/v1/chat/completions", b"{" * 1_000_000)):
                refusal = server.post(path, body)
                assert (refusal.status, refusal.headers["retry-after"]) == (503, "1")
                assert "max_num_queued_reqs=2" in refusal.json["error"]["message"]
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as other:
                other.sendall(head)
                assert other.recv(100).startswith(b"HTTP/1.1 503")  # no byte of the body has come
            assert server.get("/health").status == 200
            assert refusals() == {"max_num_queued_reqs": 3, "max_num_queued_tokens": 0, "max_ttft_ms": 0}
            connection.sock.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + 10
        while server.post("/v1/completions", b"no JSON").status != 400:  # the client's leaving takes its time
            assert time.monotonic() < deadline
        assert server.post("/v1/completions", {"prompt": [5] * 5, "max_tokens": 1}).status == 503
        assert refusals()["max_num_queued_tokens"] == 1


@pytest.fixture
def dev_server(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with mock_llm(tiny_args(tokenizer), tokens_per_second=1000) as llm, served(llm) as server:
        yield server


def test_an_engine_sleeps_and_wakes(dev_server: Served) -> None:
    assert dev_server.get("/is_sleeping").json == {"is_sleeping": False}
    assert dev_server.post("/sleep?level=1", {}).status == 200
    assert dev_server.get("/is_sleeping").json == {"is_sleeping": True}
    refusal = dev_server.post("/v1/completions", BODY)
    assert (refusal.status, refusal.headers["retry-after"]) == (503, "1")
    assert "sleeps" in refusal.json["error"]["message"]
    assert [dev_server.get(path).status for path in ("/health", "/livez")] == [503, 200]
    assert dev_server.post("/wake_up", {}).status == 200
    assert dev_server.post("/v1/completions", BODY).status == 200
    assert dev_server.get("/health").status == 200


def test_an_engine_pauses_and_resumes(dev_server: Served) -> None:
    assert dev_server.post("/pause?mode=wait", {}).json == {"status": "paused"}
    assert dev_server.get("/is_paused").json == {"is_paused": True}
    answers: list[Answer] = []
    waiting = threading.Thread(target=lambda: answers.append(dev_server.post("/v1/completions", BODY)))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    assert dev_server.post("/resume", {}).json == {"status": "resumed"}
    waiting.join(20)
    assert answers[0].status == 200
    assert dev_server.get("/is_paused").json == {"is_paused": False}


def test_the_prefix_cache_is_emptied_and_the_settings_are_shown(dev_server: Served) -> None:
    assert dev_server.post("/reset_prefix_cache", {}).json == {"success": True}
    config = dev_server.get("/server_info").json["vllm_config"]
    assert config["model_config"]["max_model_len"] == dev_server.llm.model_config.max_model_len
    assert config["cache_config"]["block_size"] == 8


@pytest.mark.parametrize(
    ("path", "parameter"),
    [
        ("/sleep?level=x", "level"),
        ("/sleep?level=9", "level"),
        ("/sleep?mode=keep", "mode"),
        ("/sleep?mode=never", "mode"),
        ("/pause?mode=never", "mode"),
        ("/pause?clear_cache=perhaps", "clear_cache"),
        ("/wake_up?tags=kv", "tags"),
        ("/reset_prefix_cache?reset_running_requests=maybe", "reset_running_requests"),
    ],
)
def test_what_cannot_be_changed_so_is_refused_by_name(dev_server: Served, path: str, parameter: str) -> None:
    answer = dev_server.post(path, {})
    assert (answer.status, answer.json["error"]["param"]) == (400, parameter), answer.body


def test_errors_of_other_routes_have_openais_form_too(mock: AsyncLLM, mock_server: Served) -> None:
    """A route that a user adds may fail in any way: nothing of it is shown."""
    with served(mock) as server:

        def fail() -> None:
            raise ValueError("/a/path")

        server.app.add_api_route("/own", fail)
        answer = server.get("/own")
    assert (answer.status, answer.json["error"]["type"]) == (500, "InternalServerError")
    assert "path" not in json.dumps(answer.json)
