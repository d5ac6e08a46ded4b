"""The statistics line: averages over the steps of about ten seconds, none over idle time."""

from __future__ import annotations

import logging

import pytest

from jaxllm.engine.metrics import EngineMetrics, StatsLogger
from jaxllm.messages import SchedulerStats
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.fake_core import FakeCore, hashed_tokens
from tests.engine.support import byte_level, make_engine


def stats(num_tokens: int) -> SchedulerStats:
    return SchedulerStats(
        num_running_reqs=2,
        num_waiting_reqs=1,
        num_blocks=50,
        num_blocks_in_use=5,
        num_preemptions=0,
        prefix_cache_queries=200,
        prefix_cache_hits=30,
        num_steps=1,
        num_scheduled_tokens=num_tokens,
    )


def lines_of(times: list[float], caplog: pytest.LogCaptureFixture) -> list[str]:
    """Step at these times, each with 4 new tokens and a prompt of 6."""
    metrics = EngineMetrics("m")
    statistics = StatsLogger(metrics)
    with caplog.at_level(logging.INFO, logger="jaxllm"):
        for now in times:
            metrics.on_step(stats(4), 4)
            metrics.on_first_token(0.1, 6, 0)
            statistics.on_step(now)
    return [record.getMessage() for record in caplog.records]


def test_line(caplog: pytest.LogCaptureFixture) -> None:
    first, second = lines_of([float(now) for now in range(100, 126)], caplog)
    assert first == second
    assert first == (
        "Avg prompt throughput: 6.0 tokens/s, Avg generation throughput: 4.0 tokens/s, Running: 2 reqs, "
        "Waiting: 1 reqs, KV cache usage: 10.0%, Prefix cache hit rate: 15.0%"
    )


def test_idle_time_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    assert lines_of([1.0, 9.0, 500.0, 505.0], caplog) == []
    (line,) = lines_of([1.0, 500.0, 505.0, 510.0], caplog)
    assert line.startswith("Avg prompt throughput: 1.2 tokens/s")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.mark.parametrize("disabled", [True, False])
def test_the_engine_logs_unless_told_not_to(
    tokenizer: Tokenizer, disabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[float] = []
    monkeypatch.setattr("jaxllm.engine.metrics.StatsLogger.on_step", lambda _self, now: times.append(now))
    engine = make_engine(FakeCore(hashed_tokens), tokenizer, disable_log_stats=disabled)
    engine.add_request("a", "hello", SamplingParams(max_tokens=5))
    while engine.has_unfinished_requests():
        engine.step()
    assert len(times) == (0 if disabled else 5)
    assert times == sorted(times)
