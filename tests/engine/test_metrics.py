"""Metrics are vLLM's by name, type, labels and bounds; the statistics line averages over busy time only."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from jaxllm.core_messages import BlockEviction, SchedulerStats, SpeculationStats, TiersStats, TierStats
from jaxllm.engine.front.front_metrics import FrontMetrics
from jaxllm.engine.front.metrics import PREFIX, Counter, EngineMetrics, Gauge, Histogram, Metric, Vector
from jaxllm.engine.front.stats_log import StatsLogger
from jaxllm.engine.transport.engine_ready import EngineReady
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.fake_core import FakeCore, hashed_tokens
from tests.engine.support import make_engine, make_ready
from tests.engine.vllm_metrics import MODEL_AND_ENGINE, NOT_APPLICABLE, OURS


def stats(**changes: Any) -> SchedulerStats:
    fields: dict[str, Any] = {
        "num_running_reqs": 2,
        "num_waiting_reqs": 1,
        "num_blocks": 51,
        "num_blocks_in_use": 5,
        "num_preemptions": 0,
        "prefix_cache_requests": 0,
        "prefix_cache_queries": 0,
        "prefix_cache_hits": 0,
        "num_steps": 1,
        "num_scheduled_tokens": 4,
    }
    return SchedulerStats(**(fields | changes))


def drafts(num_steps: int, accepted: list[int]) -> SpeculationStats:
    """Return the counts of `num_steps` steps of a request with 2 drafts each."""
    return SpeculationStats(
        num_drafts=num_steps,
        num_draft_tokens=2 * num_steps,
        num_accepted_tokens=sum(accepted),
        num_accepted_tokens_per_pos=accepted,
    )


class Log:
    """An engine's statistics: steps are done by hand, each with 4 new tokens and a prompt of 8, 2 of them cached."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, logger="jaxllm")
        self.metrics = EngineMetrics("m", 128, stats())
        self.statistics = StatsLogger(self.metrics, "cpu")
        self._records = caplog.records

    def step(self, now: float, started: float | None = None, num_deferred: int = 0, **changes: Any) -> None:
        self.metrics.on_first_token(0.1, 8, 2)
        self.metrics.on_step(stats(**changes), 4, num_deferred)
        self.statistics.on_step(now if started is None else started, now)

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self._records if record.levelno == logging.INFO]


