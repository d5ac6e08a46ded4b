"""A run that was killed goes on where it stopped, and does nothing twice that is finished."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli.batch.journal import Journal
from jaxllm.cli.main import main
from jaxllm.exceptions import VLLMValidationError
from tests.cli.fake_engine import FakeEngine
from tests.cli.running import read_jsonl, run_generate, write_jsonl

LINES: list[Any] = [{"prompt": f"p{i}"} for i in range(20)]


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", LINES)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def partial(output: Path) -> Path:
    return output.with_name("out.jsonl.partial.jsonl")


def kill_after(num_done: int, source: Path, output: Path, *flags: object) -> None:
    with pytest.raises(Killed):
        run_generate(
            FakeEngine(per_step=1, crash=Killed(), crash_after=num_done),
            "m",
            "--input",
            source,
            "--output",
            output,
            *flags,
        )
    assert not output.exists()


def resume(source: Path, output: Path, *flags: object) -> set[str]:
    """Run again; returns the ids of the prompts that the engine got."""
    engine = FakeEngine()
    run_generate(engine, "m", "--input", source, "--output", output, *flags)
    assert not partial(output).exists()
    return {request_id for request_id, *_ in engine.requests}


def test_resumed_equals_uninterrupted(source: Path, output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    whole = tmp_path / "whole.jsonl"
    run_generate(FakeEngine(), "m", "--input", source, "--output", whole)
    kill_after(7, source, output)
    assert len(read_jsonl(partial(output))) == 7
    done = {str(entry["index"]) for entry in read_jsonl(partial(output))}
    assert resume(source, output) == {str(i) for i in range(20)} - done
    assert output.read_bytes() == whole.read_bytes()
    assert "7 of 20 prompts are done already" in capsys.readouterr().err


def test_killed_twice(source: Path, output: Path):
    kill_after(3, source, output)
    kill_after(4, source, output)
    assert len(resume(source, output)) == 13
    assert [record["index"] for record in read_jsonl(output)] == list(range(20))


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_a_torn_last_line_is_done_again(source: Path, output: Path, cut: int):
    kill_after(5, source, output)
    file = partial(output)
    file.write_bytes(file.read_bytes()[:-cut])
    assert len(resume(source, output)) == 16
    assert [record["prompt"] for record in read_jsonl(output)] == [line["prompt"] for line in LINES]


def test_foreign_lines_in_the_journal_are_ignored(source: Path, output: Path):
    kill_after(5, source, output)
    with partial(output).open("ab") as file:
        file.write(b'garbage\n{"index": 99, "key": "", "record": {}}\n{"index": -1, "key": "", "record": {}}\n')
    assert len(resume(source, output)) == 15


def test_changed_lines_are_done_again(source: Path, output: Path):
    kill_after(20 - 1, source, output)
    done = {entry["index"] for entry in read_jsonl(partial(output))}
    changed = min(done)
    write_jsonl(source, [line | {"top_k": 5} if i == changed else line for i, line in enumerate(LINES)])
    assert resume(source, output) == {str(i) for i in range(20) if i not in done or i == changed}


@pytest.mark.parametrize(
    "flags", [("--temperature", "0.5"), ("--seed", "3"), ("--dtype", "float32"), ("--chat-template", "{{ x }}")]
)
def test_other_settings_start_over(source: Path, output: Path, flags: tuple[str, str]):
    kill_after(5, source, output)
    assert len(resume(source, output, *flags)) == 20


@pytest.mark.parametrize("flags", [("--max-num-seqs", "8"), ("--enforce-eager",), ("--gpu-memory-utilization", "0.5")])
def test_settings_that_change_no_result_go_on(source: Path, output: Path, flags: tuple[str, ...]):
    kill_after(5, source, output)
    assert len(resume(source, output, *flags)) == 15


def test_failed_lines_are_tried_again(source: Path, output: Path):
    lines = [{"prompt": "bad", "n": 0}, *LINES]
    write_jsonl(source, lines)
    kill_after(5, source, output)
    assert len(read_jsonl(partial(output))) == 5
    engine = FakeEngine()
    assert run_generate(engine, "m", "--input", source, "--output", output) == 1
    assert len(engine.requests) == 15
    assert "error" in read_jsonl(output)[0]


def test_a_grammar_that_fails_is_an_error_and_tried_again(source: Path, output: Path):
    """Every failed line is tried again: the failure can be the deadline's, on a machine that was busy."""
    write_jsonl(source, [*LINES[:-1], {"prompt": "bad", "structured_outputs": {"regex": "("}, "n": 2}])
    kill_after(5, source, output)
    assert len(read_jsonl(partial(output))) == 4, "finished last in, first out: the bad one is the first"
    engine = FakeEngine()
    assert run_generate(engine, "m", "--input", source, "--output", output) == 1
    assert len(engine.requests) == 16
    *_, bad = read_jsonl(output)
    assert (bad["error"], bad["parameter"]) == ("the regex does not compile", "structured_outputs")
    assert [each["finish_reason"] for each in bad["outputs"]] == ["error", "error"]


