"""What the parent of several front ends makes of their starts, their changes and their ends."""

from __future__ import annotations

import logging
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxllm.core_messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from jaxllm.engine.transport.wire import Add, Call, FrameError, Reply, Told
from jaxllm.exceptions import EngineDeadError, VLLMValidationError
from jaxllm.sampling_params import SamplingParams
from jaxllm.server.processes import parent as parent_module
from jaxllm.server.processes.front_process import FrontProcess, Settings
from jaxllm.server.processes.parent import Parent
from jaxllm.server.processes.relay import Relay

REFUSE = Call(1, "refuse", ["The adapter is gone.", "lora_modules"])
REPORT = Call(0, "report", [[]])


class FakeFront(FrontProcess):
    """A front end that has said something and ended."""

    pid, status = 7, 2  # type: ignore[assignment]

    def __init__(self, *said: Any, index: int = 0) -> None:
        self.index, self.report, self.is_serving = index, [], False
        self.sequences, self.kept = set(), set()
        self._said: Sequence[Any] = said
        self.sent: list[Any] = []

    def hear(self) -> Sequence[Any]:
        said, self._said = self._said, ()
        return said

    def take_report(self, report: Any) -> None:
        self.report, self.is_serving = report, True

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def close(self) -> None:
        pass


class FakeRelay:
    """Passes nothing on."""

    def lose(self, front: object) -> None:
        pass


@pytest.fixture
def parent() -> Iterator[Parent]:
    parent = Parent(lambda: pytest.fail("no engine is started"), Settings({}, {}), 0, 1)
    yield parent
    parent._close()


def end(parent: Parent, *said: Call) -> None:
    """Have the parent see that its front end has ended, and hear what it has said before."""
    (seat,) = parent._seats
    seat.front = FakeFront(*said)
    parent._lose(seat, seat.front, FakeRelay())  # type: ignore[arg-type]


def test_what_a_front_end_refuses_at_the_start_ends_the_server(parent: Parent) -> None:
    end(parent, REFUSE)
    assert isinstance(parent._refusal, VLLMValidationError)
    assert (str(parent._refusal), parent._refusal.parameter) == ("The adapter is gone.", "lora_modules")
    assert parent._seats[0].restart_at == 0, "none is started again"


def test_what_one_refuses_later_is_its_own_failure(parent: Parent, caplog: pytest.LogCaptureFixture) -> None:
    end(parent, REPORT)
    with caplog.at_level(logging.ERROR):
        end(parent, REFUSE)
    assert parent._refusal is None
    assert parent._seats[0].restart_at > 0, "it is started again"
    assert "cannot start: The adapter is gone." in caplog.text


class Clock:
    """Stands for the module `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_a_front_end_that_keeps_ending_is_started_later_each_time_and_then_ends_the_server(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(parent_module, "time", clock)
    seat, rests = parent._seats[0], []
    for served in (0.0, 0.0, 60.0, 1.0, 2.0, 3.0, 4.0, 59.0):
        seat.started_at, clock.now = clock.now, clock.now + served
        end(parent)
        rests.append(seat.restart_at - clock.now)
    assert rests == [0.0, 1.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0], "one that has served for a minute begins anew"
    seat.started_at = clock.now
    with pytest.raises(EngineDeadError, match="Front end 0 has ended 7 times in a row"):
        end(parent)


def test_a_process_that_the_system_does_not_start_is_tried_again(
    parent: Parent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seat = parent._seats[0]
    with caplog.at_level(logging.ERROR):
        for _ in range(6):
            parent._start_front(seat)
    assert (seat.front, seat.num_failures) == (None, 6)
    assert "front end 0 cannot be started ([Errno 11] Resource temporarily unavailable)" in caplog.text
    assert list(tmp_path.iterdir()) == [], "no folder is left; and no socket, or the fixture would not end"
    with pytest.raises(EngineDeadError):
        parent._start_front(seat)


def test_front_ends_have_the_time_to_drain_and_not_if_told_twice(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, front = Clock(), FakeFront()
    told: list[int] = []
    monkeypatch.setattr(parent_module, "time", clock)
    monkeypatch.setattr(front, "status", None)
    monkeypatch.setattr(front, "tell", told.append)
    parent._seats[0].front = front
    parent._drain_seconds, parent._next_beat = 100.0, float("inf")

    def tend(seconds: float) -> list[int]:
        clock.now += seconds
        told.clear()
        parent._tend(None, None)  # type: ignore[arg-type]
        return told[:]

    parent.end()
    assert (tend(0.0), tend(109.0), tend(2.0)) == ([signal.SIGTERM], [], [signal.SIGKILL])
    parent._deadline = float("inf")
    parent.end()
    assert (tend(0.0), tend(9.0), tend(2.0)) == ([signal.SIGTERM], [], [signal.SIGKILL])


class Waiting:
    """Stands for a process that has started and done nothing yet."""

    pid, returncode = 7, None

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def poll(self) -> None:
        return None

    def kill(self) -> None:
        pass

    def wait(self, seconds: float) -> None:
        pass


def test_a_front_end_may_be_silent_until_it_serves(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its first message and its first report it may wait for the core to load adapters."""
    monkeypatch.setattr(subprocess, "Popen", Waiting)
    parent._start_front(parent._seats[0])
    front = parent._seats[0].front
    assert front is not None
    monkeypatch.setattr(front.inbox, "receive", lambda *, wait: [Call(0, "add_lora", [])])
    front.hear()
    assert not front._watch.has_heard
    front.take_report([])
    assert front._watch.has_heard


