"""Start and end servers in separate processes with a tiny model (R1, R7, R25)."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.run import bind
from tests.async_engine.support import nothing_left
from tests.e2e.tiny_engine import CASE
from tests.models.tiny import folder
from tests.server.support import TEMPLATE

pytestmark = pytest.mark.server

START_SECONDS = 60.0
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 100_000, "ignore_eos": True, "stream": True}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def server(tokenizer: str, *words: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a server and wait until its port is open; it is killed at the end if it still runs."""
    port = free_port()
    command = [sys.executable, "-m", "jaxllm.cli", "serve", str(folder(CASE)), "--tokenizer", tokenizer]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--chat-template", TEMPLATE]
    command += ["--hf-overrides", json.dumps({"max_position_embeddings": 50_000}), "--kv-cache-memory-bytes", "64M"]
    command += ["--enforce-eager", "--block-size", "8", "--max-num-seqs", "16", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + START_SECONDS
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                assert process.poll() is None, process.stderr.read() if process.stderr else ""
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield process, port
        finally:
            process.kill()


@contextlib.contextmanager
def stream(port: int) -> Iterator[http.client.HTTPResponse]:
    """Begin a request that goes on for long, and yield its answer once that has begun."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(CHAT), {"content-type": "application/json"})
        with connection.getresponse() as response:
            assert response.status == 200
            # Where the step's program is still being compiled, comments come before the first event.
            assert any(line.startswith(b"data: ") for line in iter(response.readline, b""))
            yield response


def rest(response: http.client.HTTPResponse) -> bytes:
    """Return what still comes of an answer, whether or not it ends well."""
    pieces = []
    with contextlib.suppress(OSError, http.client.HTTPException):
        while line := response.readline():
            pieces.append(line)
    return b"".join(pieces)


def test_r7_told_to_end_it_ends_at_once_and_leaves_nothing(tokenizer: str) -> None:
    with nothing_left(), server(tokenizer) as (process, port), stream(port) as response:
        process.send_signal(signal.SIGTERM)
        events = [line for line in rest(response).splitlines() if line]
        error = json.loads(events[-1].removeprefix(b"data: "))["error"]
        assert (error["code"], "cut off" in error["message"]) == (503, True)
        assert not any(b"[DONE]" in each for each in events)
        assert process.wait(20) == 0


def test_r7_what_has_not_ended_within_the_time_to_drain_is_told_so(tokenizer: str) -> None:
    with server(tokenizer, "--shutdown-timeout", "1") as (process, port), stream(port) as response:
        process.send_signal(signal.SIGTERM)
        assert b'"code":503' in rest(response).splitlines()[-2]
        assert process.wait(20) == 0


def test_r7_what_runs_may_end_within_the_time_to_drain(tokenizer: str) -> None:
    words = ("--shutdown-timeout", "60", "--max-model-len", "64")
    with nothing_left(), server(tokenizer, *words) as (process, port), stream(port) as response:
        process.send_signal(signal.SIGTERM)
        assert rest(response).endswith(b"data: [DONE]\n\n")
        assert process.wait(20) == 0


def test_r7_while_it_drains_it_is_alive_but_takes_nothing(tokenizer: str) -> None:
    """Its port stays open: a probe sees 503, and a client that comes late knows that another server may answer."""

    def ask(method: str, path: str) -> tuple[int, str | None]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        with contextlib.closing(connection):
            connection.request(method, path, json.dumps(CHAT), {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.getheader("retry-after")

    with nothing_left(), server(tokenizer, "--shutdown-timeout", "60") as (process, port), stream(port) as response:
        assert ask("GET", "/health") == (200, None)
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        while ask("GET", "/health") != (503, "1"):
            assert time.monotonic() < deadline
        assert ask("POST", "/v1/chat/completions") == (503, "1")
        assert ask("GET", "/livez") == (200, None)
        assert response.readline() is not None
        process.send_signal(signal.SIGTERM)  # the second time it does not wait
        assert process.wait(20) == 0


def test_a_log_that_nobody_reads_holds_nothing_up(tokenizer: str) -> None:
    """A pipe holds 64 KiB. Lines are in one form, jaxllm's and uvicorn's, and those that were dropped are counted."""
    long_path = "/livez?" + "x" * 1000
    with server(tokenizer) as (process, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with contextlib.closing(connection):
            for _ in range(1500):
                connection.request("GET", long_path)
                with connection.getresponse() as answer:
                    assert answer.status == 200
                    answer.read()
        with stream(port) as response:
            assert response.readline() is not None
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
        assert process.wait(20) == 0
    assert sum(long_path in line for line in lines) < 1500
    form = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (INFO|WARNING) ")
    assert [line for line in lines if not form.match(line)] == []
    assert any("lines of the log were dropped" in line for line in lines)


def kill_core(process: subprocess.Popen[str]) -> None:
    """Kill the engine of a server."""
    children = psutil.Process(process.pid).children()
    (core,) = (each for each in children if "core_process" in " ".join(each.cmdline()))
    core.kill()


def test_r1_its_engine_may_end_before_the_first_request(tokenizer: str) -> None:
    with server(tokenizer) as (process, _):
        kill_core(process)
        assert process.wait(20) == 1


def test_r1_with_its_engine_it_ends_and_says_why(tokenizer: str) -> None:
    with server(tokenizer) as (process, port), stream(port) as response:
        kill_core(process)
        events = rest(response).decode().split("\n\n")
        assert "EngineDeadError" in [event for event in events if event.startswith("data: ")][-1]
        assert process.wait(20) == 1
        assert process.stderr is not None
        assert "SIGKILL" in process.stderr.read().splitlines()[-1]


def test_r25_a_port_in_use_is_told_before_a_model_is_looked_for() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "jaxllm.cli", "serve", "/no/model", "--host", "127.0.0.1", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()[-1:]
    assert f"127.0.0.1:{port} cannot be listened on" in line
    assert "Traceback" not in done.stderr


def test_a_unix_socket_is_the_users_alone_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    args = ServerArgs(uds=str(path))
    bind(args).close()
    assert path.is_socket()
    with contextlib.closing(bind(args)) as listener:
        assert path.stat().st_mode & 0o777 == 0o600
        listener.listen()
        with pytest.raises(VLLMValidationError, match="cannot be listened on") as caught:
            bind(args)
    assert caught.value.parameter == "uds"


def test_a_file_in_the_place_of_a_unix_socket_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(VLLMValidationError, match="uds"):
        bind(ServerArgs(uds=str(path)))
    assert path.read_text() == "mine"
