"""R19: whatever bytes come over the sockets end at most the request that they name."""

from __future__ import annotations

import asyncio
import random
import stat
from pathlib import Path

import msgspec
import pytest
import zmq
from check.wire import fuzz

from jaxllm.engine.transport.sockets import FrontSockets, Meeting, SocketInbox, SocketOutbox
from jaxllm.engine.transport.wire import MAX_FRAME_BYTES, Heartbeat, Shutdown
from jaxllm.exceptions import EngineGenerateError
from tests.async_engine.support import greedy, mock_llm, nothing_left, read, remote_of, tiny_args, tokens_of

NUM_FRAMES = 20_000


def test_r19_decoders_raise_frame_errors_alone() -> None:
    """R19: 20,000 random and mutated frames for both sides; scripts/check.py wire does as many as one likes."""
    tally = fuzz(NUM_FRAMES, seed=19)
    assert tally.num_frames == NUM_FRAMES
    assert tally.num_refused > NUM_FRAMES / 2
    assert tally.num_read > NUM_FRAMES / 100


@pytest.mark.server
def test_r19_a_bad_frame_ends_the_request_that_it_names(tokenizer: str) -> None:
    """R19: real sockets, a live loop; the well-behaved streams next to it go on."""
    rng = random.Random(1)

    async def run() -> None:
        expected = tokens_of(await read(llm, "alone", greedy(max_tokens=60)))
        others = [asyncio.create_task(read(llm, f"{i}", greedy(max_tokens=60))) for i in range(4)]
        victim = asyncio.create_task(read(llm, "victim", greedy(max_tokens=400)))
        await asyncio.sleep(0.1)
        (number,) = [each.core.request_id for each in _requests("victim")]
        out = remote_of(llm)._sockets._out
        for size in range(50):
            out.send_multipart([b"", rng.randbytes(size)], zmq.NOBLOCK)
            out.send_multipart([rng.randbytes(3), rng.randbytes(size), rng.randbytes(5)], zmq.NOBLOCK)
        out.send_multipart([b"just one"], zmq.NOBLOCK)
        assert not victim.done()
        out.send_multipart([number.encode(), b"\x93\x01nothing of ours", b""], zmq.NOBLOCK)
        (end,) = await asyncio.wait_for(asyncio.gather(victim, return_exceptions=True), 2)
        if isinstance(end, BaseException):
            assert isinstance(end, EngineGenerateError)
        else:
            assert end[-1].outputs[0].finish_reason == "error"
            assert "could not be read" in str(end[-1].outputs[0].stop_reason)
        assert [tokens_of(each) for each in await asyncio.gather(*others)] == [expected] * 4
        await llm.check_health()

    def _requests(name: str):
        return [state.request for each, state in llm.front.outputs._requests.items() if each == name]

    with mock_llm(tiny_args(tokenizer), in_process=True, tokens_per_second=100) as llm:
        asyncio.run(run())


@pytest.mark.server
def test_r19_an_outcome_that_cannot_be_read_ends_those_that_run(tokenizer: str) -> None:
    """Nobody knows whose tokens it had; the engine goes on."""

    async def run() -> None:
        tasks = [asyncio.create_task(read(llm, f"{i}", greedy(max_tokens=400))) for i in range(4)]
        await asyncio.sleep(0.1)
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.connect(addresses.from_core)
            await asyncio.to_thread(socket.send, b"\x93 nonsense")
            ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 2)
        assert {type(each) for each in ends} == {EngineGenerateError}
        assert tokens_of(await read(llm, "next", greedy()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Meeting, "close", lambda self: None)  # or nobody else could connect
        with mock_llm(tiny_args(tokenizer), in_process=True, tokens_per_second=100) as llm:
            meeting = remote_of(llm).handle.meeting
            addresses = meeting.addresses
            asyncio.run(run())
    meeting.close()


def test_r19_sockets_lie_where_nobody_else_comes_and_only_until_ready(tokenizer: str) -> None:
    seen: list[int] = []

    def look(meeting: Meeting) -> None:
        assert meeting.folder is not None
        seen.append(stat.S_IMODE(meeting.folder.stat().st_mode))
        assert {path.name for path in meeting.folder.iterdir()} == {"to", "from"}
        close(meeting)

    close = Meeting.close
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Meeting, "close", look)
        with nothing_left(), mock_llm(tiny_args(tokenizer), in_process=True) as llm:
            folder = remote_of(llm).handle.meeting.folder
            assert isinstance(folder, Path)
            assert not folder.exists()
            assert seen == [0o700]
            patch.setattr(Meeting, "close", close)
            assert tokens_of(asyncio.run(read(llm, "a", greedy())))


def test_r19_frames_are_bounded_on_every_socket() -> None:
    with zmq.Context() as context:
        meeting = Meeting.in_process()
        front = FrontSockets(context, meeting)
        inbox, outbox = SocketInbox(context, meeting.addresses), SocketOutbox(context, meeting.addresses)
        for socket in (front._in, front._out, inbox._socket, outbox._socket):
            assert MAX_FRAME_BYTES < socket.getsockopt(zmq.MAXMSGSIZE) <= 2 * MAX_FRAME_BYTES  # type: ignore[operator]
        for end in (front, inbox, outbox):
            end.close()


def test_on_a_network_only_who_has_the_key_is_heard() -> None:
    """Strangers, who may know the addresses, are neither heard nor told anything."""
    meeting = Meeting.on_network("127.0.0.1")
    wrong, _ = zmq.curve_keypair()
    with zmq.Context() as context:
        front = FrontSockets(context, meeting)
        strangers = [msgspec.structs.replace(meeting.addresses, public_key=key) for key in (None, wrong)]
        others = [(SocketInbox(context, each), SocketOutbox(context, each)) for each in strangers]
        for _, outbox in others:
            outbox.send(Heartbeat(1.0, False, False))
        assert not front.poll(0.5)
        inbox, outbox = SocketInbox(context, meeting.addresses), SocketOutbox(context, meeting.addresses)
        outbox.send(Heartbeat(2.0, False, False))
        assert front.poll(5)
        assert front.receive() == Heartbeat(2.0, False, False)
        front.wait_writable(5)
        front.send(Shutdown())
        assert inbox.receive(wait=True) == [Shutdown()]
        for socket in (front, inbox, outbox, *(end for pair in others for end in pair)):
            socket.close()
