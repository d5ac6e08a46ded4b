"""Draw figures as charts with matplotlib: pip install -e '.[benchmark]'."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.compare import median
from peers.report import METRICS, OURS, REFERENCE, medians, number
from peers.worker import BenchmarkError

OUR_COLOUR, OTHER_COLOUR, REFERENCE_COLOUR = "#1f77b4", "#b0b0b0", "#d62728"
COMPARED = ("offline_output", "stream", "first_token_ms", "cold_s", "warm_s", "peak_gib")
GROWTH = {
    "batch": {"step_ms": "decode step, ms", "output_tokens_per_s": "output tokens/s"},
    "context": {"step_ms": "decode step, ms", "prefill_ms": "prompt, ms"},
    "prompts": {"s": "all of them, s", "peak_gib": "peak memory, GiB"},
    "depth": {"step_ms": "decode step of 8, ms", "cold_s": "start with empty caches, s"},
    "width": {"step_ms": "decode step of 8, ms", "cold_s": "start with empty caches, s"},
}
"""The figures of each chart of the sweep."""


def require_matplotlib() -> None:
    """Raise BenchmarkError, with the command that installs it, if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchmarkError("the charts need matplotlib: pip install -e '.[benchmark]' (--quick draws none)")


def draw_comparison(report: Mapping[str, Any], path: Path) -> None:
    """Draw a panel of bars per metric, a bar per contestant, the reference speed as a line."""
    figures, speeds = medians(report["contestants"]), median(report["reference_speed_rounds"])
    labels = {metric.key: metric.label for metric in METRICS}
    figure, axes = _panels(len(COMPARED))
    for axis, key in zip(axes, COMPARED, strict=True):
        names = [name for name in figures if key in figures[name]]
        bars = axis.barh(
            [report["contestants"][name]["label"] for name in names],
            [figures[name][key] for name in names],
            color=[OUR_COLOUR if name == OURS else OTHER_COLOUR for name in names],
        )
        axis.bar_label(bars, fmt=number, padding=3)
        axis.invert_yaxis()
        if key in speeds:
            axis.axvline(speeds[key], color=REFERENCE_COLOUR, linestyle="--", label=REFERENCE)
            axis.legend(fontsize="small")
        axis.margins(x=0.15)
        axis.set_title(labels[key])
    _save(figure, path, report)


def draw_sweep(report: Mapping[str, Any], path: Path) -> None:
    """Draw two lines per chart of the sweep, on logarithmic axes."""
    figure, axes = _panels(len(GROWTH))
    for axis, (name, labels) in zip(axes, GROWTH.items(), strict=True):
        rows: Sequence[Mapping[str, float]] = report["sweep"][name]
        values = [row[name] for row in rows]
        for key, label in labels.items():
            axis.plot(values, [row[key] for row in rows], marker="o", label=label)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xticks(values, [f"{value:,}" for value in values])
        axis.minorticks_off()
        axis.set_title(name)
        axis.legend(fontsize="small")
        axis.grid(visible=True, alpha=0.3)
    _save(figure, path, report)


def draw_workloads(report: Mapping[str, Any], path: Path) -> None:
    """Draw the seconds of each workload without caching and with it."""
    figure, [axis] = _panels(1)
    rows = report["workloads"]
    places = range(len(rows))
    for offset, key, colour, label in (
        (-0.2, "off_s", OTHER_COLOUR, "without prefix caching"),
        (0.2, "on_s", OUR_COLOUR, "with prefix caching"),
    ):
        bars = axis.barh(
            [place + offset for place in places], [row[key] for row in rows.values()], 0.4, color=colour, label=label
        )
        axis.bar_label(bars, fmt=number, padding=3)
    axis.set_yticks(places, list(rows))
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.set_title("seconds")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    _save(figure, path, report)


def _panels(num: int) -> tuple[Any, list[Any]]:
    """Return a figure with a number of panels, two in a row."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    columns = min(num, 2)
    rows = -(-num // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(7 * columns, 2.6 * rows + 0.6), squeeze=False, layout="constrained"
    )
    panels = list(axes.flat)
    for spare in panels[num:]:
        spare.remove()
    return figure, panels[:num]


def _save(figure: Any, path: Path, report: Mapping[str, Any]) -> None:
    machine, settings = report["machine"], report["settings"]
    figure.suptitle(
        f"{settings['model']}, {settings['dtype']}, {machine['cores']} cores of {machine['cpu']}, {report['date']}"
    )
    figure.savefig(path, dpi=110)
