"""A load balancer's header has the engine's load come with an answer."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.server.support import Served

ASKED, TOLD = "endpoint-load-metrics-format", "endpoint-load-metrics"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
}


@pytest.mark.parametrize("path", BODIES)
def test_the_load_comes_in_the_form_that_is_asked_for(mock_server: Served, path: str) -> None:
    as_json = mock_server.post(path, BODIES[path], {ASKED: "JSON"}).headers[TOLD]
    assert as_json.startswith("JSON ")
    metrics = json.loads(as_json.removeprefix("JSON "))["named_metrics"]
    assert metrics.keys() == {"kv_cache_usage_perc", "num_requests_waiting"}
    assert 0 <= metrics["kv_cache_usage_perc"] <= 1
    assert metrics["num_requests_waiting"] == 0
    as_text = mock_server.post(path, BODIES[path], {ASKED: "text"}).headers[TOLD]
    number = r"[0-9.e-]+"
    form = rf"TEXT named_metrics\.kv_cache_usage_perc={number}, named_metrics\.num_requests_waiting=0\.0"
    assert re.fullmatch(form, as_text)


@pytest.mark.parametrize("path", BODIES)
def test_who_does_not_ask_is_not_told(mock_server: Served, path: str) -> None:
    for headers in ({}, {ASKED: "bin"}, {ASKED: ""}):
        answer = mock_server.post(path, BODIES[path], headers)
        assert (answer.status, TOLD in answer.headers) == (200, False)
    assert TOLD not in mock_server.post(path, BODIES[path] | {"stream": True}, {ASKED: "json"}).headers
