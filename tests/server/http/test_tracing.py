"""Spans of HTTP requests belong to the traces that their W3C headers name."""

from __future__ import annotations

import pytest

from tests.async_engine.support import mock_llm, tiny_args
from tests.engine.otlp import HEADERS, PARENT, TRACE, collector
from tests.server.support import TEMPLATE, Served, served


def test_spans_of_http(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    messages = [{"role": "user", "content": "hi"}]
    with collector() as got:
        args = tiny_args(tokenizer, chat_template=TEMPLATE, otlp_traces_endpoint=got.url)
        with mock_llm(args, tokens_per_second=1000) as llm, served(llm) as server:
            body = {"prompt": [[5, 6], [7]], "max_tokens": 3, "ignore_eos": True}
            assert server.post("/v1/completions", body, HEADERS).status == 200
            two = got.wait(2)
            body = {"messages": messages, "max_tokens": 4, "stream": True, "ignore_eos": True}
            assert server.post("/v1/chat/completions", body, HEADERS).status == 200
            chat = got.wait(3)[-1]
            body = {"messages": messages, "max_tokens": 2, "use_beam_search": True, "n": 2}
            assert server.post("/v1/chat/completions", body, HEADERS).status == 200
            search = got.wait(4)[-1]
            assert server.post("/v1/completions", {"prompt": "hi", "max_tokens": 1}).status == 200
            alone = got.wait(5)[-1]
    for span in (*two, chat, search):
        assert (span.trace, span.parent, span.state) == (TRACE, PARENT, HEADERS["tracestate"])
    assert sorted(span["usage.prompt_tokens"] for span in two) == [1, 2]
    assert [span["usage.completion_tokens"] for span in (*two, chat)] == [3, 3, 4]
    assert search["usage.num_sequences"] == 2
    assert alone.trace != TRACE
    assert alone.parent == ""


def test_headers_of_traces_are_left_alone_where_nothing_is_traced(mock_server: Served) -> None:
    assert mock_server.post("/v1/completions", {"prompt": [5], "max_tokens": 1}, HEADERS).status == 200
