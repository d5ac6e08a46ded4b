"""scripts/lib.sh finds a Python that works, despite shims in PATH, and never clears another environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.scripts

SHIM = "#!/bin/sh\necho 'pyenv: python: command not found' >&2\nexit 127\n"
TOO_OLD = "#!/bin/sh\nexit 1\n"
WITHOUT_VENV = '#!/bin/sh\ncase "$2" in *find_spec*) echo "no $0";; *) echo 3.12;; esac\n'
WORKS = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
BASH = shutil.which("bash") or "bash"


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def find_python(repository: Path, home: Path, *, only: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run find_python with `home`/bin as the whole PATH; `only` replaces the list of candidates."""
    candidates = f"python_candidates() {{ printf '%s\\n' {only}; }}\n" if only else ""
    return subprocess.run(
        [BASH, "-c", f"set -euo pipefail\n. scripts/lib.sh\n{candidates}python=$(find_python) || exit 1\necho $python"],
        cwd=repository,
        env={"PATH": str(home / "bin"), "HOME": str(home)} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def is_this_python(path: str) -> bool:
    return os.path.samefile(path, sys.executable)


def test_a_shim_that_finds_nothing_is_no_python(repository: Path, tmp_path: Path):
    for name in ("python3.12", "python3.13", "python3.14", "python3", "python"):
        write_program(tmp_path / "bin" / name, SHIM)
    write_program(tmp_path / ".pyenv/versions/3.12.99/bin/python", WORKS)
    run = find_python(repository, tmp_path)
    assert run.returncode == 0, run.stderr
    assert is_this_python(run.stdout.strip())


def test_an_old_python3_is_passed_over(repository: Path, tmp_path: Path):
    write_program(tmp_path / "bin/python3", TOO_OLD)
    write_program(tmp_path / "bin/python", WORKS)
    run = find_python(repository, tmp_path, only="python3.12 python3 python")
    assert is_this_python(run.stdout.strip())


def test_a_python_without_venv_is_the_last_resort(repository: Path, tmp_path: Path):
    write_program(tmp_path / "bin/python3.12", WITHOUT_VENV)
    write_program(tmp_path / "bin/python3", WORKS)
    assert is_this_python(find_python(repository, tmp_path, only="python3.12 python3").stdout.strip())


@pytest.mark.parametrize(
    ("programs", "variables", "words"),
    [
        ({}, {}, ("no Python 3.12 or newer found", "PYTHON")),
        ({"python3.12": SHIM, "python3": TOO_OLD}, {}, ("no Python 3.12 or newer found", "PYTHON")),
        ({"python3.12": WITHOUT_VENV}, {}, ("bin/python3.12 cannot make virtual environments", "python3.12-venv")),
        ({"python3.12": WORKS, "mine": TOO_OLD}, {"PYTHON": "mine"}, ("PYTHON=mine is not a Python 3.12",)),
    ],
)
def test_failures_are_one_clear_line(
    repository: Path, tmp_path: Path, programs: dict[str, str], variables: dict[str, str], words: tuple[str, ...]
):
    for name, text in programs.items():
        write_program(tmp_path / "bin" / name, text)
    run = find_python(repository, tmp_path, only="python3.12 python3", **variables)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith("jaxllm: ")
    for word in words:
        assert word in run.stderr


def test_an_environment_behind_a_link_is_not_cleared(repository: Path, tmp_path: Path):
    shared = write_program(tmp_path / "elsewhere/.venv/bin/activate", "of another folder")
    write_program(tmp_path / "elsewhere/.venv/bin/python", WORKS)
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / ".venv").symlink_to(tmp_path / "elsewhere/.venv")
    done = subprocess.run(
        [BASH, "-c", f"set -euo pipefail\n. {repository}/scripts/lib.sh\nmake_venv"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "is a link" in done.stderr
    assert shared.read_text() == "of another folder"
