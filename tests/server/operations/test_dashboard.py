"""The Grafana dashboard asks for metrics that there are, by labels that they have, in PromQL that Prometheus reads."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.sources import ROOT
from tests.async_engine.support import mock_llm, tiny_args
from tests.server.operations.test_metrics import complete, families
from tests.server.support import served

DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs/grafana.json").read_text())
PANELS: list[dict[str, Any]] = [each for each in DASHBOARD["panels"] if each["type"] != "row"]
EXPRESSIONS: list[str] = [target["expr"] for panel in PANELS for target in panel["targets"]]
SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}]*)\}")
MATCHER = re.compile(r'([a-zA-Z_]\w*)(=~|!~|!=|=)"[^"]*"')
SCRAPED = {"job", "instance"}
"""Labels that Prometheus adds."""


def test_it_can_be_imported() -> None:
    assert DASHBOARD["schemaVersion"] >= 39
    ids = [each["id"] for each in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for one, other in itertools.combinations((each["gridPos"] for each in DASHBOARD["panels"]), 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, "two panels overlap"
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0


def test_every_variable_is_defined() -> None:
    defined = {each["name"] for each in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__rate_interval", "__all"}
    assert used == defined == {"datasource", "job", "model_name"}


def test_every_metric_and_label_is_one_of_ours(tokenizer: str) -> None:
    labels: dict[str, set[str]] = {}
    with mock_llm(tiny_args(tokenizer), in_process=True) as llm, served(llm) as server:
        complete(server, 3)
        for sample in (each for family in families(server).values() for each in family.samples):
            labels.setdefault(sample.name, set(SCRAPED)).update(sample.labels)
    variables = [each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    for expression in (*EXPRESSIONS, *variables):
        selectors = SELECTOR.findall(expression)
        known: set[str] = set()
        for name, matchers in selectors:
            assert name in labels, f"there is no metric {name}"
            assert {each[0] for each in MATCHER.findall(matchers)} <= labels[name], expression
            known |= labels[name]
        grouped = {word.strip() for words in re.findall(r"\bby \(([^)]*)\)", expression) for word in words.split(",")}
        assert grouped <= known, expression
    shown = {label for panel in PANELS for each in panel["targets"] for label in re.findall(r"{{(\w+)}}", str(each))}
    assert shown <= {"finished_reason", "handler", "status", "reason"}


def test_every_expression_is_promql(tmp_path: Path) -> None:
    """Prometheus' own parser reads them where it is installed; everywhere they are made of selectors and brackets."""
    plain = [each.replace("$__rate_interval", "1m").replace("$", "") for each in EXPRESSIONS]
    for expression in plain:
        rest = MATCHER.sub("", expression)
        assert SELECTOR.findall(expression)
        assert all(rest.count(opening) == rest.count(closing) for opening, closing in ("()", "{}", "[]"))
    if shutil.which("promtool") is None:
        pytest.skip("promtool, of Debian's prometheus, is not installed")
    rules = [{"record": f"panel:{i}", "expr": each} for i, each in enumerate(plain)]
    path = tmp_path / "rules.yml"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(plain)} rules found" in done.stdout
