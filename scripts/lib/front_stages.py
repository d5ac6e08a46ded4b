"""Measure where a streamed token's processor time goes: each stage alone, with the parts that a server joins."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvloop

from jaxllm.core_messages import EngineCoreOutputs, EngineCoreRequest
from jaxllm.engine.client.remote_client import RemoteClient
from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.engine.online.admission import Admission
from jaxllm.engine.online.gate import Gate
from jaxllm.engine.online.request_stream import RequestOutputCollector
from jaxllm.engine.online.running_requests import RunningRequests
from jaxllm.engine.transport.wire import Add, FromCore, decode_from_core, encode_from_core
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.server.http.connection import ChunkRelay
from jaxllm.server.http.sse import TextFrame
from jaxllm.server.openai.completion_protocol import CompletionResponseChoice, CompletionStreamResponse
from jaxllm.server.processes.front_process import FrontProcess
from jaxllm.server.processes.relay import Relay
from jaxllm.text.tokenizer import Tokenizer
from lib.mock_core import MockCore, start_mock

STEPS = 200
_PIECE = b"x" * 250
"""A piece as long as the frame of a completion's token."""


def measure_stages(model: Path, num_streams: int) -> dict[str, Any]:
    """Return the processor time of each stage in microseconds per token, with one token per stream in each step."""
    return uvloop.run(_measure(model, num_streams))


async def _measure(model: Path, num: int) -> dict[str, Any]:
    tokenizers: list[Tokenizer | None] = []
    core, ready = start_mock(EngineArgs(model=str(model), max_num_seqs=num), tokenizers.append)
    running = RunningRequests(FrontEnd(ready, tokenizers[0], None), Admission(None, None), Gate())
    streams = [await _begin(running, cast(MockCore, core), index) for index in range(num)]
    running.take_outcome(core.step())
    readers = [asyncio.create_task(_read(stream)) for stream in streams]
    await asyncio.sleep(0)
    frames = [encode_from_core(core.step()) for _ in range(3 * STEPS)]
    gc.freeze()
    decoding = _per_token(decode_from_core, frames, num)
    parts: list[tuple[str, float]] = [("read the core's message", decoding)]
    before = 0.0
    for name, frame in (("find the stream, make its text, count", None), ("make the frame and the chunk", _frame())):
        for stream in streams:
            stream.relay_to(_relay(lambda _piece: None, frame))
        steps = [cast(EngineCoreOutputs, decode_from_core(each)) for each in frames[:STEPS]]
        frames = frames[STEPS:]
        taking = _per_token(partial(_take, running), steps, num)
        parts.append((name, taking - before))
        before = taking
    for task in readers:
        task.cancel()
    parts.append(("uvloop's write, and the system's send on the loopback", await _measure_writes(num)))
    stages = {name: round(cost, 2) for name, cost in parts}
    return {"streams": num, "us_per_token": stages | {"sum": round(sum(cost for _, cost in parts), 2)}}


async def _begin(running: RunningRequests, core: MockCore, index: int) -> RequestOutputCollector:
    async def enter() -> None:
        pass

    params = SamplingParams(max_tokens=4 * STEPS, ignore_eos=True, seed=97 * index, output_kind=RequestOutputKind.DELTA)
    name, prompt = f"cmpl-{index:032x}-0", {"prompt_token_ids": [8, 9, 10]}
    request, stream = await running.take(name, prompt, params, None, None, 0, None, enter=enter)
    core.add_request(request.core)
    return stream


def _take(running: RunningRequests, step: EngineCoreOutputs) -> None:
    running.take_outcome(step)
    running.outbox.flush()


async def _read(stream: RequestOutputCollector) -> None:
    while True:
        await stream.get()


def _frame() -> TextFrame:
    def chunk(text: str) -> Any:
        choices = [CompletionResponseChoice(index=0, text=text)]
        return CompletionStreamResponse(id=f"cmpl-{'0' * 32}", created=0, model="a model's name", choices=choices)

    return TextFrame.of(chunk)


