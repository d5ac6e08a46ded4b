"""A slow check runs again after a change of what it guards, and not after one of comments or of other files."""

from __future__ import annotations

import tomllib
from pathlib import Path

import guarded
import pytest
from guarded import CHECKS, Guarded, digest, files, files_of_tests, has_changed, record

GUARDED = Guarded(sources=("src/*.py", "data/**/*"), packages=("jax",))


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {
        "src/a.py": '"""A module."""\n\ndef f(x):\n    """Add one."""\n    return x + 1  # one\n',
        "src/other.txt": "other",
        "data/deep/b.json": "{}",
        "tests/conftest.py": "",
        "tests/test_a.py": "import pytest\nfrom tests.some import thing\n\npytestmark = [pytest.mark.check]\n",
        "tests/some/conftest.py": "",
        "tests/some/thing.py": "PROGRAM = ['-m', 'tests.some.program']\n",
        "tests/some/program.py": "pass\n",
        "tests/test_other.py": "import tests.some.other\n\nimport pytest\n\npytestmark = pytest.mark.checks\n",
        "tests/some/other.py": "pass\n",
        "requirements.lock": "jax==1.0\njaxlib==1.0\nnumpy==2.0\n",
        "tests/guarded.json": "{}\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(guarded, "CHECKS", {"check": GUARDED})
    return tmp_path


def test_a_check_runs_until_it_is_recorded(sources: Path):
    assert has_changed("check", sources)
    record("check", sources)
    assert not has_changed("check", sources)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("src/a.py", "def f(x):\n    return x + 2\n"),
        ("src/new.py", "pass\n"),
        ("data/deep/b.json", "[]"),
        *(
            (f"tests/{name}.py", "changed = 1\n")
            for name in ("conftest", "some/conftest", "some/thing", "some/program")
        ),
        ("requirements.lock", "jax==1.1\njaxlib==1.0\nnumpy==2.0\n"),
    ],
)
def test_a_change_of_what_is_guarded_is_seen(sources: Path, name: str, text: str):
    record("check", sources)
    (sources / name).write_text(text)
    assert has_changed("check", sources)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("src/a.py", '"""The module."""\n\n# A comment.\ndef f(x):\n    return x + 1\n'),
        ("src/other.txt", "changed"),
        ("tests/test_other.py", "changed = 1\n"),
        ("tests/some/other.py", "changed = 1\n"),
        ("requirements.lock", "jax==1.0\njaxlib==1.1\nnumpy==2.1\n"),
    ],
)
def test_other_changes_are_not(sources: Path, name: str, text: str):
    record("check", sources)
    (sources / name).write_text(text)
    assert not has_changed("check", sources)


def test_a_pattern_that_matches_nothing_is_an_error(sources: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(guarded, "CHECKS", {"check": Guarded(sources=("gone/*.py",), packages=())})
    with pytest.raises(FileNotFoundError, match="gone"):
        digest("check", sources)


@pytest.mark.parametrize("check", sorted(CHECKS))
def test_every_check_finds_its_sources(check: str):
    assert files(check)


def test_every_marked_check_has_its_tests_and_runs(repository: Path):
    settings = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    markers = {line.partition(":")[0] for line in settings["markers"]}
    assert markers == CHECKS.keys() - {"tpu_compiler"}
    script = (repository / "scripts/test.sh").read_text()
    for check in markers:
        assert files_of_tests(check, repository)
        assert f"guarded_tests {check} run_" in script
