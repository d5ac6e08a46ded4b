"""`jaxllm selfcheck`: the table, the report as JSON, and the exit statuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from jaxllm.cli import selfcheck
from jaxllm.cli.main import main
from jaxllm.exceptions import VLLMValidationError
from jaxllm.selfcheck.device import Accelerators
from jaxllm.selfcheck.report import Report, Verdict

RIGHT = Verdict(
    op="linear", implementation="gpu", shape="num_outputs 64", step="1 rows", status="right", error=0.001, allowed=0.01
)
WRONG = Verdict(
    op="paged_attention", implementation="gpu", shape="", step="mixed", status="wrong", reason="the pool differs"
)


def answer(monkeypatch: pytest.MonkeyPatch, *verdicts: Verdict, problem: str = "") -> list[Any]:
    """Let the child processes report verdicts on a made-up GPU; return the calls."""
    calls: list[Any] = []

    def examine(engine_args: dict[str, Any], *, driver: str, tell: Any) -> Report:
        calls.append((engine_args, driver))
        for verdict in verdicts:
            tell(verdict)
        facts: dict[str, Any] = {"model": "m", "device": "Made-up 9000", "platform": "gpu", "driver": driver}
        return Report(**facts, complete=not problem, problem=problem, verdicts=list(verdicts))

    monkeypatch.setattr(selfcheck, "examine", examine)
    monkeypatch.setattr(selfcheck, "find_accelerators", lambda: Accelerators(("Made-up 9000",), "1.2.3"))
    return calls


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_verdicts_are_shown_written_and_kept(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = answer(monkeypatch, WRONG, RIGHT)
    file = tmp_path / "report.json"
    assert main(["selfcheck", "a/model", "--block-size", "32", "--json", str(file)]) == 1
    assert calls == [({"model": "a/model", "block_size": 32}, "1.2.3")]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["op", "step", "kernel", "verdict"]
    assert lines[1].split() == ["paged_attention", "mixed", "gpu", "wrong"]
    assert lines[2] == "  the pool differs"
    assert "1.0e-03" in lines[3]
    assert lines[4] == (
        "paged_attention will run in plain XLA: they gave wrong results on this Made-up 9000"
    )  # fmt: skip
    report = json.loads(file.read_text())
    assert (report["device"], report["driver"], len(report["verdicts"])) == ("Made-up 9000", "1.2.3", 2)
    [kept] = (cache / "selfcheck").glob("*.json")
    assert json.loads(kept.read_text()) == report


@pytest.mark.parametrize(
    ("verdicts", "problem", "status", "said"),
    [
        ([RIGHT], "", 0, ""),
        ([], "", 0, "there is no kernel to check"),
        ([], "the process ended", 3, "the process ended"),
    ],
)
def test_exit_statuses(
    verdicts: list[Verdict],
    problem: str,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer(monkeypatch, *verdicts, problem=problem)
    assert main(["selfcheck", "a/model"]) == status
    assert said in "".join(capsys.readouterr())


def test_a_kernel_that_the_user_asks_for_runs_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, WRONG, msgspec.structs.replace(WRONG, op="grouped_matmul"))
    assert main(["selfcheck", "a/model", "--attention-config", '{"backend": "gpu"}']) == 1
    experts, attention = capsys.readouterr().out.splitlines()[-2:]
    assert "paged_attention runs all the same, because attention_config has backend='gpu': they gave" in attention
    assert "grouped_matmul will run in plain XLA" in experts


def test_arguments_are_refused_before_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = answer(monkeypatch, RIGHT)
    assert main(["selfcheck", "a/model", "--no-selfcheck"]) == 2
    assert not calls
    refused = VLLMValidationError("no such thing", parameter="dtype")
    monkeypatch.setattr(selfcheck, "examine", Mock(side_effect=refused))
    assert main(["selfcheck", "a/model"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "Leave --no-selfcheck out" in err
    assert "no such thing" in err


def test_misuse_and_a_report_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, RIGHT)
    assert main(["selfcheck"]) == 2
    assert main(["selfcheck", "a/model", "--json", "/no/such/folder/report.json"]) == 4
    assert "/no/such/folder/report.json" in capsys.readouterr().err
