"""scripts/bench_frontend.py: every token of a stream is counted, and goals are judged by the worst row."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import bench_frontend
import pytest
from benchmarking import front_end
from benchmarking.servers import ServerError, Streamed, ask, children, server_process, stream

from tests.e2e.tiny_tokenizer import save_tokenizer
from tests.models.tiny import folder


def test_streams_of_a_server_without_a_model(tmp_path: Path) -> None:
    flags = ("--tokenizer", save_tokenizer(tmp_path), "--tokens-per-second", "100", "--max-model-len", "64")
    with front_end.mock_server(folder("llama3_tied"), tmp_path / "log.txt", *flags) as server:
        body: dict[str, Any] = {"prompt": [8, 9], "max_tokens": 12, "ignore_eos": True}
        before, began = server.cpu_seconds(), time.monotonic()
        answer = asyncio.run(stream(server.port, body))
        ended = time.monotonic()
        assert answer.num_tokens == 12
        assert 1 <= len(answer.arrivals) <= 12
        assert began <= answer.began <= answer.arrivals[0] <= answer.arrivals[-1] <= answer.ended <= ended
        assert server.cpu_seconds() - before > 0
        assert len(children(server.pid)) == 1
        assert asyncio.run(ask(server.port, body))["usage"]["completion_tokens"] == 12
        with pytest.raises(ServerError, match="max_tokens"):
            asyncio.run(stream(server.port, body | {"max_tokens": -1}))


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo it has no weights; exit 3"]
    with pytest.raises(ServerError, match="it has no weights"), server_process(command, tmp_path / "log.txt"):
        pytest.fail("it has started")


def test_latencies_are_of_all_runs() -> None:
    runs = [[Streamed(10.0, [10.5, 10.6, 10.8])], [Streamed(20.0, [20.1, 20.2])]]
    found = front_end.latencies(runs)
    assert found["ttft_ms"] == {"p50": 100.0, "p99": 100.0}
    assert found["itl_ms"]["p50"] == 100.0


def test_goals_are_judged_by_the_worst_row() -> None:
    rows: list[dict[str, Any]] = [{"streams": 16, "ratio": 0.96}, {"streams": 64, "ratio": 0.94}]
    assert bench_frontend.verdicts({"beside_llm_generate": rows}) == {"ratio": False}
    assert bench_frontend.verdicts({"beside_llm_generate": rows[:1]}) == {"ratio": True}