def _relay(write: Callable[[bytes], None], frame: TextFrame | None) -> Any:
    """Return a relay that makes frames and gives them to `write`, or one that does nothing."""
    if frame is None:
        return _Nowhere()
    relay = ChunkRelay(write, is_open=True)
    relay.frames = frame.event
    return relay


def measure_messages(model: Path, num_streams: int, num_fronts: int) -> dict[str, Any]:
    """Return the processor time in microseconds per token of the messages between the core and several front ends: in
    the core, and in the parent, which gives each front end its part. The system's share of sending them is not in it.
    """
    core, ready = start_mock(EngineArgs(model=str(model), max_num_seqs=num_streams))
    remote = _Remote()
    relay = Relay(cast(RemoteClient, remote), ready)
    fronts = [_Front() for _ in range(num_fronts)]
    for index in range(num_streams):
        params = SamplingParams(max_tokens=4 * STEPS, ignore_eos=True, seed=97 * index)
        request = EngineCoreRequest(
            request_id=str(index),
            prompt_token_ids=[8, 9, 10],
            sampling_params=params,
            eos_token_id=None,
            max_tokens=4 * STEPS,
            seed=97 * index,
            arrival_time=0.0,
        )
        core.add_request(request)
        relay.take(cast(FrontProcess, fronts[index % num_fronts]), Add(request))

    def pass_on(frame: bytes) -> None:
        remote.step = cast(EngineCoreOutputs, decode_from_core(frame))
        relay.pass_on()

    steps = [core.step() for _ in range(STEPS)]
    costs = {
        "core: encode": _per_token(encode_from_core, steps, num_streams),
        "parent: read, divide, encode": _per_token(pass_on, [encode_from_core(each) for each in steps], num_streams),
    }
    stages = {name: round(cost, 2) for name, cost in costs.items()}
    return {"streams": num_streams, "front_ends": num_fronts, "us_per_token": stages}


class _Remote:
    """A core's client that has one step."""

    step: EngineCoreOutputs | None = None

    def add_request(self, request: EngineCoreRequest) -> None:
        """Do nothing."""

    def take_outputs(self) -> EngineCoreOutputs | None:
        """Return the step once."""
        step, self.step = self.step, None
        return step


class _Front:
    """A front end whose messages are encoded and dropped."""

    def __init__(self) -> None:
        self.sequences, self.kept = set[str](), set[str]()

    def add(self, request: EngineCoreRequest) -> list[str]:
        """Note a request and return its sequences."""
        self.sequences.add(request.request_id)
        return [request.request_id]

    def send(self, message: FromCore) -> None:
        """Encode a message."""
        encode_from_core(message)


class _Nowhere:
    """A relay that drops texts."""

    is_open = True

    def write(self, text: str, num_tokens: int) -> None:
        """Do nothing."""


def _per_token[Step](take: Callable[[Step], Any], steps: Sequence[Step], num: int) -> float:
    """Return the processor time of a median step, in microseconds per token."""
    costs = []
    for step in steps:
        began = time.thread_time()
        take(step)
        costs.append(time.thread_time() - began)
    return statistics.median(costs) / num * 1e6


async def _measure_writes(num: int) -> float:
    """Return the time of a small write to each of some connections, in microseconds."""
    transports: list[asyncio.Transport] = []

    class Kept(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            transports.append(cast(asyncio.Transport, transport))

    server = await asyncio.get_running_loop().create_server(Kept, "127.0.0.1", 0, backlog=num)
    with _clients(num, server.sockets[0].getsockname()) as clients:
        while len(transports) < num:
            await asyncio.sleep(0.01)

        def write(_step: int) -> None:
            for transport in transports:
                transport.write(_PIECE)

        costs = []
        for step in range(STEPS):
            costs.append(_per_token(write, [step], num))
            await asyncio.sleep(0)
            for client in clients:
                client.recv(1 << 16)
        for transport in transports:
            transport.abort()
    server.close()
    return statistics.median(costs)


@contextlib.contextmanager
def _clients(num: int, address: tuple[str, int]) -> Iterator[list[socket.socket]]:
    """Connect to a server."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(address)) for _ in range(num)]
