"""`scripts/make.py PROGRAM --help` and its siblings tell what a program does, and run nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
