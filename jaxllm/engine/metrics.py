"""Counts and times since the engine's start: `get_metrics` snapshots under vLLM's names, and the statistics line."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxllm.messages import SchedulerStats
from jaxllm.outputs import RequestStateStats

logger = logging.getLogger("jaxllm")

_PREFIX = "jaxllm:"
_LATENCIES = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN_LATENCIES = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_DURATIONS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_LENGTHS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_OUTPUTS = (1, 2, 5, 10, 20)


@dataclass
class Metric:
    """One measured thing; `labels` tells metrics of the same name apart."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A count that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counts by position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A value right now."""

    value: float


@dataclass
class Histogram(Metric):
    """How often a value was at most each bound; `buckets` is cumulative and ends with "+Inf"."""

    count: int
    sum: float
    buckets: dict[str, int]


class _Distribution:
    """A histogram being filled."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self, name: str, labels: dict[str, str]) -> Histogram:
        buckets: dict[str, int] = {}
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets["+Inf" if bound == float("inf") else str(float(bound))] = total
        return Histogram(name, labels, total, self._sum, buckets)


_HISTOGRAMS: dict[str, Sequence[float]] = {
    "time_to_first_token_seconds": _LATENCIES,
    "inter_token_latency_seconds": _TOKEN_LATENCIES,
    "request_time_per_output_token_seconds": _TOKEN_LATENCIES,
    "e2e_request_latency_seconds": _DURATIONS,
    "request_queue_time_seconds": _DURATIONS,
    "request_prefill_time_seconds": _DURATIONS,
    "request_decode_time_seconds": _DURATIONS,
    "request_inference_time_seconds": _DURATIONS,
    "request_prompt_tokens": _LENGTHS,
    "request_generation_tokens": _LENGTHS,
    "request_params_n": _OUTPUTS,
    "request_params_max_tokens": _LENGTHS,
    "iteration_tokens_total": _LENGTHS,
}


@dataclass
class EngineMetrics:
    """All that is counted. Times are in seconds."""

    model_name: str
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})
    stats: SchedulerStats | None = None
    """The scheduler after the last step."""
    _histograms: dict[str, _Distribution] = field(
        default_factory=lambda: {name: _Distribution(bounds) for name, bounds in _HISTOGRAMS.items()}
    )

    def on_step(self, stats: SchedulerStats, num_new_tokens: int) -> None:
        """Count a step of the core."""
        before = 0 if self.stats is None else self.stats.num_scheduled_tokens
        if stats.num_scheduled_tokens > before:
            self._histograms["iteration_tokens_total"].observe(stats.num_scheduled_tokens - before)
        self.generation_tokens += num_new_tokens
        self.stats = stats

    def on_first_token(self, latency: float, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count a sequence whose prompt is done."""
        self.prompt_tokens += num_prompt_tokens
        self.prompt_tokens_cached += num_cached_tokens
        self._histograms["time_to_first_token_seconds"].observe(latency)

    def on_next_token(self, latency: float) -> None:
        """Count a token after a sequence's first."""
        self._histograms["inter_token_latency_seconds"].observe(latency)

    def on_finished_sequence(self, reason: str, stats: RequestStateStats, now: float) -> None:
        """Count the end of one output and where its time went; `now` is time.time()."""
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self._observe("e2e_request_latency_seconds", now - stats.arrival_time)
        if stats.num_generation_tokens == 0:
            return
        decode = stats.last_token_ts - stats.first_token_ts
        self._observe("request_queue_time_seconds", stats.scheduled_ts - stats.queued_ts)
        self._observe("request_prefill_time_seconds", stats.first_token_ts - stats.scheduled_ts)
        self._observe("request_decode_time_seconds", decode)
        self._observe("request_inference_time_seconds", stats.last_token_ts - stats.scheduled_ts)
        if stats.num_generation_tokens > 1:
            self._observe("request_time_per_output_token_seconds", decode / (stats.num_generation_tokens - 1))

    def on_finished_request(self, num_prompt_tokens: int, num_tokens: int, n: int, max_tokens: int | None) -> None:
        """Count the end of a whole request."""
        self._observe("request_prompt_tokens", num_prompt_tokens)
        self._observe("request_generation_tokens", num_tokens)
        self._observe("request_params_n", n)
        if max_tokens is not None:
            self._observe("request_params_max_tokens", max_tokens)

    def snapshot(self) -> list[Metric]:
        """Return everything as it is now."""
        labels = {"model_name": self.model_name}
        stats = self.stats
        gauges = {
            "num_requests_running": stats.num_running_reqs if stats else 0,
            "num_requests_waiting": stats.num_waiting_reqs if stats else 0,
            "kv_cache_usage_perc": self.kv_usage(),
        }
        counters = {
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_cached": self.prompt_tokens_cached,
            "generation_tokens": self.generation_tokens,
            "num_preemptions": stats.num_preemptions if stats else 0,
            "prefix_cache_queries": stats.prefix_cache_queries if stats else 0,
            "prefix_cache_hits": stats.prefix_cache_hits if stats else 0,
        }
        metrics: list[Metric] = [Gauge(_PREFIX + name, dict(labels), float(value)) for name, value in gauges.items()]
        metrics += [Counter(_PREFIX + name, dict(labels), value) for name, value in counters.items()]
        metrics += [
            Counter(_PREFIX + "request_success", {**labels, "finished_reason": reason}, count)
            for reason, count in self.finished.items()
        ]
        metrics += [each.snapshot(_PREFIX + name, dict(labels)) for name, each in self._histograms.items()]
        return metrics

    def kv_usage(self) -> float:
        """Return the share of the KV blocks in use, in [0, 1]."""
        return self.stats.num_blocks_in_use / max(1, self.stats.num_blocks) if self.stats else 0.0

    def hit_rate(self) -> float:
        """Return the share of prompt tokens found in the prefix cache, in [0, 1]."""
        return self.stats.prefix_cache_hits / max(1, self.stats.prefix_cache_queries) if self.stats else 0.0

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)


class StatsLogger:
    """Logs a line about every `interval` seconds while steps are done."""

    def __init__(self, metrics: EngineMetrics, interval: float = 10.0) -> None:
        self._metrics = metrics
        self._interval = interval
        self._last_step = self._since = float("-inf")
        self._counts = 0, 0

    def on_step(self, now: float) -> None:
        """Log when it is time; `now` is time.monotonic()."""
        if now - self._last_step > self._interval:  # idle time belongs to no average
            self._begin(now)
        elif now - self._since >= self._interval:
            self._log(now - self._since)
            self._begin(now)
        self._last_step = now

    def _begin(self, now: float) -> None:
        self._since = now
        self._counts = self._metrics.prompt_tokens, self._metrics.generation_tokens

    def _log(self, seconds: float) -> None:
        metrics = self._metrics
        logger.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
            "Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            (metrics.prompt_tokens - self._counts[0]) / seconds,
            (metrics.generation_tokens - self._counts[1]) / seconds,
            metrics.stats.num_running_reqs if metrics.stats else 0,
            metrics.stats.num_waiting_reqs if metrics.stats else 0,
            100 * metrics.kv_usage(),
            100 * metrics.hit_rate(),
        )
