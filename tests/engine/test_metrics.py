"""Metrics are vLLM's by name, type, labels and bounds; the statistics line averages over busy time only."""

from __future__ import annotations

import logging
from collections import defaultdict

import pytest

from jaxllm.engine.metrics import PREFIX, EngineMetrics, Histogram, Metric, cache_config_info
from jaxllm.engine.stats_log import StatsLogger
from jaxllm.messages import SchedulerStats
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.fake_core import FakeCore, hashed_tokens
from tests.engine.support import byte_level, make_config, make_engine
from tests.engine.vllm_metrics import MODEL_AND_ENGINE, NOT_APPLICABLE, OURS


def stats(num_tokens: int) -> SchedulerStats:
    return SchedulerStats(
        num_running_reqs=2,
        num_waiting_reqs=1,
        num_blocks=51,
        num_blocks_in_use=5,
        num_preemptions=0,
        prefix_cache_queries=200,
        prefix_cache_hits=30,
        num_steps=1,
        num_scheduled_tokens=num_tokens,
    )


def lines_of(times: list[float], caplog: pytest.LogCaptureFixture) -> list[str]:
    """Step at these times, each with 4 new tokens and a prompt of 6."""
    metrics = EngineMetrics("m", 128, stats(0))
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


def snapshot(max_model_len: int = 128) -> list[Metric]:
    config = make_config(block_size=16, kv_cache_dtype="auto", enable_prefix_caching=True, gpu_memory_utilization=0.9)
    info = cache_config_info(config, 51, max_model_len)
    return EngineMetrics("some/model", max_model_len, stats(0), info).snapshot()


def test_every_metric_of_vllm_is_ours_or_not_applicable() -> None:
    types: dict[str, set[str]] = defaultdict(set)
    label_names: dict[str, set[frozenset[str]]] = defaultdict(set)
    values: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for metric in snapshot():
        name = metric.name.removeprefix(PREFIX)
        types[name].add(type(metric).__name__)
        label_names[name].add(frozenset(metric.labels))
        for label, value in metric.labels.items():
            values[name][label].add(value)
    assert dict(types) == {name: {each.type} for name, each in OURS.items()}
    assert dict(label_names) == {name: {frozenset(each.labels)} for name, each in OURS.items()}
    for name, each in OURS.items():
        assert each.values == "" or sorted(values[name][each.labels[-1]]) == sorted(each.values.split())
        if each.labels[:2] == MODEL_AND_ENGINE:
            assert (values[name]["model_name"], values[name]["engine"]) == ({"some/model"}, {"0"})
    elsewhere = [name for names in NOT_APPLICABLE.values() for name in names.split()]
    assert not set(elsewhere) & set(OURS)
    assert len(elsewhere) == len(set(elsewhere))


def test_the_bounds_of_histograms_are_vllms() -> None:
    found = {
        metric.name.removeprefix(PREFIX): " ".join(metric.buckets)
        for metric in snapshot(3_000_000)
        if isinstance(metric, Histogram)
    }
    assert found["request_prompt_tokens"] == (
        "1.0 2.0 5.0 10.0 20.0 50.0 100.0 200.0 500.0 1000.0 2000.0 5000.0 10000.0 20000.0 50000.0 100000.0 "
        "200000.0 500000.0 1e+06 2e+06 +Inf"
    )
    assert found["iteration_tokens_total"] == (
        "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0 +Inf"
    )
    assert found["time_to_first_token_seconds"].endswith("80.0 160.0 640.0 2560.0 +Inf")
    assert found["request_num_preemptions"] == "1.0 2.0 3.0 4.0 5.0 10.0 20.0 +Inf"


def test_the_cache_is_described_before_the_first_step() -> None:
    (info,) = (metric for metric in snapshot() if metric.name == "vllm:cache_config_info")
    labels = info.labels
    assert (labels["num_gpu_blocks"], labels["block_size"], labels["kv_cache_size_tokens"]) == ("51", "16", "800")
    assert (labels["kv_cache_max_concurrency"], labels["cache_dtype"], labels["engine"]) == ("6.25", "auto", "0")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.mark.parametrize("disabled", [True, False])
def test_the_engine_logs_unless_told_not_to(
    tokenizer: Tokenizer, disabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[float] = []
    monkeypatch.setattr("jaxllm.engine.stats_log.StatsLogger.on_step", lambda _self, now: times.append(now))
    engine = make_engine(FakeCore(hashed_tokens), tokenizer, disable_log_stats=disabled)
    engine.add_request("a", "hello", SamplingParams(max_tokens=5))
    while engine.has_unfinished_requests():
        engine.step()
    assert len(times) == (0 if disabled else 5)
    assert times == sorted(times)
