"""Compute the usual figures from a client's measurements: TTFT, TPOT, ITL and E2EL, throughput, goodput."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxllm.cli.bench.drafts import draft_lines

METRICS: Mapping[str, tuple[str, str]] = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
"""The short and the long name of each latency."""
_WIDTH = 50


@dataclasses.dataclass(slots=True)
class Result:
    """One request as its client measured it; times in seconds."""

    start: float
    """The clock's time when the request was sent."""
    prompt_len: int
    """Tokens of the prompt, counted by the server, or by the data set if the server does not report them."""
    output_len: int = 0
    """Tokens of the output, counted by the server."""
    ttft: float = 0.0
    """Time from `start` to the first event with text."""
    itl: list[float] = dataclasses.field(default_factory=list)
    """Times between the events with text."""
    latency: float = 0.0
    """Time from `start` to the end."""
    text: str = ""
    error: str | None = None
    """The error message; None for a successful request."""

    @property
    def tpot(self) -> float | None:
        """Return the seconds per output token after the first; None if there are none."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else None

    def meets(self, goals: Mapping[str, float]) -> bool:
        """Return whether the request took no longer than `goals`, milliseconds by the names "ttft", "tpot", "e2el"."""
        taken = {"ttft": self.ttft, "tpot": self.tpot or 0.0, "e2el": self.latency}
        return all(taken[name] * 1000 <= most for name, most in goals.items())


@dataclasses.dataclass(frozen=True, slots=True)
class Conditions:
    """The settings of a run that its report shows."""

    request_rate: float
    burstiness: float
    max_concurrency: int | None
    percentiles: Sequence[float] = (99.0,)
    """Percentiles, above 0 and at most 100."""
    metrics: Sequence[str] = tuple(METRICS)
    """The names from METRICS to print; all are in the JSON."""
    goodput: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The longest times of a good request in milliseconds, by "ttft", "tpot" and "e2el"."""


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted values, at least one, interpolated linearly between two neighbours."""
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(results: Sequence[Result], seconds: float, cpu_seconds: float, conditions: Conditions) -> dict[str, Any]:
    """Return the figures of a run of `seconds`, under vLLM's names; latencies in milliseconds."""
    done = [each for each in results if each.error is None]
    seconds = max(seconds, 1e-9)
    num_input, num_output = sum(each.prompt_len for each in done), sum(each.output_len for each in done)
    figures: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(results) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / seconds,
        "request_goodput": None,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        "max_concurrent_requests": _most_at_once(done),
        "client_cpu_seconds": cpu_seconds,
    }
    if conditions.goodput:
        figures["request_goodput"] = sum(each.meets(conditions.goodput) for each in done) / seconds
    values = {
        "ttft": [each.ttft for each in done],
        "tpot": [each.tpot for each in done if each.tpot is not None],
        "itl": [gap for each in done for gap in each.itl],
        "e2el": [each.latency for each in done],
    }
    for name, latencies in values.items():
        figures |= _spread(name, sorted(latencies), conditions.percentiles)
    return figures


def _spread(name: str, ordered: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    milliseconds = [each * 1000 for each in ordered] or [0.0]
    return {
        f"mean_{name}_ms": statistics.fmean(milliseconds),
        f"median_{name}_ms": percentile(milliseconds, 50),
        f"std_{name}_ms": statistics.pstdev(milliseconds),
        **{f"p{percent:g}_{name}_ms": percentile(milliseconds, percent) for percent in percentiles},
    }


def _most_at_once(results: Sequence[Result]) -> int:
    """Return the largest number of concurrent requests."""
    steps = sorted([(each.start, 1) for each in results] + [(each.start + each.latency, -1) for each in results])
    most = count = 0
    for _, step in steps:
        count += step
        most = max(most, count)
    return most


def report(figures: Mapping[str, Any], conditions: Conditions) -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
    yield _line("Successful requests", figures["completed"])
    yield _line("Failed requests", figures["failed"])
    if conditions.max_concurrency is not None:
        yield _line("Maximum request concurrency", conditions.max_concurrency)
    if math.isfinite(conditions.request_rate):
        yield _line("Request rate configured (RPS)", conditions.request_rate)
    yield _line("Benchmark duration (s)", figures["duration"])
    yield _line("Total input tokens", figures["total_input_tokens"])
    yield _line("Total generated tokens", figures["total_output_tokens"])
    yield _line("Request throughput (req/s)", figures["request_throughput"])
    if conditions.goodput:
        yield _line("Request goodput (req/s)", figures["request_goodput"])
    yield _line("Output token throughput (tok/s)", figures["output_throughput"])
    yield _line("Peak concurrent requests", figures["max_concurrent_requests"])
    yield _line("Total Token throughput (tok/s)", figures["total_token_throughput"])
    yield _line("Client CPU time (s)", figures["client_cpu_seconds"])
    for name, (short, long) in METRICS.items():
        if name not in conditions.metrics:
            continue
        yield f"{long:-^{_WIDTH}}"
        yield _line(f"Mean {short} (ms)", figures[f"mean_{name}_ms"])
        yield _line(f"Median {short} (ms)", figures[f"median_{name}_ms"])
        for percent in conditions.percentiles:
            yield _line(f"P{percent:g} {short} (ms)", figures[f"p{percent:g}_{name}_ms"])
    drafts = [_line(label, value) for label, value in draft_lines(figures)]
    if drafts:
        yield f"{'Speculative Decoding':-^{_WIDTH}}"
        yield from drafts
    yield "=" * _WIDTH


def _line(label: str, value: float) -> str:
    return f"{label + ':':<40} {value if isinstance(value, int) else format(value, '.2f'):<10}".rstrip()


def count_errors(results: Sequence[Result]) -> list[tuple[str, int]]:
    """Return the errors of a run with their counts, most frequent first."""
    return Counter(each.error for each in results if each.error is not None).most_common()
