"""Programs compile ahead in order, once each; one that is needed jumps the queue; failures and stops are handled."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxllm.exceptions import EngineDeadError
from jaxllm.execution.programs.background import FAST, GENTLE, Pace, Programs, find_pace
from pallas_kernels.native import cores

pytestmark = pytest.mark.programs


def test_all_are_compiled_ahead_in_order() -> None:
    order: list[int] = []
    programs = Programs(lambda key: order.append(key) or key * 10, [3, 1, 2], ahead=True)
    programs.wait()
    assert order == [3, 1, 2]
    assert [programs.get(key) for key in (1, 2, 3)] == [10, 20, 30]
    assert len(programs) == 3
    programs.stop()


def test_a_waiting_step_jumps_the_queue_and_nothing_is_compiled_twice() -> None:
    compiled: list[int] = []
    first_started, go_on = threading.Event(), threading.Event()

    def compile_one(key: int) -> int:
        if key == 0:
            first_started.set()
            assert go_on.wait(10)
        compiled.append(key)
        return key

    programs = Programs(compile_one, [0, 1, 2, 3], ahead=True)
    assert first_started.wait(10)
    assert programs.get(3) == 3
    assert compiled == [3]
    go_on.set()
    programs.wait()
    assert sorted(compiled) == [0, 1, 2, 3]
    programs.stop()


def test_the_nearest_program_is_one_that_need_not_be_waited_for() -> None:
    go_on = {key: threading.Event() for key in "abcd"}
    started = {key: threading.Event() for key in "abcd"}

    def compile_one(key: str) -> str:
        started[key].set()
        assert go_on[key].wait(10)
        return key

    programs = Programs(compile_one, list("cabd"), ahead=True)
    assert started["c"].wait(10)
    assert programs.nearest(list("abc")) == "c", "it is being compiled"
    assert programs.nearest(list("bd")) == "b", "none is nearer than the right one"
    go_on["c"].set()
    assert started["a"].wait(10)
    assert programs.nearest(list("bcd")) == "c", "it is there"
    assert programs.nearest(list("adb")) == "a", "it is being compiled, and the others are not there"
    assert programs.nearest(list("adc")) == "c", "it is there"
    for event in go_on.values():
        event.set()
    programs.wait()
    assert programs.nearest(list("bcd")) == "b"
    programs.stop()


def test_the_nearest_is_the_right_one_where_nothing_is_compiled_ahead() -> None:
    programs = Programs(lambda key: key, [1, 2], ahead=False)
    assert programs.get(2) == 2
    assert programs.nearest([1, 2]) == 1


def test_eager_compiles_only_what_is_asked_for() -> None:
    compiled: list[int] = []
    programs = Programs(lambda key: compiled.append(key) or key, [1, 2, 3], ahead=False)
    time.sleep(0.05)
    assert not compiled
    assert programs.get(2) == 2
    assert compiled == [2]


def test_what_a_step_would_rather_have_had_is_compiled_next() -> None:
    compiled: list[int] = []

    def compile_one(key: int) -> int:
        time.sleep(1e-3)
        compiled.append(key)
        return key

    programs = Programs(compile_one, [1, 2, 3, 4, 5], ahead=True, pace=Pace(1, 1e9))
    wait_until(lambda: 1 in programs)
    time.sleep(0.05)
    assert compiled == [1], "the others are in no hurry"
    assert programs.nearest([4, 1]) == 1
    wait_until(lambda: 4 in programs)
    assert programs.nearest([4, 1]) == 4
    time.sleep(0.05)
    assert compiled == [1, 4]
    programs.wait()
    assert compiled == [1, 4, 2, 3, 5]
    programs.stop()


def test_what_can_be_loaded_is_not_compiled_and_needs_no_pause() -> None:
    compiled: list[int] = []
    load = {1: "one", 2: "two", 3: "three"}.get
    programs = Programs(lambda key: compiled.append(key) or key, [1, 2, 3, 4], ahead=True, load=load, pace=Pace(1, 1e9))
    wait_until(lambda: 4 in programs)
    assert [programs.get(key) for key in (1, 2, 3, 4)] == ["one", "two", "three", 4]
    assert compiled == [4]
    programs.stop()


@pytest.mark.parametrize(
    ("platform", "num_cores", "pace"),
    [("gpu", 8, FAST), ("tpu", 200, FAST), ("gpu", 7, GENTLE), ("tpu", 1, GENTLE), ("cpu", 64, GENTLE)],
)
def test_the_pace_depends_on_the_cores_that_steps_leave(
    monkeypatch: pytest.MonkeyPatch, platform: str, num_cores: int, pace: Pace
) -> None:
    monkeypatch.setattr(cores, "num_cores", lambda: num_cores)
    assert find_pace(platform) == pace


def test_several_threads_compile_at_once_without_pauses_and_nothing_twice() -> None:
    meeting, compiled = threading.Barrier(4), list[int]()

    def compile_one(key: int) -> int:
        meeting.wait(10)
        compiled.append(key)
        return key

    programs = Programs(compile_one, range(8), ahead=True, pace=FAST)
    wait_until(lambda: programs.is_warm)
    assert sorted(compiled) == list(range(8))
    assert programs.num_compiled == len(programs) == 8
    programs.stop()


def test_an_engine_is_warm_and_stopped_once_all_threads_have_ended() -> None:
    started, go_on = threading.Semaphore(0), [threading.Event() for _ in range(3)]

    def compile_one(key: int) -> int:
        started.release()
        assert go_on[key].wait(10)
        return key

    programs = Programs(compile_one, range(3), ahead=True, pace=Pace(2, 0.0))
    assert started.acquire(timeout=10)
    assert started.acquire(timeout=10)
    go_on[0].set()
    assert started.acquire(timeout=10)
    go_on[2].set()
    wait_until(lambda: 2 in programs)
    time.sleep(0.02)
    assert not programs.is_warm, "one is still being compiled"
    stopping = threading.Thread(target=programs.stop)
    stopping.start()
    stopping.join(0.05)
    assert stopping.is_alive(), "a process that ends while something is compiled crashes"
    go_on[1].set()
    stopping.join(10)
    assert not stopping.is_alive()
    assert len(programs) == 3


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


@pytest.mark.parametrize("is_disk_full", [False, True])
def test_rare_programs_are_compiled_but_not_held_until_one_is_wanted(is_disk_full: bool) -> None:
    kept: dict[str, str] = {}
    loaded: list[str] = []

    def compile_one(key: str) -> str:
        if not is_disk_full:
            kept[key] = key
        return key

    def load(key: str) -> str | None:
        loaded.append(key)
        return kept.get(key)

    keys = ["plain", "rare", "rarer"]
    programs = Programs(compile_one, keys, ahead=True, load=load, is_kept=kept.__contains__, rare=["rare", "rarer"])
    programs.wait()
    programs.stop()
    held = {key for key in keys if key in programs}
    assert held == ({"plain", "rare", "rarer"} if is_disk_full else {"plain"})
    loaded.clear()
    assert [programs.get("rare"), programs.get("rare")] == ["rare", "rare"]
    assert loaded == ([] if is_disk_full else ["rare"])
    assert "rare" in programs


def test_what_is_gone_again_is_not_compiled_for_ever() -> None:
    compiled: list[int] = []
    kept = {1: False, 2: False}

    def compile_one(key: int) -> int:
        compiled.append(key)
        kept.update({1: False, 2: False} | {key: True})  # there is room for one
        return key

    programs = Programs(compile_one, [1, 2], ahead=True, is_kept=kept.__getitem__, rare=[1, 2])
    thread = programs._thread
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()
    assert compiled == [1, 2]
    programs.stop()


def test_one_that_is_kept_is_nearer_than_one_that_is_being_compiled() -> None:
    started, go_on = threading.Event(), threading.Event()

    def compile_one(key: str) -> str:
        started.set()
        assert go_on.wait(10)
        return key

    kept = {"kept": "kept"}
    programs = Programs(
        compile_one, ["building", "kept"], ahead=True, load=kept.get, is_kept=kept.__contains__, rare=["kept"]
    )
    assert started.wait(10)
    assert programs.nearest(["best", "building", "kept"]) == "kept"
    assert "kept" not in programs
    assert programs.get("kept") == "kept"
    go_on.set()
    programs.stop()


def test_a_failure_reaches_the_step_that_needs_the_program(caplog: pytest.LogCaptureFixture) -> None:
    def fail(key: int) -> int:
        raise RuntimeError(f"cannot compile {key}")

    programs = Programs(fail, [1], ahead=True)
    with pytest.raises(RuntimeError, match="cannot compile 1"):
        programs.get(1)
    programs.stop()


def test_a_failure_stops_no_other() -> None:
    def compile_one(key: int) -> int:
        if key == 1:
            raise RuntimeError("cannot compile 1")
        return key

    programs = Programs(compile_one, [1, 2], ahead=True)
    thread = programs._thread
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()
    assert 2 in programs
    assert 1 not in programs
    programs.stop()


def test_stop_leaves_the_rest_uncompiled() -> None:
    started, go_on = threading.Event(), threading.Event()

    def compile_one(key: int) -> int:
        started.set()
        assert go_on.wait(10)
        return key

    programs = Programs(compile_one, list(range(100)), ahead=True)
    assert started.wait(10)
    threading.Timer(0.05, go_on.set).start()
    programs.stop()
    assert len(programs) <= 2


def test_an_interrupted_stop_can_be_made_again() -> None:
    """A thread whose join is interrupted counts as ended, in Python 3.12, though it still runs."""
    started, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def compile_one(key: int) -> int:
        started.set()
        assert go_on.wait(10)
        ended.set()
        return key

    programs = Programs(compile_one, [1, 2], ahead=True)
    assert started.wait(10)
    main_thread = threading.get_ident()
    threading.Timer(0.05, signal.pthread_kill, (main_thread, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        programs.stop()
    threading.Timer(0.1, go_on.set).start()
    programs.stop()
    assert ended.is_set()


ENDS_WHILE_TRACING = """
import os, signal, sys, threading, time, weakref, jax, jax.numpy as jnp, numpy as np
from jaxllm.exceptions import EngineDeadError
from jaxllm.execution.programs.background import Programs
jax.config.update("jax_enable_compilation_cache", False)
constant, is_tracing = jax.device_put(np.arange(8.0)), threading.Event()
assert not weakref.finalize._registry, "too late to show the order of exit hooks"
def compile_one(key):
    time.sleep(0.1)
    def step(x):
        x = jnp.sort(x * constant)
        is_tracing.set()
        time.sleep(0.5)
        return jnp.sort(x * constant)
    program = jax.jit(step).lower(constant).compile()
    print("compiled", key)
    return program
