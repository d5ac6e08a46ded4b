"""A core hangs if a step takes for ever or its process has stopped; compiling, or a stopped front end, is no hang."""

from __future__ import annotations

import pytest

from jaxllm.engine.client.core_watch import CoreWatch
from jaxllm.engine.transport.wire import Heartbeat


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def pass_by(self, watch: CoreWatch, seconds: int, beat: Heartbeat | None = None) -> str | None:
        """Receive a heartbeat and look at the core, each second; return the last complaint."""
        complaint = None
        for _ in range(seconds):
            self.now += 1
            if beat is not None:
                watch.hear(beat)
            complaint = watch.complaint()
        return complaint


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_step_that_takes_too_long_is_a_hang(clock: Clock) -> None:
    watch = CoreWatch(step_seconds=20, silence_seconds=10, clock=lambda: clock.now)
    assert clock.pass_by(watch, 50, Heartbeat(19.5, False, True)) is None
    assert (
        clock.pass_by(watch, 1, Heartbeat(21.4, False, True))
        == "a step, or a call, has taken 21 s (JAXLLM_STEP_TIMEOUT)"
    )
    assert clock.pass_by(watch, 1, Heartbeat(0.0, False, True)) is None


def test_compiling_is_no_hang(clock: Clock) -> None:
    watch = CoreWatch(step_seconds=20, silence_seconds=10, clock=lambda: clock.now)
    assert clock.pass_by(watch, 50, Heartbeat(600.0, True, False)) is None
    assert clock.pass_by(watch, 1, Heartbeat(600.0, False, False)) is not None


def test_silence_is_a_hang_of_the_whole_process(clock: Clock) -> None:
    watch = CoreWatch(step_seconds=20, silence_seconds=10, clock=lambda: clock.now)
    assert clock.pass_by(watch, 1, Heartbeat(0.0, True, False)) is None
    assert clock.pass_by(watch, 10) is None
    complaint = clock.pass_by(watch, 1)
    assert complaint == "it has given no sign of life for 11 s (JAXLLM_SILENCE_TIMEOUT)"
    assert clock.pass_by(watch, 1, Heartbeat(0.0, True, False)) is None
    assert clock.pass_by(watch, 11) is not None, "one that compiles has its heartbeat too"


def test_what_imports_for_long_before_it_gives_a_sign_of_life_does_not_hang(clock: Clock) -> None:
    watch = CoreWatch(step_seconds=20, silence_seconds=10, clock=lambda: clock.now)
    assert clock.pass_by(watch, 100) is None
    assert not watch.has_heard
    assert clock.pass_by(watch, 1, Heartbeat(0.0, True, False)) is None
    assert watch.has_heard
    assert clock.pass_by(watch, 11) is not None


def test_a_front_end_that_was_stopped_blames_nobody(clock: Clock) -> None:
    """What the core has sent meanwhile may still be on its way: it gets the whole time anew."""
    watch = CoreWatch(step_seconds=20, silence_seconds=10, clock=lambda: clock.now)
    assert clock.pass_by(watch, 3, Heartbeat(0.0, False, True)) is None
    clock.now += 1000
    assert watch.complaint() is None
    assert clock.pass_by(watch, 10) is None
    assert clock.pass_by(watch, 1) is not None


def test_it_knows_whether_the_core_is_warm(clock: Clock) -> None:
    watch = CoreWatch(step_seconds=20, silence_seconds=10, clock=lambda: clock.now)
    assert not watch.programs.is_warm
    watch.hear(Heartbeat(0.0, False, True))
    assert watch.programs.is_warm
