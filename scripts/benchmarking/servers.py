"""Servers in processes of their own, and a client that costs little and takes the time of every event."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
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
"""A server that takes less than this share of a core for so long is idle."""
_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_EVENT, _DONE = b"data: ", b"data: [DONE]"


class ServerError(RuntimeError):
    """A server has not started, or has answered with an error."""


@dataclass(frozen=True)
class ServerProcess:
    """A server that runs."""

    pid: int
    port: int

    def cpu_seconds(self) -> float:
        """Return the CPU time of all threads of its process, to the nanosecond; not of the engine core's."""
        return cpu_seconds(self.pid)

    def wait_idle(self, seconds: float = START_SECONDS) -> None:
        """Wait until neither it nor its engine core has much to do, as when every program has been compiled."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            before = self._all_cpu_seconds()
            time.sleep(IDLE_SECONDS)
            if self._all_cpu_seconds() - before < IDLE_SHARE * IDLE_SECONDS:
                return

    def _all_cpu_seconds(self) -> float:
        return sum(cpu_seconds(each) for each in (self.pid, *children(self.pid)))


def children(pid: int) -> list[int]:
    """Return the ids of a process's children."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, in seconds; to the nanosecond, unlike /proc's."""
    return time.clock_gettime((~pid << 3) | 2)  # CPUCLOCK_SCHED, as clock_getcpuclockid makes it


@contextlib.contextmanager
def server_process(
    command: Sequence[str], log: Path, *, seconds: float = START_SECONDS, env: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """Run `command` with --host and --port as its last words until the block ends; wait until its port opens.

    Raises ServerError, with the end of its log, if it ends before.
    """
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--host", HOST, "--port", str(port)], stdout=out, stderr=out, env={**os.environ, **(env or {})}
        )
    try:
        deadline = time.monotonic() + seconds
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"{command[0]} has not started: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield ServerProcess(process.pid, port)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


@dataclass
class Streamed:
    """One answer that was streamed: times are of the monotonic clock, in seconds."""

    began: float
    arrivals: list[float] = field(default_factory=list)
    """One for each event that has come, but for the last ones: the usage, and [DONE]."""
    num_tokens: int = 0
    ended: float = 0.0


async def stream(port: int, body: Mapping[str, Any], path: str = "/v1/completions") -> Streamed:
    """Make one request on a connection of its own. Raises ServerError for an answer that is an error, or not whole."""
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        answer = Streamed(time.monotonic())
        writer.write(_head(path, len(data)) + data)
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise ServerError(f"{head.decode()}{(await reader.read(2000)).decode(errors='replace')}")
        rest = b""
        while _DONE not in rest:
            piece = await reader.read(1 << 16)
            now = time.monotonic()
            if not piece:
                raise ServerError(f"the answer is cut off: {rest[-500:]!r}")
            answer.arrivals += [now] * (rest[1 - len(_EVENT) :] + piece).count(_EVENT)
            rest = rest[-600:] + piece  # the usage and [DONE] may come in pieces
        del answer.arrivals[-2:]
        found = _TOKENS.findall(rest)
        if not found:
            raise ServerError(f"the answer has no usage: {rest[-500:]!r}")
        answer.num_tokens, answer.ended = int(found[-1]), time.monotonic()
        return answer
    finally:
        writer.close()


async def ask(port: int, body: Mapping[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    """Make one request and return its answer. Raises ServerError for one that is an error."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(_head(path, len(data), "close") + data)
        head, _, answer = (await reader.read(-1)).partition(b"\r\n\r\n")
    finally:
        writer.close()
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise ServerError(answer.decode(errors="replace")[:2000])
    return json.loads(answer)


def _head(path: str, length: int, connection: str = "keep-alive") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
        f"Connection: {connection}\r\n\r\n"
    ).encode()
