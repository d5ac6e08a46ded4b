"""Standard streams and files that cannot be written end in one line and a status, never in a traceback."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from jaxllm.cli.batch import generate
from jaxllm.cli.main import main
from tests.cli.fake_engine import FakeEngine
from tests.cli.running import read_jsonl, write_jsonl

PROMPTS = ["generate", "m", "--prompt", "a", "--prompt", "b"]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Make the engine that `main` loads."""
    engine = FakeEngine()
    monkeypatch.setattr(generate, "load_engine", lambda _args: engine)
    return engine


@pytest.fixture(params=["full disk", "broken pipe"])
def unwritable(request: pytest.FixtureRequest) -> Iterator[TextIO]:
    """Make a stream to which nothing can be written, as of a process whose output leads there."""
    if request.param == "full disk":
        stream = open("/dev/full", "w")  # noqa: SIM115
    else:
        reader, writer = os.pipe()
        os.close(reader)
        stream = os.fdopen(writer, "w")
    yield stream
    stream.close()


@pytest.mark.parametrize("words", [PROMPTS, ["--version"], ["collect-env"]])
def test_output_that_cannot_be_written(
    words: list[str],
    unwritable: TextIO,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(sys, "stdout", unwritable)
    assert main(words) == 4
    shown = capsys.readouterr().err
    assert shown.startswith("jaxllm: error: cannot write standard output: ")
    assert shown.count("\n") == 1
    assert engine.num_shutdowns == (words is PROMPTS)


def test_messages_that_cannot_be_written_are_lost(
    unwritable: TextIO, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(sys, "stderr", unwritable)
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}, {"bad": 1}])
    words = ["generate", "m", "--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    assert main(words) == 1, "one line is bad"
    assert len(read_jsonl(tmp_path / "out.jsonl")) == 2
    assert main(["generate", "m"]) == 2, "neither --prompt nor --input"
    assert main([*words, "--output", "out.csv"]) == 2


def test_characters_that_the_terminal_lacks_are_escaped(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    with (tmp_path / "out").open("w", encoding="latin-1") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["generate", "m", "--prompt", "ä \u2192"]) == 0
    assert (tmp_path / "out").read_text("latin-1").startswith("\\u2192 ä|")


def test_results_need_somewhere_to_go(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """Python sets a standard stream that is closed to None."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(PROMPTS) == 2
    assert "standard output is closed: name a file with --output" in capsys.readouterr().err
    assert not engine.requests
    assert main([*PROMPTS, "--output", str(tmp_path / "out.jsonl")]) == 0


CLOSED = """
import sys
from jaxllm.cli.batch import generate
from jaxllm.cli.main import main
from tests.cli.fake_engine import FakeEngine

class Loud(FakeEngine):
    def step(self):
        import os
        os.write(1, b"noise"); os.write(2, b"noise")
        return super().step()

generate.load_engine = lambda _args: Loud()
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.server
def test_closed_streams_are_no_files_of_ours(tmp_path: Path, repository: Path):
    """What a library writes to the numbers of closed streams must not reach the file that was opened next."""
    output = tmp_path / "out.jsonl"
    command = ["sh", "-c", 'exec "$0" "$@" >&- 2>&-', sys.executable, "-c", CLOSED, *PROMPTS, "--output", str(output)]
    environment = os.environ | {"PYTHONPATH": str(repository)}
    assert subprocess.run(command, cwd=repository, env=environment, check=False).returncode == 0
    assert [record["prompt"] for record in read_jsonl(output)] == ["a", "b"]


def test_a_disk_that_fills_up_keeps_what_is_done(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(20)])
    words = ["generate", "m", "--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        assert main(words) == 4
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "out.jsonl.partial.jsonl: File too large; make room and start the same command again" in (
        capsys.readouterr().err
    )
    asked = len(engine.requests)
    assert main(words) == 0
    assert 0 < len(engine.requests) - asked < 20
    assert len(read_jsonl(tmp_path / "out.jsonl")) == 20


@pytest.mark.parametrize("folder", ["out.jsonl", "out.jsonl.partial.jsonl"])
def test_an_output_that_cannot_be_opened_is_found_before_the_model_is_loaded(
    folder: str, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / folder).mkdir()
    assert main([*PROMPTS, "--output", str(tmp_path / "out.jsonl")]) == 2
    assert "--output" in capsys.readouterr().err
    assert not engine.requests


@pytest.mark.parametrize("flag", ["--input", "--output", "--config"])
def test_a_home_that_nobody_has(flag: str, capsys: pytest.CaptureFixture[str]):
    words = ["generate", "m", flag, "~no-such-user/x.jsonl"]
    assert main(words if flag == "--input" else [*words, "--prompt", "a"]) == 2
    assert "~no-such-user" in capsys.readouterr().err
