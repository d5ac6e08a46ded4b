"""Export metrics to Prometheus: the engine's, read on request, and those of HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Protocol

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.routing import Match, Route

from jaxllm.engine.front import metrics as engine_metrics
from jaxllm.server.http.endpoint import ASGIApp, Receive, Scope, Send
from jaxllm.server.operations.prometheus_help import HELP

_NO_ROUTE = "none"
"""The handler label of unknown paths. A label for each path would let clients fill the memory."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_LOOP_SECONDS = 10.0
_DURATIONS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""The histogram bounds of answer times in seconds."""


class MeasuredEngine(Protocol):
    """An engine, as far as collectors see it: `AsyncLLM` is one."""

    @property
    def core_pids(self) -> Mapping[int, int]:
        """Return the ids of the cores' processes by their replicas' numbers."""
        ...

    def get_metrics(self) -> Iterable[engine_metrics.Metric]:
        """Return counts and times."""
        ...


type Engines = Callable[[], Iterable[tuple[Mapping[str, str], MeasuredEngine]]]
"""A function that returns engines, each with labels that tell its metrics from those of others."""


def _all(engine: MeasuredEngine | Engines) -> Engines:
    return engine if callable(engine) else lambda: [({}, engine)]


class EngineCollector(Collector):
    """Collects an engine's metrics on request, under the server's prefix."""

    def __init__(self, engine: MeasuredEngine | Engines, prefix: str) -> None:
        self._engines, self._prefix = _all(engine), prefix

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each name."""
        families: dict[str, Metric] = {}
        for more, engine in self._engines():
            for metric in engine.get_metrics():
                name = metric.name.removeprefix(engine_metrics.PREFIX)
                labels = {**more, **metric.labels}
                family = families.get(name)
                if family is None:
                    family = families[name] = self._family(name, metric, labels)
                _add(family, metric, list(labels.values()))
        yield from families.values()

    def _family(self, name: str, metric: engine_metrics.Metric, labels: Mapping[str, str]) -> Metric:
        kinds = {
            engine_metrics.Counter: CounterMetricFamily,
            engine_metrics.Gauge: GaugeMetricFamily,
            engine_metrics.Histogram: HistogramMetricFamily,
            engine_metrics.Vector: CounterMetricFamily,
        }
        names = [*labels, *(["position"] if isinstance(metric, engine_metrics.Vector) else [])]
        return kinds[type(metric)](self._shown(name), HELP[name], labels=names)

    def _shown(self, name: str) -> str:
        """Return a metric's name: exactly vLLM's under vLLM's prefix; under another, "_total" is only for counters, as
        Prometheus requires.
        """
        return self._prefix + (name if self._prefix == engine_metrics.PREFIX else name.removesuffix("_total"))


def _add(family: Metric, metric: engine_metrics.Metric, labels: list[str]) -> None:
    match metric, family:
        case engine_metrics.Histogram(), HistogramMetricFamily():
            family.add_metric(labels, [(bound, float(n)) for bound, n in metric.buckets.items()], metric.sum)
        case engine_metrics.Counter(), CounterMetricFamily():
            family.add_metric(labels, metric.value)
        case engine_metrics.Vector(), CounterMetricFamily():
            for position, value in enumerate(metric.values):
                family.add_metric([*labels, str(position)], value)
        case engine_metrics.Gauge(), GaugeMetricFamily():
            family.add_metric(labels, metric.value)
        case _:
            raise TypeError(f"no family is of {type(metric).__name__}")


class HttpMetrics:
    """Counts HTTP answers and their times by route, under vLLM's names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("handler", "method")
        self._requests = Counter(
            "http_requests", "Requests by route, method and class of status.", (*labels, "status"), registry=registry
        )
        self._durations = Histogram(
            "http_request_duration_seconds",
            "Time from a request's headers to the end of its answer.",
            labels,
            buckets=_DURATIONS,
            registry=registry,
        )

    def on_answer(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count an answer."""
        method = method if method in METHODS else "other"
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._durations.labels(handler, method).observe(seconds)


class CountedRequests:
    """ASGI middleware: it counts and times answers."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, routes: Iterable[object]) -> None:
        self._app, self._metrics = app, metrics
        self._routes = [route for route in routes if isinstance(route, Route)]
        self._paths = frozenset(route.path for route in self._routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and record its status; 499 if the client left before the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = 499, time.perf_counter()

        def note(message: dict[str, object]) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(str(message["status"]))
            return send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            seconds = time.perf_counter() - began
            self._metrics.on_answer(self._handler(scope), scope["method"], status, seconds)

    def _handler(self, scope: Scope) -> str:
        """Return the route's path, with the names of its variables."""
        if scope["path"] in self._paths:
            return scope["path"]
        return next((route.path for route in self._routes if route.matches(scope)[0] is not Match.NONE), _NO_ROUTE)


def show(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return a registry's metrics and their content type: OpenMetrics if accepted, else Prometheus' text.

    Names need no escaping: they are letters, digits, underscores and colons. The library would escape them as
    `accept` asks, and would not take vLLM's colon for part of a name in OpenMetrics.
    """
    if choose_encoder(accept)[1].startswith("application/openmetrics-text"):
        return openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8), openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


class CoreProcesses(Collector):
    """Collects the memory and CPU time of an engine's core processes, by replica."""

    def __init__(self, engine: MeasuredEngine | Engines) -> None:
        self._engines = _all(engine)

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each name."""
        families: dict[str, Metric] = {}
        pids = ((more, *each) for more, engine in self._engines() for each in engine.core_pids.items())
        for more, index, pid in pids:
            for metric in ProcessCollector("jaxllm_core", pid=partial(int, pid), registry=None).collect():
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    labels = {**sample.labels, **more, "engine": str(index)}
                    family.add_sample(sample.name, labels, sample.value)
        yield from families.values()


class OnLoop(Collector):
    """Wraps a collector so that it runs on an event loop's thread when another thread asks."""

    def __init__(self, collector: Collector, loop: asyncio.AbstractEventLoop) -> None:
        self._collector, self._loop = collector, loop

    def collect(self) -> Iterator[Metric]:
        """Yield what the other yields."""

        async def collected() -> list[Metric]:
            return list(self._collector.collect())

        yield from asyncio.run_coroutine_threadsafe(collected(), self._loop).result(_LOOP_SECONDS)


def make_registry() -> CollectorRegistry:
    """Return a registry with the process's memory, CPU time, descriptors and garbage collections."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry
