"""What the parent of several front ends makes of their last words."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from jaxllm.engine.transport.wire import Call
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.processes.front_process import Settings
from jaxllm.server.processes.parent import Parent

REFUSE = Call(1, "refuse", ["The adapter is gone.", "lora_modules"])
REPORT = Call(0, "report", [[]])


class FakeFront:
    """A front end that has said something and ended."""

    index, pid, status, report = 0, 7, 2, ()

    def __init__(self, *said: Call) -> None:
        self._said = said

    def hear(self) -> Sequence[Call]:
        said, self._said = self._said, ()
        return said

    def send(self, message: object) -> None:
        pass

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
    front: Any = FakeFront(*said)
    (seat,), relay = parent._seats, FakeRelay()
    seat.front = front
    parent._lose(seat, front, relay)  # type: ignore[arg-type]


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
