"""What those who run a server ask it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

import jaxllm
from jaxllm.engine.async_llm import AsyncLLM
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
        ("/pause?mode=keep", "mode"),
        ("/pause?clear_cache=perhaps", "clear_cache"),
        ("/wake_up?tags=weights", "tags"),
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
