"""scripts/compile/start.py: when the programs of a start are there."""

from __future__ import annotations

import pytest
from compile import start
from compile.start import Timeline, compile_start

from jaxllm.execution.programs.shapes import describe
from jaxllm.models import LayerLoop
from tests.execution.support import make_compiler

pytestmark = pytest.mark.scripts


def test_threads_take_turns_to_trace_and_compile_at_once() -> None:
    timeline = Timeline(10, 2)
    assert timeline.add(1, 5) == (10, 16)
    assert timeline.add(1, 2) == (11, 14)
    assert timeline.add(3, 1) == (14, 18), "the second thread is free first"
    assert timeline.add(1, 1) == (17, 19), "the first one waits for a turn"


def test_one_thread_compiles_one_after_the_other() -> None:
    timeline = Timeline(0, 1)
    assert [timeline.add(1, 2) for _ in range(3)] == [(0, 3), (3, 6), (6, 9)]


@pytest.mark.parametrize("is_disk_slow", [True, False])
def test_the_first_token_waits_for_one_program_and_the_weights(
    monkeypatch: pytest.MonkeyPatch, is_disk_slow: bool
) -> None:
    compiler = make_compiler(1, loop=LayerLoop.SCAN)
    monkeypatch.setattr(start, "_BYTES_PER_SECOND", 1.0 if is_disk_slow else 1e30)
    monkeypatch.setattr(start, "timed_compile", lambda *_: {"lower_s": 1.0, "compile_s": 2.0})
    sizing, weights, *programs, last = compile_start(compiler)
    assert [row["program"] for row in programs] == [describe(key) for key in compiler.shapes.programs()]
    assert sizing["ends_s"] == programs[0]["begins_s"] == 3.0
    assert last["ends_s"] == (weights["ends_s"] if is_disk_slow else programs[0]["ends_s"])
    assert (weights["begins_s"], programs[0]["ends_s"]) == (0.0, 6.0)