def test_line(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(caplog)
    for now in range(100, 121):
        log.step(now, started=now - 1)
    first, second = log.lines
    assert first == second
    assert first == (
        "Engine 000: Avg prompt throughput: 6.0 tokens/s, Avg generation throughput: 4.0 tokens/s, Running: 2 reqs, "
        "Waiting: 1 reqs, CPU KV cache usage: 10.0%"
    )


def test_line_says_what_is_not_usual(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(caplog)
    counts = {"prefix_cache_requests": 3, "prefix_cache_queries": 200, "prefix_cache_hits": 30}
    log.step(10.0, started=0.0, num_deferred=2, num_preemptions=7, **counts)
    log.step(20.0, num_preemptions=7, **counts)
    first, second = log.lines
    assert first.endswith(
        "Running: 2 reqs, Waiting: 3 reqs, Deferred: 2 reqs, Preemptions: 7, CPU KV cache usage: 10.0%, "
        "Prefix cache hit rate: 15.0%"
    )
    assert second.endswith("Waiting: 1 reqs, CPU KV cache usage: 10.0%, Prefix cache hit rate: 15.0%")


def test_hit_rate_is_that_of_the_last_thousand_requests(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(caplog)
    log.step(1.0, prefix_cache_requests=900, prefix_cache_queries=9000, prefix_cache_hits=0)
    log.step(2.0, prefix_cache_requests=1000, prefix_cache_queries=10_000, prefix_cache_hits=900)
    log.statistics.log()
    assert log.lines[-1].endswith("hit rate: 9.0%")
    log.step(3.0, prefix_cache_requests=1001, prefix_cache_queries=10_010, prefix_cache_hits=900)
    log.statistics.log()
    assert log.lines[-1].endswith(f"hit rate: {100 * 900 / 1010:.1f}%")
    log.statistics.forget_hits()
    log.step(4.0, prefix_cache_requests=1002, prefix_cache_queries=10_020, prefix_cache_hits=905)
    log.statistics.log()
    assert log.lines[-1].endswith("hit rate: 50.0%")


def test_idle_time_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(caplog)
    for now in (1.0, 9.0, 500.0, 505.0):
        log.step(now, started=now - 1)
    assert log.lines == []
    log.step(509.0)
    (line,) = log.lines
    assert line.startswith("Engine 000: Avg prompt throughput: 1.8 tokens/s")


def test_log_on_demand(caplog: pytest.LogCaptureFixture) -> None:
    """The time since the last step does not count, and an engine that does nothing is not worth a line."""
    log = Log(caplog)
    log.statistics.log()
    assert log.lines == []
    log.step(3.0, started=1.0)
    log.statistics.log()
    assert log.lines[0].startswith("Engine 000: Avg prompt throughput: 3.0 tokens/s, Avg generation throughput: 2.0")
    log.statistics.log()
    assert log.lines[1].startswith("Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0")
    log.statistics.log()
    assert len(log.lines) == 2


def ready_for(max_model_len: int, *, kv_cache_metrics: bool = False, **counts: Any) -> EngineReady:
    """Return the ready message of a core with these counts."""
    ready = make_ready(max_model_len=max_model_len, stats=stats(**counts))
    watched = replace(ready.vllm_config.observability_config, kv_cache_metrics=kv_cache_metrics)
    return msgspec.structs.replace(ready, vllm_config=replace(ready.vllm_config, observability_config=watched))


def snapshot(max_model_len: int = 128) -> list[Metric]:
    parts: dict[str, Any] = {"speculation": drafts(3, [2, 1]), "tiers": TiersStats()}
    metrics = FrontMetrics(ready_for(max_model_len, kv_cache_metrics=True, **parts))
    metrics.watch_adapters(2, lambda: (["sql"], ["a", "b"]))
    return metrics.snapshot()


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
    for name, expected in OURS.items():
        assert expected.values == "" or sorted(values[name][expected.labels[-1]]) == sorted(expected.values.split())
        if expected.labels[:2] == MODEL_AND_ENGINE:
            assert (values[name]["model_name"], values[name]["engine"]) == ({"fake"}, {"0"})
    elsewhere = [name for names in NOT_APPLICABLE.values() for name in names.split()]
    assert not set(elsewhere) & set(OURS)
    assert len(elsewhere) == len(set(elsewhere))


def test_the_bounds_of_histograms_are_vllms() -> None:
    bounds = {
        metric.name.removeprefix(PREFIX): " ".join(metric.buckets)
        for metric in snapshot(3_000_000)
        if isinstance(metric, Histogram)
    }
    assert bounds["request_prompt_tokens"] == (
        "1.0 2.0 5.0 10.0 20.0 50.0 100.0 200.0 500.0 1000.0 2000.0 5000.0 10000.0 20000.0 50000.0 100000.0 "
        "200000.0 500000.0 1e+06 2e+06 +Inf"
    )
    assert bounds["iteration_tokens_total"] == (
        "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0 +Inf"
    )
    assert bounds["time_to_first_token_seconds"].endswith("80.0 160.0 640.0 2560.0 +Inf")
    assert bounds["kv_block_idle_before_evict_seconds"].startswith("0.001 0.002 0.005 0.01 0.02 0.05 0.1 0.2 0.5 1.0")
    assert bounds["kv_block_reuse_gap_seconds"].endswith("20.0 30.0 60.0 120.0 300.0 600.0 1200.0 1800.0 +Inf")
    assert bounds["request_num_preemptions"] == "1.0 2.0 3.0 4.0 5.0 10.0 20.0 +Inf"


def test_drafts_are_counted_over_cores() -> None:
    metrics = EngineMetrics("m", 128, stats(speculation=drafts(0, [0, 0])))
    metrics.on_step(stats(speculation=drafts(3, [2, 1])), 0)
    metrics.on_new_core(stats(speculation=drafts(0, [0, 0])))
    metrics.on_step(stats(speculation=drafts(4, [4, 2])), 0)
    by_name = {each.name.removeprefix("vllm:spec_decode_num_"): each for each in metrics.snapshot()}
    counters = {name: each.value for name, each in by_name.items() if isinstance(each, Counter)}
    assert [counters[name] for name in ("drafts", "draft_tokens", "accepted_tokens")] == [7, 14, 9]
    by_position = by_name["accepted_tokens_per_pos"]
    assert isinstance(by_position, Vector)
    assert by_position.values == [6, 3]
    assert not any("spec_decode" in each.name for each in EngineMetrics("m", 128, stats()).snapshot())


def test_the_tiers_counts_go_on_over_cores_and_what_they_hold_is_the_last_ones() -> None:
    def tiers(scale: int) -> TiersStats:
        host, disk = (
            TierStats(
                num_blocks=scale * factor,
                num_bytes=scale * 10 * factor,
                num_hit_tokens=scale * 100 * factor,
                num_fetched_blocks=scale * 3 * factor,
                num_evicted_blocks=scale * 5 * factor,
            )
            for factor in (1, 7)
        )
        return TiersStats(
            host=host,
            disk=disk,
            num_queried_tokens=900 * scale,
            num_fetches=11 * scale,
            num_failed_fetches=12 * scale,
            num_refused_fetches=13 * scale,
            num_broken_files=14 * scale,
        )

    metrics = EngineMetrics("m", 128, stats(tiers=TiersStats()))
    metrics.on_step(stats(tiers=tiers(1), prefix_cache_hits=50), 0)
    metrics.on_new_core(stats(tiers=TiersStats()))
    metrics.on_step(stats(tiers=tiers(2), prefix_cache_hits=20), 0)
    values = {
        (metric.name.removeprefix(PREFIX), *list(metric.labels.values())[2:]): metric.value
        for metric in metrics.snapshot()
        if isinstance(metric, Counter | Gauge)
    }
    expected = {
        ("kv_tier_blocks", "host"): 2,
        ("kv_tier_blocks", "disk"): 14,
        ("kv_tier_bytes", "host"): 20,
        ("kv_tier_bytes", "disk"): 140,
        ("kv_tier_fetched_blocks", "host"): 9,
        ("kv_tier_fetched_blocks", "disk"): 63,
        ("kv_tier_evicted_blocks", "host"): 15,
        ("kv_tier_evicted_blocks", "disk"): 105,
        ("kv_tier_fetches", "done"): 33,
        ("kv_tier_fetches", "failed"): 36,
        ("kv_tier_fetches", "refused"): 39,
        ("kv_tier_broken_files",): 42,
        ("external_prefix_cache_queries",): 2700,
        ("external_prefix_cache_hits",): 2400,
        ("prompt_tokens_cached_by_source", "device"): 70,
        ("prompt_tokens_cached_by_source", "host"): 300,
        ("prompt_tokens_cached_by_source", "disk"): 2100,
    }
    assert {name: values[name] for name in expected} == expected
    assert not any("kv_tier" in each.name for each in EngineMetrics("m", 128, stats()).snapshot())


def test_the_tiers_have_a_hit_rate_too(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(caplog)
    counts: dict[str, Any] = {"prefix_cache_requests": 3, "prefix_cache_queries": 200, "prefix_cache_hits": 30}
    host, disk = TierStats(num_hit_tokens=40), TierStats(num_hit_tokens=28)
    log.step(1.0, tiers=TiersStats(host=host, disk=disk, num_queried_tokens=170), **counts)
    log.statistics.log()
    assert log.lines[-1].endswith("Prefix cache hit rate: 15.0%, External prefix cache hit rate: 40.0%")


def test_adapters_are_shown_by_name() -> None:
    metrics = FrontMetrics(ready_for(128))
    assert not any("lora" in each.name for each in metrics.snapshot())
    metrics.watch_adapters(2, lambda: (["sql"], ["a", "b"]))
    [info] = [each for each in metrics.snapshot() if each.name == "vllm:lora_requests_info"]
    assert info.labels == {"max_lora": "2", "waiting_lora_adapters": "sql", "running_lora_adapters": "a,b"}


def test_evictions_are_counted() -> None:
    metrics = EngineMetrics("m", 128, stats(), has_residency=True)
    metrics.on_evictions([BlockEviction(lifetime=5, idle=2, reuse_gaps=[0.5, 1.5])])
    sums = {each.name: (each.count, each.sum) for each in metrics.snapshot() if isinstance(each, Histogram)}
    assert sums["vllm:kv_block_lifetime_seconds"] == (1, 5)
    assert sums["vllm:kv_block_idle_before_evict_seconds"] == (1, 2)
    assert sums["vllm:kv_block_reuse_gap_seconds"] == (2, 2)


def test_the_cache_is_described_before_the_first_step() -> None:
    (info,) = (metric for metric in snapshot() if metric.name == "vllm:cache_config_info")
    labels = info.labels
    assert (labels["num_gpu_blocks"], labels["block_size"], labels["kv_cache_size_tokens"]) == ("51", "16", "800")
    assert (labels["kv_cache_max_concurrency"], labels["cache_dtype"], labels["engine"]) == ("6.25", "float32", "0")


@pytest.mark.parametrize("disabled", [True, False])
def test_the_engine_logs_unless_told_not_to(
    tokenizer: Tokenizer, disabled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="jaxllm")
    engine = make_engine(FakeCore(hashed_tokens), tokenizer, disable_log_stats=disabled, device_type="tpu")
    engine.add_request("a", "hello", SamplingParams(max_tokens=5))
    while engine.has_unfinished_requests():
        engine.step()
    engine.do_log_stats()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (0 if disabled else 1)
    assert all("Running: 0 reqs, Waiting: 5 reqs, Deferred: 5 reqs, TPU KV cache usage: 1.0%" in line for line in lines)
    assert engine.reset_prefix_cache()


def test_counters_go_on_when_the_core_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    """A sleep ends the core, and the next one counts from nothing: a counter that falls looks like a restart."""
    log = Log(caplog)
    counts = {"prefix_cache_requests": 3, "prefix_cache_queries": 200, "prefix_cache_hits": 30, "num_preemptions": 7}
    log.step(10.0, started=0.0, **counts)
    log.metrics.on_programs(5, is_warm=True)
    log.metrics.on_new_core(stats())
    log.metrics.on_programs(1, is_warm=False)
    log.step(20.0, prefix_cache_requests=1, prefix_cache_queries=100, prefix_cache_hits=60, num_preemptions=1)
    values = {
        each.name.removeprefix(PREFIX): each.value for each in log.metrics.snapshot() if isinstance(each, Counter)
    }
    expected = {"prefix_cache_queries": 300, "prefix_cache_hits": 90, "num_preemptions": 8, "programs_compiled": 6}
    assert {name: values[name] for name in expected} == expected
    assert "Preemptions: 1," in log.lines[-1]
    assert log.lines[-1].endswith("Prefix cache hit rate: 30.0%")
