"""Turn the figures of a run into the table, the targets and the part of docs/performance.md."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from lib.sheet import align

from peers.compare import median
from peers.worker import BenchmarkError

BEGIN, END = "<!-- benchmark: written by scripts/benchmark.py --readme -->", "<!-- end of benchmark -->"
OURS = "jaxllm"
REFERENCE = "reference speed"
IN_BRACKETS = (
    "In brackets: how many times better jaxllm is. The reference speed is that of a step's matmuls and of reading K "
    "and V, each timed alone beside jaxllm; in brackets, jaxllm's share of it in the median round."
)


@dataclass(frozen=True)
class Metric:
    """One row of the table."""

    key: str
    label: str
    higher_is_better: bool


METRICS = (
    Metric("offline_output", "offline, output tokens/s", True),
    Metric("offline_total", "offline, prompt and output tokens/s", True),
    Metric("stream", "one stream, output tokens/s", True),
    Metric("first_token_ms", "time to first token, ms", False),
    Metric("cold_s", "process start to first token, empty caches, s", False),
    Metric("warm_s", "process start to first token, warm caches, s", False),
    Metric("peak_gib", "peak memory, GiB", False),
)


@dataclass(frozen=True)
class Target:
    """A figure to reach: `bound` times better than a peer, or at most `bound` where no peer is named."""

    metric: str
    bound: float
    peer: str | None = None


TARGETS = (
    Target("offline_output", 1.3, "vllm"),
    Target("offline_output", 12.0, "hf_static"),
    Target("stream", 1.2, "vllm"),
    Target("cold_s", 10.0),
    Target("warm_s", 4.0),
)
"""The targets hold for SmolLM2-135M on two cores."""
TARGETS_DTYPE = "bfloat16"


def medians(contestants: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return each contestant's figures: the median of its rounds; the cold start is measured once."""
    figures = {}
    for name, result in contestants.items():
        figures[name] = median(result["rounds"]) | {"cold_s": result["cold_s"]}
    return figures


def times_better(metric: Metric, ours: float, theirs: float) -> float:
    """Return our advantage as a ratio; less than one if ours is worse."""
    return ours / theirs if metric.higher_is_better else theirs / ours


