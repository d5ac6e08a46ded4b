"""Run servers as processes, and stream from them with a cheap client that records the time of every event."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
START_SECONDS = 300.0
STOP_SECONDS = 30.0
IDLE_SECONDS, IDLE_SHARE = 8.0, 0.1
"""A server that uses less than this share of a core for these seconds is idle."""
_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
MAX_ERROR = 2000
_EVENT, _DONE = b"data: ", b"data: [DONE]"
_SO_TIMESTAMPNS = 35
"""A socket option of Linux without a name in Python: the system's time of arrival comes with the data."""


class ServerError(RuntimeError):
    """A server has not started, or has answered with an error."""


class RefusedError(ServerError):
    """A server has answered with an error."""

    def __init__(self, status: int, headers: Mapping[str, str], body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status, self.headers = status, headers


@dataclass(frozen=True)
class ServerProcess:
    """A running server."""

    process: subprocess.Popen[bytes]
    port: int

    @property
    def pid(self) -> int:
        """Return the process's id."""
        return self.process.pid

    def end(self, seconds: float = STOP_SECONDS) -> int:
        """Send SIGTERM, as service managers do, and return the exit status. Raises subprocess.TimeoutExpired."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def cpu_seconds(self) -> float:
        """Return the CPU time of all threads of its process, to the nanosecond, without the engine core's."""
        return cpu_seconds(self.pid)

    def wait_idle(self, seconds: float = START_SECONDS) -> None:
        """Wait until it and its engine core are idle, as when every program has been compiled."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.busy_cores() > IDLE_SHARE:
            pass

    def busy_cores(self, seconds: float = IDLE_SECONDS) -> float:
        """Return the cores that it and its descendants use, averaged over some seconds."""
        before = self._all_cpu_seconds()
        time.sleep(seconds)
        return (self._all_cpu_seconds() - before) / seconds

    def _all_cpu_seconds(self) -> float:
        return sum(cpu_seconds(each) for each in (self.pid, *descendants(self.pid)))


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's children, and of theirs."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    pids = [pid]
    for ancestor in pids:  # grows in the loop
        pids += [child for child, parent in parents.items() if parent == ancestor]
    return pids[1:]


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, in seconds; to the nanosecond, unlike /proc's."""
    return time.clock_gettime((~pid << 3) | 2)  # CPUCLOCK_SCHED, as clock_getcpuclockid makes it


@contextlib.contextmanager
def server_process(
    command: Sequence[str], log: Path, *, seconds: float = START_SECONDS, env: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """Run `command` with --host and --port as its last words until the block ends; wait until its port opens.

    `env` is its environment, by default this one's. Raises ServerError, with the end of its log, if it ends before.
    """
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--host", HOST, "--port", str(port)], stdout=out, stderr=out, env=env, start_new_session=True
        )
    try:
        deadline = time.monotonic() + seconds
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"{command[0]} has not started: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield ServerProcess(process, port)
    finally:
        try:
            ServerProcess(process, port).end()
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has left


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


@dataclass
class Streamed:
    """One answer that was streamed: times are of the monotonic clock, in seconds."""

    began: float
    arrivals: list[float] = field(default_factory=list)
    """When the client read each event, except the last ones: the usage, and [DONE]."""
    reached: list[float] = field(default_factory=list)
    """When the system received each of them; the client may have been busy with others."""
    num_tokens: int = 0
    ended: float = 0.0


class _Events:
    """The events of one answer: a plain socket costs the client less than asyncio's streams."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""
        self._head = b""
        self._offset = time.time() - time.monotonic()
        self.answer = Streamed(time.monotonic())
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def read(self) -> None:
        """Read the available data; errors go to `ended`."""
        try:
            piece, told, _, _ = self._connection.recvmsg(1 << 16, 64)
            now = time.monotonic()
            if not self.ended.done():
                self._take(piece, now, _stamp(told, self._offset, now))
        except BlockingIOError:
            return
        except (OSError, ServerError) as error:
            if not self.ended.done():
                self.ended.set_exception(error)

    def _take(self, piece: bytes, now: float, reached: float) -> None:
        if not piece:
            raise ServerError(f"the answer is cut off: {(self._head + self._rest)[-MAX_ERROR:]!r}")
        if not self._head:
            head, end, rest = (self._rest + piece).partition(b"\r\n\r\n")
            if not end:
                self._rest = head
                return
            self._rest, piece, self._head = b"", rest, head
        if piece and not _is_good(self._head):
            raise _refusal(self._head, piece)
        answer, num = self.answer, (self._rest[1 - len(_EVENT) :] + piece).count(_EVENT)
        answer.arrivals += [now] * num
        answer.reached += [reached] * num
        self._rest = self._rest[-600:] + piece  # the usage and [DONE] may come in pieces
        if _DONE in self._rest:
            self._end()

    def _end(self) -> None:
        answer = self.answer
        del answer.arrivals[-2:], answer.reached[-2:]
        tokens = _TOKENS.findall(self._rest)
        if not tokens:
            raise ServerError(f"the answer has no usage: {self._rest[-500:]!r}")
        answer.num_tokens, answer.ended = int(tokens[-1]), time.monotonic()
        self.ended.set_result(None)


def _stamp(told: Sequence[tuple[int, int, bytes]], offset: float, now: float) -> float:
    """Return when the system received the last data, or `now` if it does not tell."""
    for level, kind, data in told:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
            seconds, nanoseconds = struct.unpack("qq", data)
            return seconds + nanoseconds * 1e-9 - offset
    return now


async def stream(port: int, body: Mapping[str, Any], path: str = "/v1/completions") -> Streamed:
    """Make one request on a new connection. Raises RefusedError, and ServerError for an incomplete answer."""
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # Linux only
            connection.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        await loop.sock_connect(connection, (HOST, port))
        events = _Events(connection)
        await loop.sock_sendall(connection, _head(path, len(data)) + data)
        loop.add_reader(connection, events.read)
        try:
            await events.ended
        finally:
            loop.remove_reader(connection)
        return events.answer


async def ask(port: int, body: Mapping[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    """Make one request and return its answer. Raises RefusedError for an error."""
    data = json.dumps(body).encode()
    return json.loads(await _exchange(port, _head(path, len(data), "close") + data))


async def get(port: int, path: str) -> bytes:
    """Make a GET request and return the answer's body. Raises RefusedError for an error."""
    return await _exchange(port, f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())


async def _exchange(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(request)
        head, _, answer = (await reader.read(-1)).partition(b"\r\n\r\n")
    finally:
        writer.close()
    if not _is_good(head):
        raise _refusal(head, answer)
    return answer


def _head(path: str, length: int, connection: str = "keep-alive") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
        f"Connection: {connection}\r\n\r\n"
    ).encode()


def _is_good(head: bytes) -> bool:
    return b" 200 " in head.partition(b"\r\n")[0]


def _refusal(head: bytes, body: bytes) -> ServerError:
    """Return the error in an answer; an answer without a head is cut off."""
    first, *lines = head.decode(errors="replace").strip().split("\r\n")
    words = first.split()
    if len(words) < 2 or not words[1].isdigit():
        return ServerError(f"the answer is cut off: {head + body!r}")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return RefusedError(int(words[1]), headers, body.decode(errors="replace")[:MAX_ERROR])
