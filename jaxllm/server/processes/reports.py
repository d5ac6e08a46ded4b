"""Add up the metrics of several front ends: each reports its own, and any of them shows the sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from jaxllm.engine.front.metrics import PREFIX

CORE_METRICS = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "engine_is_warm",
        "engine_sleep_state",
        "programs_compiled",
        "kv_cache_usage_perc",
        "cache_config_info",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "external_prefix_cache_queries",
        "external_prefix_cache_hits",
        "num_preemptions",
        "prompt_tokens_cached_by_source",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "kv_tier_blocks",
        "kv_tier_bytes",
        "kv_tier_fetched_blocks",
        "kv_tier_evicted_blocks",
        "kv_tier_fetches",
        "kv_tier_broken_files",
        "iteration_tokens",
        "kv_block_lifetime_seconds",
        "kv_block_idle_before_evict_seconds",
        "kv_block_reuse_gap_seconds",
    }
)
"""The metrics of the cores and their steps, without prefix and "_total": the parent of the front ends has them."""
_OF_PROCESS = ("process_", "python_")
"""What the names of a process's own metrics begin with: they are shown for each process, and not added up."""


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A value of a metric."""

    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, frozen=True, array_like=True):
    """A metric with its values, as Prometheus knows it."""

    name: str
    help: str
    kind: str
    samples: list[Sample]


type Report = list[Family]
"""The metrics of one process."""


def is_of_core(name: str, prefix: str = PREFIX) -> bool:
    """Return whether a metric is the cores', by its name with a prefix."""
    return name.removeprefix(prefix).removesuffix("_total") in CORE_METRICS


def read(collector: Collector, process: str) -> Report:
    """Return the metrics of a collector; those of the process itself get its name as the label `api_server`."""
    report: Report = []
    for family in collector.collect():
        more = {"api_server": process} if family.name.startswith(_OF_PROCESS) else {}
        samples = [Sample(each.name, {**each.labels, **more}, float(each.value)) for each in family.samples]
        report.append(Family(family.name, family.documentation, family.type, samples))
    return report


def totals(report: Report) -> Report:
    """Return what stays of the metrics of a process that has ended: its counts."""
    return [each for each in report if _is_added(each)]


def merged(reports: Iterable[Report]) -> Report:
    """Add metrics up: counts of the same labels are added, and of other values the last one counts."""
    families: dict[str, Family] = {}
    values: dict[str, dict[tuple[object, ...], Sample]] = {}
    for report in reports:
        for family in report:
            families.setdefault(family.name, family)
            samples = values.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, *sorted(sample.labels.items()))
                earlier = samples.get(key)
                samples[key] = sample if earlier is None or not _is_added(family) else _sum(earlier, sample)
    return [
        msgspec.structs.replace(family, samples=_shown(family, list(values[name].values())))
        for name, family in families.items()
    ]


class Reported(Collector):
    """Shows metrics that have been added up."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each name."""
        for family in self._report:
            metric = Metric(family.name, family.help, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric


def registry_of(report: Report) -> CollectorRegistry:
    """Return a registry that shows these metrics."""
    registry = CollectorRegistry()
    registry.register(Reported(report))
    return registry


def _is_added(family: Family) -> bool:
    return family.kind in ("counter", "histogram") and not family.name.startswith(_OF_PROCESS)


def _sum(one: Sample, other: Sample) -> Sample:
    if one.name.endswith("_created"):
        return msgspec.structs.replace(one, value=min(one.value, other.value))
    return msgspec.structs.replace(one, value=one.value + other.value)


def _shown(family: Family, samples: list[Sample]) -> list[Sample]:
    """Make one of the lists of adapters of several front ends; return other samples as they are."""
    if not family.name.endswith("lora_requests_info") or not samples:
        return samples
    lists = {
        name: {adapter for each in samples for adapter in each.labels[name].split(",") if adapter}
        for name in ("waiting_lora_adapters", "running_lora_adapters")
    }
    labels = samples[0].labels | {name: ",".join(sorted(adapters)) for name, adapters in lists.items()}
    return [Sample(samples[0].name, labels, max(each.value for each in samples))]
