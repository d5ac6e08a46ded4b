"""Requests to a server of several models: each route finds the model that a request names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.models.support import fields, several_served, use_mock_cores
from tests.server.support import Served

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Return a server of two models that work, of one that does not load, at most one at a time."""
    folder: Path = tmp_path_factory.mktemp("models")
    (folder / "broken").mkdir()
    models = {
        "a": fields(tokenizer, aliases="gpt-4o"),
        "b": fields(tokenizer, **{"max-model-len": 64}),
        "broken": {"model": str(folder / "broken"), "kv-cache-memory-bytes": 2**20},
    }
    with pytest.MonkeyPatch.context() as patch, several_served(folder / "models.yaml", models) as served:
        patch.setenv("JAXLLM_SERVER_DEV_MODE", "1")
        use_mock_cores(patch)
        yield served


def statuses(server: Served) -> dict[str, str]:
    """Return where the models are, as /v1/models shows it."""
    return {card["id"]: card["status"] for card in server.get("/v1/models").json["data"]}


def ask(server: Served, model: str | None, path: str = "/v1/completions", **more: Any) -> Any:
    """Return the answer to a request for text."""
    return server.post(path, {"model": model, "prompt": "hi", "max_tokens": 3} | more)


def metric(server: Served, line: str) -> float:
    """Return the value of a metric's line."""
    text = server.get("/metrics").body.decode()
    match = re.search(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
    assert match is not None, line
    return float(match[1])


def test_models_are_shown_before_they_are_loaded(server: Served) -> None:
    assert set(statuses(server)) == {"a", "gpt-4o", "b", "broken"}
    assert server.get("/health").status == server.get("/livez").status == 200
    card = server.get("/v1/models/gpt-4o").json
    assert card["id"] == "gpt-4o"
    assert server.get("/v1/models/nothing").status == 404


def test_requests_go_to_the_model_that_they_name(server: Served) -> None:
    for name, shown in (("a", "a"), ("b", "b"), ("gpt-4o", "gpt-4o")):
        answer = ask(server, name)
        assert (answer.status, answer.json["usage"]["completion_tokens"]) == (200, 3)
        assert statuses(server)[shown] == "ready"
    assert statuses(server)["b"] == "asleep"
    lengths = {card["id"]: card["max_model_len"] for card in server.get("/v1/models").json["data"]}
    assert (lengths["b"], lengths["broken"]) == (64, None)
    assert lengths["a"] > 64


def test_each_api_finds_the_model(server: Served) -> None:
    asked = {
        "/v1/chat/completions": {"messages": USER, "max_tokens": 3},
        "/v1/responses": {"input": "hi", "max_output_tokens": 16},
        "/v1/messages": {"messages": USER, "max_tokens": 3},
        "/api/chat": {"messages": USER, "stream": False, "options": {"num_predict": 3}},
        "/api/generate": {"prompt": "hi", "stream": False, "options": {"num_predict": 3}},
        "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 3}},
        "/invocations": {"prompt": "hi", "max_tokens": 3},
        "/tokenize": {"prompt": "hi"},
    }
    for number, (path, body) in enumerate(asked.items()):
        name = "ab"[number % 2]
        assert server.post(path, {"model": name, **body}).status == 200, path
        if path != "/tokenize":  # it needs no core
            assert statuses(server)[name] == "ready", path


def test_a_stream_keeps_its_model_until_its_end(server: Served) -> None:
    """Its client reads all of it, while a request for another model waits."""
    with ThreadPoolExecutor(2) as pool:
        stream = pool.submit(ask, server, "a", stream=True, max_tokens=100, ignore_eos=True)
        while metric(server, 'vllm:num_requests_running{engine="0",model_name="a"}') < 1 and not stream.done():
            pass
        other = pool.submit(ask, server, "b")
        assert len(stream.result().events) >= 100
        assert other.result().status == 200
    assert statuses(server)["b"] == "ready"


def test_unknown_and_missing_names(server: Served) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/embeddings", {"input": "x"}),
        ("/api/chat", {"messages": USER}),
        ("/v1/messages", {"messages": USER, "max_tokens": 1}),
    ):
        answer = server.post(path, {"model": "nothing", **body})
        assert answer.status == 404, path
        assert "`nothing` does not exist. This server has `a`, `b`, `broken`." in answer.body.decode()
        answer = server.post(path, body)
        assert (answer.status, "/v1/models" in answer.body.decode()) == (400, True), path


