"""The statistics line that an engine logs about every ten seconds."""

from __future__ import annotations

import logging

from jaxllm.engine.metrics import EngineMetrics

logger = logging.getLogger("jaxllm")


class StatsLogger:
    """Log a line about every `interval` seconds while steps are done."""

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
            metrics.stats.num_running_reqs,
            metrics.num_waiting,
            100 * metrics.kv_usage(),
            100 * metrics.hit_rate(),
        )
