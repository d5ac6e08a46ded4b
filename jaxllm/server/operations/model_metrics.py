"""Export where the models of a server are, and their loads, to Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jaxllm.server.models.entry import State
from jaxllm.server.models.registry import ServedModels

_LABEL = "model_name"


class ModelCollector(Collector):
    """Collects the states and loads of the models of a server that has several."""

    def __init__(self, models: ServedModels[Any], prefix: str) -> None:
        self._models, self._prefix = models, prefix

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each name."""
        states = GaugeMetricFamily(
            f"{self._prefix}model_state", "1 for the state that a model is in.", labels=[_LABEL, "state"]
        )
        loads = CounterMetricFamily(f"{self._prefix}model_loads", "How often a model was loaded.", labels=[_LABEL])
        failures = CounterMetricFamily(
            f"{self._prefix}model_failures", "How often a load failed, or an engine ended by itself.", labels=[_LABEL]
        )
        seconds = GaugeMetricFamily(
            f"{self._prefix}model_load_seconds", "The time that a model's last load took.", labels=[_LABEL]
        )
        waiting = GaugeMetricFamily(
            f"{self._prefix}num_requests_waiting_for_model", "Requests that wait for their model.", labels=[_LABEL]
        )
        for entry in self._models.entries:
            for state in State:
                states.add_metric([entry.name, state.value], float(entry.state is state))
            loads.add_metric([entry.name], entry.num_loads)
            failures.add_metric([entry.name], entry.num_failures)
            if entry.load_seconds is not None:
                seconds.add_metric([entry.name], entry.load_seconds)
            waiting.add_metric([entry.name], entry.num_waiting)
        yield from (states, loads, failures, seconds, waiting)
