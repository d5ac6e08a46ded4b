"""Draw the README's chart, docs/images/speed.svg, from the figures that scripts/benchmark.py saved."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers.report import METRICS, OURS, medians, number

ROOT = Path(__file__).resolve().parents[2]
FIGURES, CHART = ROOT / "benchmarks/results/comparison_bfloat16.json", ROOT / "docs/images/speed.svg"
SHOWN = ("offline_output", "stream")
CONTESTANTS = ("jaxllm", "vllm", "hf_static", "llamacpp")
LABEL, BAR, LINE = 150, 420, 24  # widths and the height of a line, in pixels


def draw(report: Mapping[str, Any]) -> str:
    """Return an SVG image with bars for each shown metric. Its colours are readable on light and dark pages."""
    figures, contestants, y, parts = medians(report["contestants"]), report["contestants"], 0, []
    for key in SHOWN:
        metric = next(metric for metric in METRICS if metric.key == key)
        names = [name for name in CONTESTANTS if key in figures[name]]
        parts.append(f'<text class="title" x="0" y="{y + 17}">{metric.label}</text>')
        y += LINE
        largest = max(figures[name][key] for name in names)
        for name in names:
            value = figures[name][key]
            width = BAR * value / largest
            colour = "#1f77b4" if name == OURS else "#999999"
            parts += [
                f'<text x="{LABEL - 8}" y="{y + 15}" text-anchor="end">{contestants[name]["label"]}</text>',
                f'<rect x="{LABEL}" y="{y + 3}" width="{width:.0f}" height="{LINE - 7}" fill="{colour}"/>',
                f'<text x="{LABEL + width + 6:.0f}" y="{y + 15}">{number(value)}</text>',
            ]
            y += LINE
        y += LINE // 2
    style = "text{font:13px sans-serif;fill:#777}.title{font-weight:bold}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL + BAR + 60}" height="{y}"><style>{style}</style>'
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def main() -> None:
    """Write the image."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    CHART.write_text(draw(json.loads(FIGURES.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
