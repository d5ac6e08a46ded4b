"""`scripts/make.py PROGRAM --help` and its siblings tell what a program does, and run nothing."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from lib import programs

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("folder", "program", "told"),
    [
        ("make", "speed_chart", "usage: "),
        ("check", "pod_templates", "manifest"),
        ("make", "gguf_vocabulary_goldens", "vocabulary.json"),  # it needs packages that may be missing
    ],
)
def test_help_is_told_in_every_environment(folder: str, program: str, told: str):
    command = [sys.executable, ROOT / f"scripts/{folder}.py", program, "--help"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert told in done.stdout


def test_help_does_not_hide_that_a_module_of_ours_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "broken.py").write_text('"""A program."""\nimport lib.gone\nif __name__ == "__main__":\n    pass\n')
    monkeypatch.setattr(programs, "find_programs", lambda _: {"broken": tmp_path / "broken.py"})
    monkeypatch.setattr(programs.runpy, "run_module", lambda *_, **__: runpy.run_path(str(tmp_path / "broken.py")))
    monkeypatch.setattr(sys, "argv", ["scripts/bench.py", "broken", "--help"])
    with pytest.raises(ModuleNotFoundError, match=r"lib\.gone"):
        programs.run("bench")
