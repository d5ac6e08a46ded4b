"""Query the panels of a Grafana dashboard from Prometheus, and draw them with matplotlib."""

from __future__ import annotations

import importlib
import json
import re
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#17becf", "#7f7f7f")
UNITS = {"s": "s", "reqps": "per second", "percentunit": "%", "bytes": "MiB", "short": ""}
SCALES = {"percentunit": 100.0, "bytes": 1 / 2**20}
INCHES_WIDE, INCHES_HIGH = 0.92, 0.33
"""The size of a cell of the dashboard's grid, which has 24 columns."""


class Line(NamedTuple):
    """One line of a panel."""

    label: str
    times: list[float]
    values: list[float]


class Span(NamedTuple):
    """The drawn range of time, in seconds since 1970."""

    start: float
    end: float
    step: float
    rate_interval: str
    """Grafana's $__rate_interval: four times the interval between two scrapes."""


def read_panels(path: Path) -> list[dict[str, Any]]:
    """Return a dashboard's panels, its rows among them."""
    return json.loads(path.read_text())["panels"]


def ask(prometheus: str, panel: Mapping[str, Any], span: Span) -> list[Line]:
    """Return a panel's lines: the values of its expressions, with the variables at "All"."""
    lines: list[Line] = []
    for target in panel["targets"]:
        expression = target["expr"].replace("$__rate_interval", span.rate_interval)
        query = {"query": re.sub(r"\$\w+", ".*", expression)} | {
            name: str(getattr(span, name)) for name in ("start", "end", "step")
        }
        url = f"{prometheus}/api/v1/query_range?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            results = json.load(answer)["data"]["result"]
        for series in results:
            label = target["legendFormat"]
            for name, value in series["metric"].items():
                label = label.replace(f"{{{{{name}}}}}", value)
            times, values = zip(*((when, float(value)) for when, value in series["values"]), strict=True)
            lines.append(Line(label, list(times), list(values)))
    return lines


def draw(panels: Sequence[Mapping[str, Any]], lines: Mapping[int, Sequence[Line]], title: str, path: Path) -> None:
    """Draw the panels where the dashboard has them; `lines` are by the panels' ids. Times are shown in minutes."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    height = max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in panels) + 2
    figure = pyplot.figure(figsize=(24 * INCHES_WIDE, height * INCHES_HIGH))
    figure.text(0.012, 1 - 0.9 / height, title, va="center", fontsize=13)
    start = min(line.times[0] for each in lines.values() for line in each)
    for panel in panels:
        grid = panel["gridPos"]
        top = grid["y"] + 2
        if panel["type"] == "row":
            figure.text(0.012, 1 - (top + 0.5) / height, panel["title"], va="center", fontsize=14, weight="bold")
            continue
        left, bottom = grid["x"] + 1.0, height - top - grid["h"] + 2.0
        axes = figure.add_axes((left / 24, bottom / height, (grid["w"] - 1.4) / 24, (grid["h"] - 3.2) / height))
        _draw_panel(axes, panel, lines[panel["id"]], start)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=72)
    pyplot.close(figure)


def _draw_panel(axes: Any, panel: Mapping[str, Any], lines: Sequence[Line], start: float) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    scale = SCALES.get(unit, 1.0)
    for line, colour in zip(lines, COLOURS * (1 + len(lines) // len(COLOURS)), strict=False):
        minutes = [(when - start) / 60 for when in line.times]
        axes.plot(minutes, [value * scale for value in line.values], color=colour, linewidth=1.6, label=line.label)
    axes.set_ylim(bottom=0)
    if unit == "percentunit":
        axes.set_ylim(0, 100)
    elif axes.get_ylim()[1] < 1e-3 or not lines:
        axes.set_ylim(0, 1)
    axes.margins(x=0)
    axes.set_title(panel["title"] + (f", {UNITS[unit]}" if unit in ("s", "percentunit", "bytes") else ""), fontsize=11)
    axes.grid(visible=True, alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if lines:
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), frameon=False, ncols=len(lines))
    else:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", color="#7f7f7f")