programs = Programs(compile_one, [1, 2], ahead=True)
assert is_tracing.wait(30)
print("end")
if sys.argv[1:]:
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.daemon = True
    interrupt.start()
"""


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_process_that_ends_while_a_program_is_traced_finishes_that_one_and_says_nothing(is_interrupted: bool) -> None:
    """An exit hook of weakref.finalize takes a trace its constants, and ending under a running XLA compile crashes.

    Ctrl-C ends the process at once, without a crash either.
    """
    command = [sys.executable, "-c", ENDS_WHILE_TRACING, *["interrupt"] * is_interrupted]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2]
    )
    expected = (-signal.SIGINT, "end\n", "") if is_interrupted else (0, "end\ncompiled 1\n", "")
    assert (done.returncode, done.stdout, done.stderr) == expected


def test_stop_ends_who_waits_for_all_programs_after_the_present_one() -> None:
    started, goes_on = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def compile_one(key: int) -> int:
        started.set()
        assert goes_on.wait(20)
        return key

    def wait() -> None:
        try:
            programs.wait()
        except EngineDeadError as error:
            errors.append(error)

    programs = Programs(compile_one, [1, 2], ahead=False)
    waiting = threading.Thread(target=wait)
    waiting.start()
    assert started.wait(20)
    stopping = threading.Thread(target=programs.stop)
    stopping.start()
    stopping.join(0.05)
    assert stopping.is_alive(), "a process that ends while something is compiled crashes"
    goes_on.set()
    for thread in (waiting, stopping):
        thread.join(20)
        assert not thread.is_alive()
    assert (len(programs), programs.is_warm) == (1, False)
    assert "shut down" in str(errors[0])


def test_programs_of_a_dropped_engine_are_compiled_by_one_thread_at_a_time() -> None:
    """A notebook cell that runs again drops an engine each time, while a program of it is compiled."""
    started, go_on, order = threading.Event(), threading.Event(), list[str]()

    def slow(key: str) -> str:
        started.set()
        assert go_on.wait(10)
        order.append(key)
        return key

    dropped = Programs(slow, ["old 1", "old 2"], ahead=True)
    assert started.wait(10)
    dropped.begin_stop()
    also_dropped = Programs(lambda key: order.append(key) or key, ["never"], ahead=True)
    also_dropped.begin_stop()
    programs = Programs(lambda key: order.append(key) or key, ["new 1", "new 2"], ahead=True)
    also_dropped.stop()
    assert programs.get("new 2") == "new 2", "what a step wants does not wait"
    assert order == ["new 2"]
    go_on.set()
    dropped.stop()
    deadline = time.monotonic() + 10
    while not programs.is_warm and time.monotonic() < deadline:
        time.sleep(0.01)
    assert order == ["new 2", "old 1", "new 1"]
    programs.stop()


def test_programs_that_nobody_stops_do_not_wait_for_each_other() -> None:
    started, go_on = threading.Event(), threading.Event()
    held = Programs(lambda key: started.set() or go_on.wait(10) or key, ["held"], ahead=True)
    assert started.wait(10)
    other = Programs(lambda key: key, ["other"], ahead=True)
    deadline = time.monotonic() + 10
    while not other.is_warm and time.monotonic() < deadline:
        time.sleep(0.01)
    assert other.is_warm
    assert not held.is_warm
    go_on.set()
    held.stop()
    other.stop()
