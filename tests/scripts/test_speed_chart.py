"""The README's chart is the one that scripts/make.py speed_chart draws of the saved figures."""

from __future__ import annotations

import json

from make.speed_chart import CHART, FIGURES, draw


def test_the_chart_shows_the_saved_figures():
    assert CHART.read_text(encoding="utf-8") == draw(json.loads(FIGURES.read_text()))
