"""The statistics line, in vLLM's words, that an engine logs about every ten seconds."""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple

from jaxllm.engine.front.metrics import EngineMetrics

logger = logging.getLogger("jaxllm")


class _Totals(NamedTuple):
    """Totals of the engine's work since its start."""

    prompt_tokens: int
    """Prompt tokens that were computed, not found in the cache."""
    generation_tokens: int
    num_preemptions: int

    @classmethod
    def of(cls, metrics: EngineMetrics) -> _Totals:
        computed = metrics.prompt_tokens - metrics.prompt_tokens_cached
        return cls(computed, metrics.generation_tokens, metrics.core_counts().preemptions)


class _RecentHits:
    """Holds a cache's hits among the last requests, about `max_requests` of them."""

    def __init__(self, max_requests: int = 1000) -> None:
        self._max_requests = max_requests
        self._total = 0, 0, 0
        """Counts of requests, of tokens looked up and of tokens found since the engine's start."""
        self._steps: deque[tuple[int, int, int]] = deque()
        """The same counts for each of the last steps that looked tokens up, oldest first."""

    def observe(self, num_requests: int, num_queries: int, num_hits: int) -> None:
        before = self._total
        self._total = num_requests, num_queries, num_hits
        requests, queries, hits = (now - then for now, then in zip(self._total, before, strict=True))
        if not requests:
            return
        self._steps.append((requests, queries, hits))
        while len(self._steps) > 1 and sum(step[0] for step in self._steps) > self._max_requests:
            self._steps.popleft()

    def forget(self) -> None:
        self._steps.clear()

    @property
    def rate(self) -> float | None:
        """The share of tokens that were found, in [0, 1]; None if none were looked up."""
        queries = sum(step[1] for step in self._steps)
        return sum(step[2] for step in self._steps) / queries if queries else None


class StatsLogger:
    """Log a line about every `interval` seconds while steps are done, and when asked to."""

    def __init__(
        self,
        metrics: EngineMetrics,
        platform: str,
        interval: float = 10.0,
        *,
        is_on: bool = True,
        engine_index: int = 0,
    ) -> None:
        self._metrics = metrics
        self._name = f"Engine {engine_index:03d}"
        self._platform = platform.upper()
        self._interval, self._is_on = interval, is_on
        self._since = self._last_step = float("-inf")
        self._begun = self._latest = _Totals.of(metrics)
        """The totals at `_since`, and after the last step."""
        self._hits, self._tier_hits = _RecentHits(), _RecentHits()
        self._was_busy = False

    def on_step(self, started: float, now: float) -> None:
        """Log when it is time; the step took from `started` to `now`, both time.monotonic()."""
        if not self._is_on:
            return
        if started - self._last_step > self._interval:  # idle time belongs to no average
            self._since, self._begun = started, self._latest
        self._latest, self._last_step = _Totals.of(self._metrics), now
        counts = self._metrics.core_counts()
        self._hits.observe(counts.prefix_requests, counts.prefix_queries, counts.prefix_hits)
        if (tiers := counts.tiers) is not None:
            num_hits = tiers.host.num_hit_tokens + tiers.disk.num_hit_tokens
            self._tier_hits.observe(counts.prefix_requests, tiers.num_queried_tokens, num_hits)
        if now - self._since >= self._interval:
            self.log()

    def log(self) -> None:
        """Log averages from the last line, or from the end of a longer pause, to the last step."""
        if not self._is_on:
            return
        seconds, metrics = self._last_step - self._since, self._metrics
        done = _Totals(*(now - then for now, then in zip(self._latest, self._begun, strict=True)))
        prompt, generation = ((count / seconds if count and seconds > 0 else 0.0) for count in done[:2])
        parts = [
            f"Avg prompt throughput: {prompt:.1f} tokens/s",
            f"Avg generation throughput: {generation:.1f} tokens/s",
            f"Running: {metrics.stats.num_running_reqs} reqs",
            f"Waiting: {metrics.num_waiting} reqs",
        ]
        if metrics.num_deferred:
            parts.append(f"Deferred: {metrics.num_deferred} reqs")
        if done.num_preemptions:
            parts.append(f"Preemptions: {done.num_preemptions}")
        parts.append(f"{self._platform} KV cache usage: {100 * metrics.kv_usage():.1f}%")
        if (rate := self._hits.rate) is not None:
            parts.append(f"Prefix cache hit rate: {100 * rate:.1f}%")
        if (rate := self._tier_hits.rate) is not None:
            parts.append(f"External prefix cache hit rate: {100 * rate:.1f}%")
        is_busy = any(done[:2])
        # One line of zeros after work shows its end; more of them are not worth reading.
        logger.log(logging.INFO if is_busy or self._was_busy else logging.DEBUG, "%s: %s", self._name, ", ".join(parts))
        self._was_busy, self._since, self._begun = is_busy, self._last_step, self._latest

    def stop(self) -> None:
        """Log no more lines."""
        self._is_on = False

    def forget_hits(self) -> None:
        """Begin the hit rates anew: the prefix cache was emptied."""
        self._hits.forget()
        self._tier_hits.forget()
