"""Planted faults are found in child processes, and the rest is checked all the same."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.selfcheck import process
from jaxllm.selfcheck.process import Limits, examine
from jaxllm.selfcheck.report import Report, Verdict, render
from jaxllm.utils import child_process
from tests.selfcheck.support import LIMITS, make_model, plant

pytestmark = pytest.mark.programs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


def statuses(report: Report, op: str) -> list[str]:
    return [verdict.status for verdict in report.verdicts if verdict.op == op]


def test_an_endless_loop_is_ended_and_wrong_numbers_are_found(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, paged_attention="endless", linear="wrong")
    told: list[Any] = []
    report = examine({"model": model}, limits=LIMITS, tell=told.append)
    assert statuses(report, "paged_attention") == ["hung"], "the op is not tried again"
    assert set(statuses(report, "linear")) == {"wrong"}
    assert (report.complete, report.is_right, report.platform) == (True, False, "cpu")
    assert told == report.verdicts
    reasons = report.disproved()
    assert reasons.keys() == {"paged_attention", "linear"}
    assert reasons["paged_attention"].startswith("they did not end within 5 s on this cpu")
    assert reasons["linear"].startswith("they gave wrong results on this cpu")
    assert "hung" in render(report.verdicts[0])
    assert "did not end" in render(report.verdicts[0])


def test_an_abort_and_an_endless_compilation_are_told_apart(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, paged_attention="abort", linear="slow_to_compile")
    report = examine({"model": model}, limits=LIMITS._replace(compile=20.0))
    assert [(each.op, each.status, each.reason) for each in report.verdicts] == [
        ("paged_attention", "crashed", "ended the process with SIGABRT"),
        ("linear", "hung", "did not compile within 20 s"),
    ]
    assert report.complete


def test_a_device_that_is_gone_is_named_with_its_cause(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_MODULE", "tests.selfcheck.nothing")
    first = examine({"model": model}, limits=LIMITS)
    assert first.problem == "the process that checks kernels ended with status 1"
    assert not first.complete
    read = process._read

    def crash_first(request: Any, limits: Limits) -> Any:
        if request.first == 0:
            yield process.Opened("gpu", "Made-up 9000")
            yield process.Began(0, "paged_attention", "gpu", "", "decodes", "run")
            raise process._FaultError("hung", "did not end within 20 s")
        yield from read(request, limits)

    monkeypatch.setattr(process, "_read", crash_first)
    report = examine({"model": model}, limits=LIMITS)
    assert "does not answer after paged_attention did not end within 20 s" in report.problem
    assert list(report.disproved()) == ["paged_attention"]


LINGERING = """
import os, sys, time
request = sys.stdin.read()
print('{"type":"Opened","platform":"gpu","device":"Made-up 9000"}')
print(REST)
sys.stdout.flush()
os.close(1)
time.sleep(60)
"""
JUDGED = {"type": "Judged", "index": 0, "verdict": {"op": "linear", "implementation": "gpu", "shape": "", "step": "",
          "status": "failed"}}  # fmt: skip


@pytest.mark.parametrize(("last", "problem"), [({"type": "Done"}, ""), (JUDGED, "did not leave its device")])
def test_a_process_that_does_not_end_holds_nobody_up(
    last: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "END_SECONDS", 0.5)
    command = [sys.executable, "-c", LINGERING.replace("REST", repr(json.dumps(last)))]
    monkeypatch.setattr(child_process, "python_command", lambda _: command)
    report = examine({"model": "m"}, limits=LIMITS)
    assert (report.complete, problem in report.problem) == (not problem, True)


def test_refused_arguments_are_raised(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_read", lambda *_: iter([process.Mistake("no such thing", "dtype")]))
    with pytest.raises(VLLMValidationError, match="no such thing") as error:
        examine({"model": model})
    assert error.value.parameter == "dtype"


def test_a_child_is_told_what_not_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Any] = []

    def read(request: Any, limits: Limits) -> Any:
        requests.append(request)
        yield process.Done()

    monkeypatch.setattr(process, "_read", read)
    hung = Verdict(op="linear", implementation="gpu", shape="", step="", status="hung")
    report = examine({"model": "m"}, without=[hung], proven=("causal_conv",), checks_cpu=False)
    [request] = requests
    assert (set(request.without), request.checks_cpu) == ({"linear", "causal_conv"}, False)
    assert report.verdicts == [hung]
