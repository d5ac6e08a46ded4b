"""The client of a core that runs by itself, without such a core: frames come from the test."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
import zmq

from jaxllm.core_messages import EngineCoreOutputs
from jaxllm.engine.client.remote_core import RemoteCore
from jaxllm.engine.online import async_core
from jaxllm.engine.online.async_core import AsyncCore
from jaxllm.engine.online.request_stream import TextOutbox
from jaxllm.engine.transport.sockets import Meeting
from jaxllm.engine.transport.wire import FrameError, encode_from_core
from jaxllm.exceptions import EngineDeadError
from tests.engine.fake_core import FakeCore
from tests.engine.support import make_ready

NUM_STEPS = 5


class Host:
    """A handle of a process that does nothing until it is ended."""

    name = "the engine core (of a test)"
    pid = None
    fds: list[int] = []  # noqa: RUF012 - there are none
    poll_seconds = 0.01

    def __init__(self) -> None:
        self.meeting = Meeting.in_process()
        self._is_killed = False

    def end_reason(self) -> str | None:
        return "it was killed" if self._is_killed else None

    def wait(self, seconds: float) -> None:
        del seconds

    def stop(self, seconds: float) -> None:
        self.wait(seconds)

    def kill(self) -> None:
        self._is_killed = True


@pytest.fixture
def context() -> zmq.Context[zmq.Socket[bytes]]:
    return zmq.Context()


@pytest.fixture
def remote(context: zmq.Context[zmq.Socket[bytes]]) -> RemoteCore:
    return RemoteCore(Host(), context)


@pytest.fixture
def outbox(context: zmq.Context[zmq.Socket[bytes]], remote: RemoteCore) -> Iterator[zmq.Socket[bytes]]:
    """Return the core's end of the way back; at the end both close."""
    socket = context.socket(zmq.PUSH)
    socket.connect(remote.handle.meeting.addresses.from_core)
    yield socket
    socket.close(0)
    remote.shutdown()


def test_a_start_ends_when_what_the_core_says_of_itself_cannot_be_read(
    remote: RemoteCore, outbox: zmq.Socket[bytes]
) -> None:
    outbox.send(b"\xc1 is no msgpack")
    with pytest.raises(EngineDeadError, match="cannot be read"):
        remote.wait_ready()


def test_an_outcome_that_cannot_be_read_is_logged(
    remote: RemoteCore, outbox: zmq.Socket[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    outbox.send(encode_from_core(make_ready()))
    remote.wait_ready()
    outbox.send(b"\xc1 is no msgpack")
    with pytest.raises(FrameError):
        remote.step(wait=True)
    assert "a message from the engine core (of a test) cannot be read" in caplog.text


def test_steps_that_wait_are_handed_on_one_a_turn_also_when_the_core_is_looked_after(
    remote: RemoteCore, outbox: zmq.Socket[bytes]
) -> None:
    step = EngineCoreOutputs(outputs=[], stats=FakeCore(lambda _: []).stats(), timestamp=0.0)
    for _ in range(NUM_STEPS):
        outbox.send(encode_from_core(step))
    outbox.close()  # an AsyncCore that goes ends its core's sockets, and waits for this one
    order: list[str] = []

    def on_outputs(outputs: EngineCoreOutputs) -> list[str]:
        assert outputs == step
        order.append("step")
        asyncio.get_running_loop().call_soon(order.append, "reader")
        return []

    async def run() -> None:
        core = AsyncCore(remote, on_outputs, lambda error, _: pytest.fail(str(error)))
        core.attach()
        for _ in range(2 * NUM_STEPS):
            core.look()
            await asyncio.sleep(0)
        core.detach()

    asyncio.run(run())
    assert order == ["step", "reader"] * NUM_STEPS


class Relay:
    """This notes what is written to it, and in which turn of the event loop."""

    is_open = True

    def __init__(self, outbox: TextOutbox) -> None:
        self.outbox, self.taken, self.written = outbox, list[str](), list[list[str]]()

    def write(self, text: str, num_tokens: int) -> None:
        """Take a text."""
        del num_tokens
        if not self.outbox.holds:
            self.written.append([text])
            return
        if not self.taken:
            self.outbox.relays.append(self)
        self.taken.append(text)

    def flush(self) -> None:
        """Write what was taken."""
        self.written.append(self.taken)
        self.taken = []


def test_steps_of_text_alone_share_a_turn_until_a_task_has_something_to_read(
    remote: RemoteCore, outbox: zmq.Socket[bytes]
) -> None:
    stats, kinds = FakeCore(lambda _: []).stats(), random.choices("tr", k=40)  # text, or something to read
    for i in range(len(kinds)):
        outbox.send(encode_from_core(EngineCoreOutputs(outputs=[], stats=stats, timestamp=float(i))))
    outbox.close()
    texts = TextOutbox()
    relay = Relay(texts)

    def on_outputs(outputs: EngineCoreOutputs) -> list[str]:
        i = int(outputs.timestamp)
        relay.write(str(i), 1)
        texts.is_read |= kinds[i] == "r"
        return []

    async def run() -> None:
        core = AsyncCore(remote, on_outputs, lambda error, _: pytest.fail(str(error)), texts)
        core.attach()
        while sum(map(len, relay.written)) < len(kinds):
            await asyncio.sleep(0)
        core.detach()

    asyncio.run(asyncio.wait_for(run(), 30))
    assert [each for turn in relay.written for each in turn] == [str(i) for i in range(len(kinds))]
    assert relay.written[0] == ["0"]  # at once: nobody knew that others wait
    for turn in relay.written:
        assert len(turn) <= async_core._MOST_STEPS
        assert all(kinds[int(each)] == "t" for each in turn[:-1])


def test_a_write_that_fails_keeps_no_other_text_back(caplog: pytest.LogCaptureFixture) -> None:
    texts = TextOutbox()
    texts.holds = True
    bad, good = Relay(texts), Relay(texts)

    def fail() -> None:
        raise OSError("no connection")

    bad.flush = fail
    for relay in (bad, good):
        relay.write("a", 1)
        relay.write("b", 1)
    assert texts.has_text_alone
    texts.flush()
    assert good.written == [["a", "b"]]
    assert "cannot be written" in caplog.text
    assert not texts.has_text_alone
    texts.flush()
    assert good.written == [["a", "b"]]
