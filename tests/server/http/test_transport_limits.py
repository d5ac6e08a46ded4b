"""R16: what a connection may send is bounded, as the limits stand by default, in a server's process of its own."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from lib.servers import ServerProcess, server_process

from tests.e2e.tiny_engine import CASE
from tests.models.tiny import folder

pytestmark = pytest.mark.server

NUM_IDLE = 1000
MAX_GROWTH = 50 * 2**20
"""Bytes of memory that an attack may cost the server."""
FEW_FILES = 256
"""The server's soft limit of open files when it starts; it raises it."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def server(tokenizer: str, tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[ServerProcess]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * NUM_IDLE), hard))
    command = [sys.executable, str(repository / "scripts" / "mock_server.py"), str(folder(CASE))]
    command += ["--tokenizer", tokenizer, "--header-timeout", "3", "--tokens-per-second", "1000"]
    limited = ["sh", "-c", f'ulimit -S -n {FEW_FILES}; exec "$@"', "sh", *command]
    try:
        with server_process(limited, tmp_path_factory.mktemp("transport") / "log.txt") as server:
            for _ in range(3):
                complete(server)
            yield server
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Door(NamedTuple):
    """A server's process with a way to connect to it."""

    process: ServerProcess
    connect: Callable[[], socket.socket]

    def exchange(self, *pieces: bytes) -> bytes:
        """Send pieces, until the server has had enough, and return the head of its answer."""
        return exchange_over(self.connect(), *pieces)


@pytest.fixture(scope="module", params=["plain", "tls", "uds"])
def door(
    request: pytest.FixtureRequest, tokenizer: str, tmp_path_factory: pytest.TempPathFactory, repository: Path
) -> Iterator[Door]:
    """Return a server that is reached in one of all ways."""
    directory = tmp_path_factory.mktemp("door")
    command = [sys.executable, str(repository / "scripts" / "mock_server.py"), str(folder(CASE))]
    command += ["--tokenizer", tokenizer, "--tokens-per-second", "1000"]
    path, one = str(directory / "socket"), repository / "tests" / "data" / "tls" / "one"
    if request.param == "tls":
        command += ["--ssl-certfile", f"{one}.pem", "--ssl-keyfile", f"{one}.key"]
    if request.param == "uds":
        process = subprocess.Popen([*command, "--uds", path])
        try:
            until_listening(path, process)
            yield Door(ServerProcess(process, 0), lambda: connect_path(path))
        finally:
            process.terminate()
            process.wait(20)
        return
    context = ssl.create_default_context(cafile=f"{one}.pem")
    with server_process(command, directory / "log.txt") as server:
        if request.param == "tls":
            yield Door(server, lambda: context.wrap_socket(connect(server), server_hostname="127.0.0.1"))
        else:
            yield Door(server, lambda: connect(server))


