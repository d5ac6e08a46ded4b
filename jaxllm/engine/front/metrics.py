"""Count and time what the engine has done since its start, under vLLM's names, types, labels and bounds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from jaxllm.core_messages import BlockEviction, SchedulerStats, SpeculationStats, TiersStats
from jaxllm.outputs import RequestStateStats

if TYPE_CHECKING:
    from jaxllm.resolve.vllm_config import VllmConfig

PREFIX = "vllm:"  # dashboards use these names
_LATENCIES = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_TOKEN_LATENCIES = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_DURATIONS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_RESIDENCY = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800),
)
_STEP_TOKENS = (1, *(2**power for power in range(3, 15)))


@dataclass
class Metric:
    """A metric is one measured thing; `labels` tells metrics of the same name apart."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A counter only grows."""

    value: int


@dataclass
class Vector(Metric):
    """A vector counts the same thing by position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A gauge is a value right now."""

    value: float


@dataclass
class Histogram(Metric):
    """A histogram counts how often a value was at most each bound; `buckets` is cumulative and ends with "+Inf"."""

    count: int
    sum: float
    buckets: dict[str, int]


class _Distribution:
    """A distribution is a histogram that is being filled."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def snapshot(self, name: str, labels: dict[str, str]) -> Histogram:
        buckets: dict[str, int] = {}
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets[_bound_label(bound)] = total
        return Histogram(name, labels, total, self._sum, buckets)


def _bound_label(bound: float) -> str:
    """Write a bound as Prometheus clients do: 1.0, 100000.0, 1e+06, 2.5e+06, +Inf."""
    if bound == float("inf"):
        return "+Inf"
    text = repr(float(bound))
    point = text.find(".")
    if point <= 6:
        return text
    mantissa = f"{text[0]}.{text[1:point]}{text[point + 1 :]}".rstrip("0.")
    return f"{mantissa}e+0{point - 1}"


def _histogram_bounds(max_model_len: int) -> dict[str, Sequence[float]]:
    """Return the bounds of every histogram by its name without prefix."""
    series = (digit * 10**power for power in range(len(str(max_model_len))) for digit in (1, 2, 5))
    lengths = tuple(bound for bound in series if bound <= max_model_len)
    return {
        "request_prompt_tokens": lengths,
        "request_generation_tokens": lengths,
        "iteration_tokens_total": _STEP_TOKENS,
        "request_max_num_generation_tokens": lengths,
        "request_params_n": (1, 2, 5, 10, 20),
        "request_params_max_tokens": lengths,
        "time_to_first_token_seconds": _LATENCIES,
        "inter_token_latency_seconds": _TOKEN_LATENCIES,
        "request_time_per_output_token_seconds": _TOKEN_LATENCIES,
        "e2e_request_latency_seconds": _DURATIONS,
        "request_queue_time_seconds": _DURATIONS,
        "request_inference_time_seconds": _DURATIONS,
        "request_prefill_time_seconds": _DURATIONS,
        "request_decode_time_seconds": _DURATIONS,
        "request_num_preemptions": (1, 2, 3, 4, 5, 10, 20),
        "request_prefill_kv_computed_tokens": lengths,
    }


_RESIDENCY_BOUNDS: dict[str, Sequence[float]] = {
    "kv_block_lifetime_seconds": _RESIDENCY,
    "kv_block_idle_before_evict_seconds": _RESIDENCY,
    "kv_block_reuse_gap_seconds": _RESIDENCY,
}
"""The histograms that there are with kv_cache_metrics only, with their bounds."""


def cache_config_info(config: VllmConfig) -> dict[str, str]:
    """Return the KV cache's settings and size as labels, with those of vLLM's labels that apply."""
    cache = config.cache_config
    num_tokens = (cache.num_gpu_blocks - 1) * cache.block_size  # block 0 is padding's
    info = {
        "block_size": cache.block_size,
        "cache_dtype": cache.cache_dtype,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "kv_cache_max_concurrency": num_tokens / config.model_config.max_model_len,
        "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
        "kv_cache_size_tokens": num_tokens,
        "num_gpu_blocks": cache.num_gpu_blocks,
        "num_gpu_blocks_override": cache.num_gpu_blocks_override,
        "prefix_caching_hash_algo": "sha256",
    }
    return {name: str(value) for name, value in info.items()}


class CoreCounts(NamedTuple):
    """The counters of one core since its start; a sleep may end the core and its counts."""

    preemptions: int
    prefix_requests: int
    prefix_queries: int
    prefix_hits: int
    compiled: int
    speculation: SpeculationStats | None
    tiers: TiersStats | None


class EngineMetrics:
    """Holds all counts and times of one replica; times are in seconds."""

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        stats: SchedulerStats,
        cache_info: Mapping[str, str] | None = None,
        *,
        engine_index: int = 0,
        has_residency: bool = False,
    ) -> None:
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.media_counts: tuple[int, int] = (0, 0)
        """How often processed images and videos were looked up, and found."""
        self.stats = stats
        """The scheduler's counts after the last step."""
        self.num_deferred = 0
        """The number of requests that wait for a grammar."""
        self.num_compiled = 0
        """The number of programs compiled, those found on disk not counted."""
        self._of_past_cores = CoreCounts(0, 0, 0, 0, 0, None, None)
        self.is_warm, self.sleep_level = False, 0
        """Whether every program is compiled, and at which level the engine sleeps, if it does."""
        engine = {"engine": str(engine_index)}
        self._labels = {"model_name": model_name, **engine}
        self._cache_info = {**(cache_info or {}), **engine}
        self._num_step_tokens = 0
        self._finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
        bounds = _histogram_bounds(max_model_len) | (_RESIDENCY_BOUNDS if has_residency else {})
        self._histograms = {name: _Distribution(bounds) for name, bounds in bounds.items()}

    @property
    def num_waiting(self) -> int:
        """Count the requests that wait for room or for a grammar."""
        return self.stats.num_waiting_reqs + self.num_deferred

    def on_step(self, stats: SchedulerStats, num_new_tokens: int, num_deferred: int = 0) -> None:
        """Count a step of the core, after its first and next tokens; `num_deferred` requests wait for a grammar."""
        self.generation_tokens += num_new_tokens
        # As in vLLM, a prompt's tokens count in the step that ends it.
        self._num_step_tokens += num_new_tokens
        if self._num_step_tokens:
            self._observe("iteration_tokens_total", self._num_step_tokens)
        self._num_step_tokens = 0
        if stats.num_steps < self.stats.num_steps:
            self.on_new_core(stats)
        self.stats, self.num_deferred = stats, num_deferred

    def on_programs(self, num_compiled: int, *, is_warm: bool, sleep_level: int = 0) -> None:
        """Take in how many programs the present core has compiled, whether that is all of them, and the level of
        `sleep`, 0 if it is awake.
        """
        self.num_compiled, self.is_warm, self.sleep_level = num_compiled, is_warm, sleep_level

    def on_new_core(self, stats: SchedulerStats) -> None:
        """Go on counting with a core that begins at nothing, after a sleep or in place of one that has failed."""
        self._of_past_cores = self.core_counts()
        self.stats, self.num_deferred, self.num_compiled = stats, 0, 0

    def on_evictions(self, evictions: Sequence[BlockEviction]) -> None:
        """Count stays of content in KV blocks that have ended; there are some with kv_cache_metrics only."""
        for eviction in evictions:
            self._observe("kv_block_lifetime_seconds", eviction.lifetime)
            self._observe("kv_block_idle_before_evict_seconds", eviction.idle)
            for gap in eviction.reuse_gaps:
                self._observe("kv_block_reuse_gap_seconds", gap)

    def on_first_token(self, latency: float, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count a sequence whose prompt is done."""
        self.prompt_tokens += num_prompt_tokens
        self.prompt_tokens_cached += num_cached_tokens
        self._num_step_tokens += num_prompt_tokens - num_cached_tokens
        self._observe("time_to_first_token_seconds", latency)

    def on_next_tokens(self, latency: float, num_sequences: int) -> None:
        """Count the tokens after their first that a number of sequences have got in a step."""
        self._histograms["inter_token_latency_seconds"].observe(latency, num_sequences)

    def on_finished_sequence(
        self,
        reason: str,
        stats: RequestStateStats,
        now: float,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        max_tokens: int,
    ) -> None:
        """Count the end of one output and where its time went; `now` is time.time()."""
        self._finished[reason] += 1
        num_tokens = stats.num_generation_tokens
        self._observe("e2e_request_latency_seconds", now - stats.arrival_time)
        self._observe("request_num_preemptions", stats.num_preemptions)
        self._observe("request_prefill_kv_computed_tokens", num_prompt_tokens - num_cached_tokens)
        self._observe("request_prompt_tokens", num_prompt_tokens)
        self._observe("request_generation_tokens", num_tokens)
        self._observe("request_params_max_tokens", max_tokens)
        if not stats.first_token_ts:
            return  # it ended before there was anything to time
        decode = stats.last_token_ts - stats.first_token_ts
        self._observe("request_queue_time_seconds", stats.scheduled_ts - stats.queued_ts)
        self._observe("request_prefill_time_seconds", stats.first_token_ts - stats.scheduled_ts)
        self._observe("request_inference_time_seconds", stats.last_token_ts - stats.scheduled_ts)
        if num_tokens:  # a pooled request is not decoded
            self._observe("request_decode_time_seconds", decode)
            self._observe("request_time_per_output_token_seconds", decode / max(1, num_tokens - 1))

    def on_dropped_sequences(self, num_sequences: int) -> None:
        """Count the ends of outputs that cannot be made; nothing else about them is known."""
        self._finished["error"] += num_sequences

    def on_finished_request(self, n: int, most_tokens: int) -> None:
        """Count the end of a whole request with n outputs; the longest one has `most_tokens` tokens."""
        self._observe("request_params_n", n)
        self._observe("request_max_num_generation_tokens", most_tokens)

    def snapshot(self) -> list[Metric]:
        """Return the present values of all metrics."""
        histograms = [each.snapshot(PREFIX + name, dict(self._labels)) for name, each in self._histograms.items()]
        info = Gauge(PREFIX + "cache_config_info", dict(self._cache_info), 1.0)
        return [*self._gauges(), *self._counters(), *self._drafts(), *self._tiers(), *histograms, info]

    def _gauges(self) -> list[Metric]:
        stats = self.stats
        return [
            self._gauge("num_requests_running", stats.num_running_reqs),
            self._gauge("num_requests_waiting", self.num_waiting),
            self._gauge("num_requests_waiting_by_reason", stats.num_waiting_reqs, reason="capacity"),
            self._gauge("num_requests_waiting_by_reason", self.num_deferred, reason="deferred"),
            self._gauge("engine_sleep_state", self.sleep_level == 0, sleep_state="awake"),
            self._gauge("engine_sleep_state", self.sleep_level == 1, sleep_state="weights_offloaded"),
            self._gauge("engine_sleep_state", self.sleep_level == 2, sleep_state="discard_all"),
            self._gauge("engine_is_warm", self.is_warm),
            self._gauge("kv_cache_usage_perc", self.kv_usage()),
        ]

    def core_counts(self) -> CoreCounts:
        """Return the counts of this core and those before it."""
        past, stats = self._of_past_cores, self.stats
        return CoreCounts(
            past.preemptions + stats.num_preemptions,
            past.prefix_requests + stats.prefix_cache_requests,
            past.prefix_queries + stats.prefix_cache_queries,
            past.prefix_hits + stats.prefix_cache_hits,
            past.compiled + self.num_compiled,
            stats.speculation if past.speculation is None else past.speculation.plus(stats.speculation),
            stats.tiers if past.tiers is None else past.tiers.plus(stats.tiers),
        )

    def _counters(self) -> list[Metric]:
        counts, cached = self.core_counts(), self.prompt_tokens_cached
        tiers = counts.tiers or TiersStats()
        sources = {
            "device": counts.prefix_hits,
            "host": tiers.host.num_hit_tokens,
            "disk": tiers.disk.num_hit_tokens,
            # No other machine's KV cache is asked.
            "p2p": 0,
            "external_unspecified": 0,
        }
        return [
            self._counter("prefix_cache_queries", counts.prefix_queries),
            self._counter("prefix_cache_hits", counts.prefix_hits),
            self._counter("external_prefix_cache_queries", tiers.num_queried_tokens),
            self._counter("external_prefix_cache_hits", sources["host"] + sources["disk"]),
            self._counter("mm_cache_queries", self.media_counts[0]),
            self._counter("mm_cache_hits", self.media_counts[1]),
            self._counter("num_preemptions", counts.preemptions),
            self._counter("programs_compiled", counts.compiled),
            self._counter("prompt_tokens", self.prompt_tokens),
            self._counter("prompt_tokens_by_source", self.prompt_tokens - cached, source="local_compute"),
            self._counter("prompt_tokens_by_source", cached, source="local_cache_hit"),
            self._counter("prompt_tokens_by_source", 0, source="external_kv_transfer"),
            self._counter("prompt_tokens_cached", cached),
            *(self._counter("prompt_tokens_cached_by_source", n, source=source) for source, n in sources.items()),
            self._counter("generation_tokens", self.generation_tokens),
            *(self._counter("request_success", n, finished_reason=reason) for reason, n in self._finished.items()),
        ]

    def _drafts(self) -> list[Metric]:
        """Return the counts of drafts, in an engine that makes any."""
        counts = self.core_counts().speculation
        if counts is None:
            return []
        by_position = counts.num_accepted_tokens_per_pos
        return [
            self._counter("spec_decode_num_drafts", counts.num_drafts),
            self._counter("spec_decode_num_draft_tokens", counts.num_draft_tokens),
            self._counter("spec_decode_num_accepted_tokens", counts.num_accepted_tokens),
            Vector(PREFIX + "spec_decode_num_accepted_tokens_per_pos", dict(self._labels), list(by_position)),
        ]

    def _tiers(self) -> list[Metric]:
        """Return what the tiers of the KV cache below the devices hold and did, in an engine that has any."""
        counts, metrics = self.core_counts().tiers, list[Metric]()
        if counts is None:
            return metrics
        for tier, stats in (("host", counts.host), ("disk", counts.disk)):
            metrics += [
                self._gauge("kv_tier_blocks", stats.num_blocks, tier=tier),
                self._gauge("kv_tier_bytes", stats.num_bytes, tier=tier),
                self._counter("kv_tier_fetched_blocks", stats.num_fetched_blocks, tier=tier),
                self._counter("kv_tier_evicted_blocks", stats.num_evicted_blocks, tier=tier),
            ]
        ends = {"done": counts.num_fetches, "failed": counts.num_failed_fetches, "refused": counts.num_refused_fetches}
        metrics += [self._counter("kv_tier_fetches", number, outcome=outcome) for outcome, number in ends.items()]
        return [*metrics, self._counter("kv_tier_broken_files", counts.num_broken_files)]

    def kv_usage(self) -> float:
        """Return the share of the KV blocks in use, in [0, 1]."""
        return self.stats.num_blocks_in_use / max(1, self.stats.num_blocks - 1)  # block 0 is padding's

    def _gauge(self, name: str, value: float, **labels: str) -> Gauge:
        return Gauge(PREFIX + name, self._labels | labels, float(value))

    def _counter(self, name: str, value: int, **labels: str) -> Counter:
        return Counter(PREFIX + name, self._labels | labels, value)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)