def test_a_broken_model_says_why_and_others_go_on(server: Served) -> None:
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda name: ask(server, name), ["a", "broken", "b", "a", "b", "broken"]))
    assert [answer.status for answer in answers] == [200, 503, 200, 200, 200, 503]
    assert "`broken` cannot be loaded" in answers[1].json["error"]["message"]
    assert int(answers[1].headers["retry-after"]) >= 1
    card = server.get("/v1/models/broken").json
    assert (card["status"], "broken" in card["error"]) == ("failed", True)
    assert metric(server, 'vllm:model_failures_total{model_name="broken"}') >= 1
    assert server.get("/health").status == 200


def test_metrics_have_the_models_names(server: Served) -> None:
    assert ask(server, "a").status == 200
    before = metric(server, 'vllm:generation_tokens_total{engine="0",model_name="a"}')
    assert ask(server, "a").status == 200
    assert metric(server, 'vllm:generation_tokens_total{engine="0",model_name="a"}') == before + 3
    assert ask(server, "b").status == 200
    assert ask(server, "a").status == 200  # a counter goes on after another load
    assert metric(server, 'vllm:generation_tokens_total{engine="0",model_name="a"}') == before + 6
    prompts = 'vllm:time_to_first_token_seconds_count{engine="0",model_name="a"}'
    assert metric(server, prompts) >= 3
    assert metric(server, 'vllm:model_state{model_name="a",state="ready"}') == 1
    assert metric(server, 'vllm:model_state{model_name="b",state="ready"}') == 0
    assert metric(server, 'vllm:model_loads_total{model_name="a"}') >= 1
    assert metric(server, 'vllm:model_load_seconds{model_name="a"}') > 0


def test_ollama_s_lists_and_keep_alive(server: Served) -> None:
    def running() -> list[str]:
        return [model["name"] for model in server.get("/api/ps").json["models"]]

    names = [model["name"] for model in server.get("/api/tags").json["models"]]
    assert names == ["a:latest", "gpt-4o:latest", "b:latest", "broken:latest"]
    assert ask(server, "a:latest", "/api/generate", stream=False, keep_alive="5m").status == 200
    assert running() == ["a:latest", "gpt-4o:latest"]
    [first, _] = server.get("/api/ps").json["models"]
    assert not first["expires_at"].startswith("9999")
    unload = {"model": "a", "keep_alive": 0}
    answer = server.post("/api/generate", unload)
    assert (answer.status, json.loads(answer.body)["done_reason"]) == (200, "unload")
    while running():
        pass
    assert json.loads(server.post("/api/generate", unload).body)["done_reason"] == "unload"  # it loads nothing
    assert running() == []
    assert server.post("/api/show", {"model": "b:latest"}).status == 200
    assert json.loads(server.post("/api/generate", {"model": "b", "stream": False}).body)["done_reason"] == "load"
    assert running() == ["b:latest"]


def test_responses_are_kept_while_their_model_sleeps(server: Served) -> None:
    made = server.post("/v1/responses", {"model": "a", "input": "hi", "max_output_tokens": 16}).json
    assert ask(server, "b").status == 200
    assert server.get(f"/v1/responses/{made['id']}").json["id"] == made["id"]
    body = {"model": "b", "input": "and", "max_output_tokens": 16, "previous_response_id": made["id"]}
    assert server.post("/v1/responses", body).status == 200