def connect_path(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(20)
    connection.connect(path)
    return connection


def until_listening(path: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    with socket.socket(socket.AF_UNIX) as probe:
        while probe.connect_ex(path):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)


@contextlib.contextmanager
def bounded_memory(server: ServerProcess) -> Iterator[None]:
    process = psutil.Process(server.pid)
    before = process.memory_info().rss
    yield
    assert process.memory_info().rss - before < MAX_GROWTH


def connect(server: ServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def exchange(server: ServerProcess, *pieces: bytes) -> bytes:
    """Send pieces, until the server has had enough, and return its answer."""
    return exchange_over(connect(server), *pieces)


def exchange_over(opened: socket.socket, *pieces: bytes) -> bytes:
    with contextlib.closing(opened) as connection:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                connection.sendall(piece)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while b"\r\n\r\n" not in answer and (piece := connection.recv(65536)):
                answer += piece
        return answer


def complete(server: ServerProcess) -> float:
    """Make a good request; return how long it took."""
    body = json.dumps({"prompt": [5], "max_tokens": 5, "ignore_eos": True}).encode()
    began = time.monotonic()
    answer = exchange(server, HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    return time.monotonic() - began


def test_r16_a_thousand_idle_connections_disturb_nobody(server: ServerProcess) -> None:
    """A third says nothing, a third begins a request, a third sends a byte now and then."""
    with contextlib.ExitStack() as stack, bounded_memory(server):
        connections = [stack.enter_context(contextlib.closing(connect(server))) for _ in range(NUM_IDLE)]
        for number, connection in enumerate(connections):
            if number % 3:
                connection.sendall(HEAD)
        times = []
        for round_ in range(10):
            times.append(complete(server))
            for connection in connections[2::30]:
                with contextlib.suppress(ConnectionError):
                    connection.send(b"x" if round_ else b"x: ")
        assert sorted(times)[5] < 1
        answers = [read_to_end(each) for each in connections]
    assert {answer[:13] for answer in answers[1::3]} == {b"HTTP/1.1 408 "}
    assert set(answers[::3]) == {b""}


def read_to_end(connection: socket.socket) -> bytes:
    pieces = []
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ([HEAD, b"x: " + b"a" * 65_536, b"\r\n\r\n"], 431),
        ([HEAD, b"a: b\r\n" * 101, b"\r\n"], 431),
        ([b"GET /" + b"a" * 70_000], 431),
        ([HEAD, b"x: ", *[b"a" * 65_536] * 100], 431),
        ([HEAD, b"content-length: %d\r\n\r\n" % (2**25 + 1)], 413),
        ([HEAD, b"content-length: 99999999999999999999\r\n\r\n"], 400),
        ([HEAD, b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"], 400),
        ([HEAD, b"transfer-encoding: chunked\r\n\r\n", *[b"100000\r\n" + b" " * 2**20 + b"\r\n"] * 40], 413),
        ([HEAD, b"content-length: 200000\r\n\r\n" + b"[" * 200_000], 400),
        ([HEAD, b'content-length: 500010\r\n\r\n{"prompt":' + b'{"a":' * 100_000], 400),
    ],
)
def test_r16_what_is_too_large_is_refused(server: ServerProcess, pieces: list[bytes], status: int) -> None:
    with bounded_memory(server):
        assert exchange(server, *pieces).startswith(b"HTTP/1.1 %d " % status)
        assert complete(server) < 5


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ([CHUNKED, b"2\r\n{}\r\n0\r\nx: ", *[b"a" * 65_536] * 100], 431),
        ([CHUNKED, b"2\r\n{}\r\n0\r\n", *[b"a: b\r\n" * 10_000] * 50], 431),
        ([CHUNKED, b"2;", *[b"a" * 65_536] * 100], 431),
        ([CHUNKED, b"zz\r\n"], 400),
        ([HEAD, b"x: ", *[b"a" * 65_536] * 100], 431),
        ([HEAD, b"content-length: %d\r\n\r\n" % (2**25 + 1)], 413),
        ([HEAD + b"connection: Upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\n{}"], 400),
    ],
)
def test_r16_limits_are_the_same_over_tls_and_a_unix_socket(door: Door, pieces: list[bytes], status: int) -> None:
    with bounded_memory(door.process):
        assert door.exchange(*pieces).startswith(b"HTTP/1.1 %d " % status)
        assert door.exchange(ALIVE).startswith(b"HTTP/1.1 200 ")


ALIVE = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
NUM_PIPELINED = 100_000


def test_r16_requests_whose_answers_nobody_reads_are_not_read_on(door: Door) -> None:
    """They stay with the client, once the buffers between are full; others are answered, and nothing is kept."""
    with contextlib.ExitStack() as stack, bounded_memory(door.process):
        for _ in range(8):
            greedy = stack.enter_context(contextlib.closing(door.connect()))
            greedy.settimeout(0.2)
            with contextlib.suppress(TimeoutError, ssl.SSLError):
                for _ in range(NUM_PIPELINED // 8 // 100):
                    greedy.sendall(ALIVE * 100)
        assert door.exchange(ALIVE).startswith(b"HTTP/1.1 200 ")
        with bounded_memory(door.process):
            stack.close()
            assert door.exchange(ALIVE).startswith(b"HTTP/1.1 200 ")