def test_all_done_but_not_merged_needs_no_engine(source: Path, output: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "finish", lambda _self: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            run_generate(FakeEngine(), "m", "--input", source, "--output", output)
    assert resume(source, output) == set()
    assert len(read_jsonl(output)) == 20


def test_interrupt_keeps_what_is_done(source: Path, output: Path, capsys: pytest.CaptureFixture[str]):
    engine = FakeEngine(per_step=1, crash=KeyboardInterrupt(), crash_after=4)
    assert run_generate(engine, "m", "--input", source, "--output", output) == 130
    assert "4 of 20 prompts are done" in capsys.readouterr().err
    assert engine.num_shutdowns == 1
    assert len(resume(source, output)) == 16


def test_a_crash_keeps_the_old_output(source: Path, output: Path):
    output.write_text("old\n")
    engine = FakeEngine(crash=RuntimeError("device lost"), crash_after=3)
    with pytest.raises(RuntimeError, match="device lost"):
        run_generate(engine, "m", "--input", source, "--output", output)
    assert output.read_text() == "old\n"
    assert engine.num_shutdowns == 1


def test_a_model_that_cannot_be_loaded_leaves_nothing(source: Path, output: Path, capsys: pytest.CaptureFixture[str]):
    command = ["generate", "./no-such-model", "--input", str(source), "--output", str(output)]
    assert main(command) == 2
    assert "no-such-model" in capsys.readouterr().err
    assert list(output.parent.iterdir()) == [source]


def test_a_mistyped_model_keeps_what_is_done(source: Path, output: Path):
    kill_after(5, source, output)
    assert main(["generate", "./no-such-model", "--input", str(source), "--output", str(output)]) == 2
    assert len(resume(source, output)) == 15


def test_two_runs_cannot_share_an_output(source: Path, output: Path):
    with (
        Journal(output, ["key"]),
        pytest.raises(VLLMValidationError, match="another run"),
    ):
        run_generate(FakeEngine(), "m", "--input", source, "--output", output)


SLOW_RUN = """
import sys, time
from tests.cli.fake_engine import FakeEngine
from tests.cli.running import run_generate

class Slow(FakeEngine):
    def step(self):
        time.sleep(0.02)
        return super().step()

sys.exit(run_generate(Slow(per_step=1), "m", "--input", sys.argv[1], "--output", sys.argv[2]))
"""


@pytest.mark.server
def test_sigkill(source: Path, output: Path, repository: Path):
    """A real process is killed without warning once it has finished some prompts."""
    command = [sys.executable, "-c", SLOW_RUN, str(source), str(output)]
    environment = os.environ | {"PYTHONPATH": str(repository)}
    process = subprocess.Popen(command, cwd=repository, env=environment, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (partial(output).exists() and partial(output).read_bytes().count(b"\n") >= 3):
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    num_done = partial(output).read_bytes().count(b"\n")
    assert 3 <= num_done < 20
    assert len(resume(source, output)) == 20 - num_done
    assert [record["prompt"] for record in read_jsonl(output)] == [line["prompt"] for line in LINES]