def judge(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return each target in words, what was measured, and "met", "missed" or "not measured"."""
    if report["settings"]["dtype"] != TARGETS_DTYPE:
        return []
    figures = medians(report["contestants"])
    return [_judge_one(target, figures) for target in TARGETS]


def _judge_one(target: Target, figures: Mapping[str, Mapping[str, float]]) -> tuple[str, str, str]:
    metric = next(metric for metric in METRICS if metric.key == target.metric)
    ours = figures[OURS][target.metric]
    if target.peer is None:
        verdict = "met" if ours <= target.bound else "missed"
        return f"{metric.label}: at most {target.bound:g}", f"{ours:.1f}", verdict
    words = f"{metric.label}: at least {target.bound:g} times {target.peer}"
    if target.peer not in figures:
        return words, "", "not measured"
    ratio = times_better(metric, ours, figures[target.peer][target.metric])
    return words, f"{ratio:.2f}", "met" if ratio >= target.bound else "missed"


def table(report: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the table, heading first: figures, with our advantage or share of the reference in brackets.

    Contestants with other weights have no brackets.
    """
    contestants, speeds = report["contestants"], median(report["reference_speed_rounds"])
    figures = medians(contestants)
    rows = [["", *(result["label"] for result in contestants.values()), REFERENCE]]
    for metric in METRICS:
        ours = figures[OURS][metric.key]
        row = [metric.label]
        for name, result in contestants.items():
            theirs = figures[name].get(metric.key)
            if theirs is None:
                row.append("")
            elif name == OURS or not result["shares_weights"]:
                row.append(number(theirs))
            else:
                row.append(f"{number(theirs)} ({times_better(metric, ours, theirs):.2g}x)")
        speed = speeds.get(metric.key)
        rows.append([*row, f"{number(speed)} ({share(report, metric):.0%})" if speed else ""])
    return rows


def share(report: Mapping[str, Any], metric: Metric) -> float:
    """Return our share of the reference speed, measured in the same round: the median of the rounds."""
    rounds = zip(report["contestants"][OURS]["rounds"], report["reference_speed_rounds"], strict=True)
    return statistics.median(times_better(metric, ours[metric.key], speeds[metric.key]) for ours, speeds in rounds)


def number(value: float) -> str:
    """Return a figure with three digits, or with all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as columns of text, the first to the left and the others to the right."""
    return align(rows, [False, *[True] * (len(rows[0]) - 1)])


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a Markdown table, the first its heading."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "| " + " | ".join("---" for _ in rows[0]) + " |", *lines[1:]])


def summary(report: Mapping[str, Any]) -> str:
    """Return the report as text: table, targets, hardware."""
    lines = [as_text(table(report)), "", IN_BRACKETS, ""]
    lines += [f"{verdict:12}  {words}  {value}".rstrip() for words, value, verdict in judge(report)]
    return "\n".join([*lines, "", hardware_in_words(report)])


def hardware_in_words(report: Mapping[str, Any]) -> str:
    """Return the machine's speeds of multiplying and reading in two sentences."""
    hardware, stream = report["hardware_speeds"], median(report["reference_speed_rounds"])["stream_memory"]
    rates = ", ".join(f"{times['gflop_per_s']:.0f} at {rows}" for rows, times in hardware["matmuls"].items())
    read, copy = hardware["bandwidth"]["read_gb_per_s"], hardware["bandwidth"]["copy_gb_per_s"]
    return (
        f"The model's matmuls alone, as quick as XLA or our own kernel does them: GFLOP/s {rates} rows. "
        f"Memory: {read:.0f} GB/s read, "
        f"{copy:.0f} GB/s copied, which would allow one stream {stream:.0f} tokens/s."
    )


def readme_part(report: Mapping[str, Any], chart: str) -> str:
    """Return the part of the page in Markdown. `chart` is the picture's path from the page."""
    machine, settings, tasks = report["machine"], report["settings"], report["tasks"]
    versions = {name: each for result in report["contestants"].values() for name, each in result["versions"].items()}
    targets = [
        f"{words}: {verdict} {f'({value})' if value else ''}".rstrip() for words, value, verdict in judge(report)
    ]
    above = (
        f"{settings['model']}, {settings['dtype']}, greedy, on {machine['cores']} cores of {machine['cpu']}, "
        f"{report['date']}. Figures are medians of {settings['rounds']} rounds. The outputs of those who read the same "
        f"weights were compared first, and agree. {IN_BRACKETS}"
    )
    below = (
        f"Offline: {tasks['offline_requests']} requests of mixed lengths, {tasks['offline_prompt_tokens']:,} prompt "
        f"and {tasks['offline_output_tokens']:,} output tokens. {hardware_in_words(report)}"
    )
    versions = ", ".join(f"{name} {each}" for name, each in versions.items() if name != "python")
    last = f"Reproduce: `{report['command']}`. Versions: {versions}."
    targets = targets or [f"none in {settings['dtype']}"]
    return "\n\n".join(
        (
            _wrap(above),
            as_markdown(table(report)),
            f"![The same as a chart]({chart})",
            _wrap(below),
            "Targets:\n\n" + "\n".join(f"- {target}" for target in targets),
            _wrap(last),
        )
    )


def _wrap(text: str) -> str:
    return fill(text, 118, break_long_words=False, break_on_hyphens=False)


def put_into(text: str, part: str) -> str:
    """Return a text with the part between its two marks replaced. Raises BenchmarkError without the marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise BenchmarkError(f"the page has no lines {BEGIN!r} and {END!r} to write the table between")
    return f"{before}{BEGIN}\n{part}\n{END}{after}"


def write_readme(readme: Path, report: Mapping[str, Any], chart: str) -> None:
    """Write the report's part into a page."""
    readme.write_text(put_into(readme.read_text(encoding="utf-8"), readme_part(report, chart)), encoding="utf-8")