def test_those_who_come_later_hear_of_what_was_not_taken_back(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    seat, sent = parent._seats[0], []
    asker, starting = FakeFront(), FakeFront()
    asker.is_serving = True
    seat.front = asker
    parent._seats.append(parent_module._Seat(1))
    parent._seats[1].front = starting
    for number, value in enumerate(("a", "b", None)):
        parent._tell(asker, Call(number, "tell", []), "adapter", f"name {value}", value)
        parent._tell(asker, Call(number, "tell", []), "paused", "", value)
        assert asker.sent[-2:] == starting.sent[-2:]
        for told in asker.sent[-2:]:
            parent._acknowledge(told.told_id, asker)
        assert asker.sent[-2:] == [Reply(number)] * 2, "nobody waits for one that does not serve yet"
    monkeypatch.setattr(subprocess, "Popen", Waiting)
    monkeypatch.setattr(FrontProcess, "send", lambda _, message: sent.append(message))
    parent._start_front(seat)
    assert sent == [Told(-1, "adapter", f"name {value}", value) for value in "ab"]


class FakeCore:
    """A core whose next outcome cannot be read."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.released: list[str] = []
        self.outcomes: list[Any] = []

    def add_request(self, request: EngineCoreRequest) -> None:
        pass

    def abort_requests(self, ids: list[str]) -> None:
        self.aborted += sorted(ids)

    def release(self, ids: list[str]) -> None:
        self.released += ids

    def take_outputs(self) -> Any:
        outcome = self.outcomes.pop() if self.outcomes else None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class FakeMetrics:
    """Counts nothing."""

    stats: Any = None

    def of(self, index: int) -> FakeMetrics:
        return self


def request(name: str, *, n: int = 1, keeps_blocks: bool = False) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(n=n),
        eos_token_id=None,
        max_tokens=4,
        seed=0,
        arrival_time=0.0,
        keeps_blocks=keeps_blocks,
    )


def test_the_core_ends_what_a_front_end_has_left_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.server.processes.relay.FrontMetrics", lambda ready: FakeMetrics())
    core, fronts = FakeCore(), [FakeFront(), FakeFront(index=1)]
    relay = Relay(core, None)  # type: ignore[arg-type]
    for front in fronts:
        relay.take(front, Add(request(f"{front.index}", n=2)))
        relay.take(front, Add(request(f"kept {front.index}", keeps_blocks=True)))
    lost = sorted(fronts[0].sequences)
    assert len(lost) == 3
    relay.lose(fronts[0])
    assert (core.aborted, core.released) == (lost, ["kept 0"])
    core.outcomes.append(FrameError("broken"))
    relay.pass_on()
    assert core.aborted[3:] == sorted(each.request_id for each in ended_by(fronts[1]))
    assert len(core.aborted) == 6
    assert not fronts[0].sent, "it has gone"


def ended_by(front: FakeFront) -> list[EngineCoreOutput]:
    """Return the outputs that a front end was sent; they are all errors."""
    (step,) = front.sent
    assert isinstance(step, EngineCoreOutputs)
    assert {each.finish_reason for each in step.outputs} == {"error"}
    return step.outputs
