"""The metrics of a front end: those of each replica, of refused requests, and of adapters in use."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from jaxllm.engine.front.metrics import PREFIX, Counter, EngineMetrics, Gauge, Metric, cache_config_info
from jaxllm.engine.front.stats_log import StatsLogger
from jaxllm.engine.transport.core_client import Programs
from jaxllm.engine.transport.engine_ready import EngineReady


def _no_adapters() -> tuple[list[str], list[str]]:
    return [], []


class FrontMetrics:
    """Keeps one `EngineMetrics` and one `StatsLogger` for each replica, from when it is first heard of."""

    def __init__(self, ready: EngineReady) -> None:
        self._ready = ready
        self._engines: list[EngineMetrics] = []
        self._loggers: list[StatsLogger] = []
        self._is_logging = not ready.vllm_config.observability_config.disable_log_stats
        bounds = ("max_num_queued_reqs", "max_num_queued_tokens", "max_ttft_ms")
        self.rejections: dict[str, int] = dict.fromkeys(bounds, 0)
        """The number of requests that each queue bound has refused."""
        self.media_counts: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Return how often processed images and videos were looked up, and found."""
        self._max_adapters, self._adapters = 0, _no_adapters
        self.of(ready.vllm_config.parallel_config.data_parallel_size - 1)

    def of(self, engine_index: int) -> EngineMetrics:
        """Return the metrics of the replica with a number."""
        while len(self._engines) <= engine_index:
            self._add()
        return self._engines[engine_index]

    def watch_adapters(self, most: int, names: Callable[[], tuple[list[str], list[str]]]) -> None:
        """Report adapters, at most `most` running at a time: `names` returns those of waiting and running requests."""
        self._max_adapters, self._adapters = most, names

    def on_programs(self, programs: Sequence[Programs], *, sleep_level: int = 0) -> None:
        """Take in how far each replica's programs are compiled, and at which level the engine sleeps; 0 is awake."""
        for index, (num_compiled, is_warm) in enumerate(programs):
            self.of(index).on_programs(num_compiled, is_warm=is_warm, sleep_level=sleep_level)

    def on_new_cores(self) -> None:
        """Go on counting with cores that begin at nothing, after a sleep that has ended those before."""
        for metrics in self._engines:
            metrics.on_new_core(self._ready.stats)

    def go_on_from(self, before: FrontMetrics) -> None:
        """Go on counting after the metrics of an engine of the same model, which has ended."""
        past, present = before.media_counts(), self.media_counts
        self.media_counts = lambda: (past[0] + present()[0], past[1] + present()[1])
        for reason, count in before.rejections.items():
            self.rejections[reason] += count
        self._engines, self._loggers = before._engines, before._loggers
        self.on_new_cores()

    def snapshot(self) -> list[Metric]:
        """Return the present values of all metrics."""
        if self._engines:  # the front end has one cache for all replicas
            self._engines[0].media_counts = self.media_counts()
        engines = [metric for each in self._engines for metric in each.snapshot()]
        labels = {"model_name": self._ready.vllm_config.model_config.served_model_name}
        rejections = [
            Counter(PREFIX + "admission_rejections", labels | {"reason": reason}, count)
            for reason, count in self.rejections.items()
        ]
        return [*engines, *rejections, *self._adapters_info()]

    def on_step(self, engine_index: int, started: float, now: float) -> None:
        """Log a line where it is time; the replica's step took from `started` to `now`, both time.monotonic()."""
        self.of(engine_index)
        self._loggers[engine_index].on_step(started, now)

    def log(self) -> None:
        """Log each replica's line, from its last line to its last step."""
        for logger in self._loggers:
            logger.log()

    def stop_logging(self) -> None:
        """Log no lines from now on: another process logs those of all."""
        self._is_logging = False
        for logger in self._loggers:
            logger.stop()

    def forget_hits(self) -> None:
        """Begin the hit rates of the lines anew: the prefix caches were emptied."""
        for logger in self._loggers:
            logger.forget_hits()

    def _add(self) -> None:
        config, index = self._ready.vllm_config, len(self._engines)
        metrics = EngineMetrics(
            config.model_config.served_model_name,
            self._ready.max_model_len,
            self._ready.stats,
            cache_config_info(config),
            engine_index=index,
            has_residency=config.observability_config.kv_cache_metrics,
        )
        self._engines.append(metrics)
        platform = config.device_config.device_type
        self._loggers.append(StatsLogger(metrics, platform, is_on=self._is_logging, engine_index=index))

    def _adapters_info(self) -> list[Metric]:
        """Return which adapters requests have, as labels, with the time, in an engine that takes any."""
        if not self._max_adapters:
            return []
        waiting, running = self._adapters()
        labels = {"max_lora": str(self._max_adapters), "waiting_lora_adapters": ",".join(waiting)}
        labels["running_lora_adapters"] = ",".join(running)
        return [Gauge(PREFIX + "lora_requests_info", labels, time.time())]
