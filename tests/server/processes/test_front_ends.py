"""Two front ends of one engine on one port: kills, bounds, metrics, pauses, adapters and ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.async_engine.support import nothing_left
from tests.e2e.tiny_engine import CASE
from tests.models.tiny import folder
from tests.server.grpc_support import client_of, message_of
from tests.server.support import TEMPLATE, Answer
from tests.server.test_run import free_port

pytestmark = pytest.mark.server

SCRIPT = Path(__file__).parents[3] / "scripts" / "mock_server.py"
MODULE = "jaxllm.server.front_end"
MOST_REQUESTS = 12
START_SECONDS = 120.0
ENV = {"JAXLLM_SERVER_DEV_MODE": "1", "JAXLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def words_of(process: psutil.Process) -> list[str]:
    """Return a process's command line; none once it has ended."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


@dataclass
class Pair:
    """A server with two front ends and a core without a model."""

    process: subprocess.Popen[str]
    port: int
    grpc_port: int

    def fronts(self) -> list[psutil.Process]:
        """Return the processes of front ends."""
        return [each for each in psutil.Process(self.process.pid).children() if MODULE in words_of(each)]

    def core(self) -> psutil.Process:
        """Return the core's process."""
        (core,) = (each for each in psutil.Process(self.process.pid).children() if MODULE not in words_of(each))
        return core

    def grpc_server(self) -> int | None:
        """Return the id of the front end that listens on gRPC's port."""
        for front in self.fronts():
            with contextlib.suppress(psutil.Error):
                if any(each.laddr[1:] == (self.grpc_port,) for each in listening(front)):
                    return front.pid
        return None

    def connections(self) -> dict[int, int]:
        """Return the number of open connections of each front end."""
        counts: dict[int, int] = {}
        for front in self.fronts():
            with contextlib.suppress(psutil.Error):
                counts[front.pid] = sum(each.status == "ESTABLISHED" for each in front.net_connections(kind="tcp"))
        return counts

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """Send a request on a new connection, which goes to the front end with the fewest."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())

    def metrics(self) -> Mapping[str, float]:
        """Return the sums over all labels by the samples' names."""
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(self.ask("GET", "/metrics").body.decode()):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    def load(self) -> int:
        """Return what /load says."""
        return self.ask("GET", "/load").json["server_load"]

    def is_whole(self) -> bool:
        """Return whether both front ends take connections: one takes all while the other starts."""
        with contextlib.suppress(ConnectionRefusedError), contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(contextlib.closing(socket.create_connection(("127.0.0.1", self.port))))
                time.sleep(0.02)
            counts = self.connections()
            return len(counts) == 2 and all(counts.values())
        return False


def listening(process: psutil.Process) -> list[Any]:
    """Return the sockets on which a process listens."""
    return [each for each in process.net_connections(kind="tcp") if each.status == "LISTEN"]


@contextlib.contextmanager
def starting(tokenizer: str, *words: str, log: int = subprocess.DEVNULL) -> Iterator[Pair]:
    """Begin to start a server, which is ended after a block; `log` is its standard error."""
    port, grpc_port = free_port(), free_port()
    command = [sys.executable, str(SCRIPT), str(folder(CASE)), "--tokenizer", tokenizer, "--chat-template", TEMPLATE]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--served-model-name", "tiny"]
    command += ["--api-server-count", "2", "--tokens-per-second", "50", "--max-num-seqs", "64", "--enable-lora"]
    command += ["--grpc-port", str(grpc_port), "--max-ttft-ms", "60000"]
    command += ["--hf-overrides", json.dumps({"max_position_embeddings": 50_000}), *words]
    with subprocess.Popen(command, env=os.environ | ENV, stderr=log, text=True) as process:
        try:
            yield Pair(process, port, grpc_port)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


@contextlib.contextmanager
def started(tokenizer: str, *words: str) -> Iterator[Pair]:
    """Start a server, and wait until both front ends serve."""
    with starting(tokenizer, *words) as pair:
        until(pair.is_whole, START_SECONDS)
        yield pair


@pytest.fixture(scope="module")
def pair(tokenizer: str) -> Iterator[Pair]:
    """Return a server that takes a dozen requests at once, and has an adapter. All end when its parent is killed."""
    words = "--max-num-queued-reqs", str(MOST_REQUESTS), "--lora-modules", f"first={Path(__file__).parent}"
    with nothing_left(), started(tokenizer, *words) as pair:
        yield pair
        until(pair.is_whole)
        with streams(pair, 2):
            ends_with(pair, signal.SIGKILL)


@contextlib.contextmanager
def streams(pair: Pair, count: int, max_tokens: int = 40_000) -> Iterator[list[http.client.HTTPResponse]]:
    """Begin some long answers, each on a connection of its own, and yield them."""
    body = json.dumps({"prompt": "ab", "max_tokens": max_tokens, "ignore_eos": True, "stream": True})
    with contextlib.ExitStack() as stack:
        answers = []
        for _ in range(count):
            connection = http.client.HTTPConnection("127.0.0.1", pair.port, timeout=20)
            stack.enter_context(contextlib.closing(connection))
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            answers.append(stack.enter_context(connection.getresponse()))
            assert answers[-1].status == 200
            assert answers[-1].readline().startswith(b"data: ")
        yield answers


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until a condition is true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not come about in time"
        time.sleep(0.05)


def is_alive(answer: http.client.HTTPResponse) -> bool:
    """Return whether an answer goes on: a token comes every 20 ms, after those that have come."""
    deadline = time.monotonic() + 0.3
    with contextlib.suppress(OSError, http.client.HTTPException):
        while answer.readline():
            if time.monotonic() > deadline:
                return True
    return False


def ends_with(pair: Pair, number: signal.Signals) -> int:
    """Send the parent a signal; return its status once front ends and core have ended too, and the port is free."""
    processes = [*pair.fronts(), pair.core()]
    pair.process.send_signal(number)
    status = pair.process.wait(10)
    until(lambda: not any(each.is_running() for each in processes), 10)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", pair.port))
    return status


def at_rest(pair: Pair) -> bool:
    """Return whether nothing runs or waits."""
    metrics = pair.metrics()
    running = metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]
    return running == 0 == metrics["vllm:kv_cache_usage_perc"] and pair.load() == 0


def test_streams_are_shared_evenly_and_so_are_the_bounds(pair: Pair) -> None:
    before = pair.metrics()["vllm:admission_rejections_total"]
    with streams(pair, MOST_REQUESTS):
        assert sorted(pair.connections().values()) == pytest.approx([MOST_REQUESTS / 2] * 2, abs=3)
        assert pair.load() == MOST_REQUESTS
        for _ in range(4):
            refused = pair.ask("POST", "/v1/completions", {"prompt": "ab"})
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        until(lambda: pair.metrics()["vllm:num_requests_running"] == MOST_REQUESTS)
    until(lambda: at_rest(pair))
    until(lambda: pair.metrics()["vllm:admission_rejections_total"] == before + 4)


def test_any_front_end_shows_the_counts_of_all(pair: Pair) -> None:
    time.sleep(0.7)  # a front end reports twice a second
    before = pair.metrics()
    for _ in range(10):
        assert pair.ask("POST", "/v1/completions", {"prompt": "abc", "max_tokens": 3}).status == 200
    expected = {"request_success_total": 10, "prompt_tokens_total": 30, "generation_tokens_total": 30}
    expected |= {"time_to_first_token_seconds_count": 10, "iteration_tokens_total_sum": 60}

    def grown() -> dict[str, float]:
        after = pair.metrics()
        return {name: after[f"vllm:{name}"] - before[f"vllm:{name}"] for name in expected}

    until(lambda: grown() == expected)
    assert [grown() for _ in range(4)] == [expected] * 4
    metrics = pair.ask("GET", "/metrics").body.decode()
    assert all(f'process_resident_memory_bytes{{api_server="{name}"}}' in metrics for name in ("0", "1", "parent"))


def test_a_front_end_that_is_killed_takes_its_own_connections_only(pair: Pair) -> None:
    until(pair.is_whole)
    before = pair.metrics()
    with streams(pair, 8) as answers:
        until(lambda: pair.metrics()["vllm:generation_tokens_total"] > before["vllm:generation_tokens_total"] + 80)
        counted = pair.metrics()
        victim = pair.fronts()[0]
        num_lost = pair.connections()[victim.pid]
        assert 0 < num_lost < 8
        victim.kill()
        assert sum(is_alive(each) for each in answers) == 8 - num_lost
        until(lambda: pair.metrics()["vllm:num_requests_running"] == 8 - num_lost)
        assert pair.load() == 8 - num_lost
        after = pair.metrics()
        names = [name for name in counted if name.endswith(("_total", "_count", "_bucket")) and "process" not in name]
        names = [name for name in names if not name.startswith("python_")]
        assert [name for name in names if after[name] < counted[name]] == []
        assert pair.ask("GET", "/health").status == 200
        until(lambda: len(pair.fronts()) == 2 and victim.pid not in pair.connections())
    until(lambda: at_rest(pair))
    until(pair.is_whole)
    assert pair.ask("POST", "/reset_prefix_cache").json == {"success": True}


def test_a_pause_holds_for_all_and_for_those_who_come_later(pair: Pair) -> None:
    until(pair.is_whole)
    with streams(pair, 4) as answers:
        assert pair.ask("POST", "/pause").json == {"status": "paused"}
        assert all(b'"finish_reason":"abort"' in answer.read() for answer in answers)
    pair.fronts()[1].kill()
    until(lambda: len(pair.fronts()) == 2)
    until(pair.is_whole)
    assert [pair.ask("GET", "/is_paused").json for _ in range(4)] == [{"is_paused": True}] * 4
    assert pair.ask("POST", "/resume").json == {"status": "resumed"}
    assert [pair.ask("GET", "/is_paused").json for _ in range(4)] == [{"is_paused": False}] * 4


def test_a_sleep_holds_for_all_and_for_those_who_come_later(pair: Pair) -> None:
    def states(name: str) -> list[Any]:
        return [pair.ask("GET", f"/{name}").json["is_sleeping"] for _ in range(6)]

    def is_in_state(state: str) -> bool:
        lines = pair.ask("GET", "/metrics").body.decode().splitlines()
        [line] = [line for line in lines if "engine_sleep_state{" in line and f'"{state}"' in line]
        return line.endswith(" 1.0")

    until(pair.is_whole)
    pid = pair.core().pid
    with streams(pair, 4) as answers:
        assert pair.ask("POST", "/sleep?level=2").status == 200
        assert all(b'"finish_reason":"abort"' in answer.read() for answer in answers)
    pair.fronts()[1].kill()
    until(lambda: len(pair.fronts()) == 2)
    until(lambda: sum(pair.ask("GET", "/health").status == 503 for _ in range(6)) == 6)
    assert states("is_sleeping") == [True] * 6
    assert is_in_state("discard_all")
    assert pair.ask("POST", "/v1/completions", {"prompt": "ab", "max_tokens": 2}).status == 503
    assert pair.ask("POST", "/wake_up?tags=weights").status == 200
    assert states("is_sleeping") == [True] * 6
    assert pair.ask("POST", "/wake_up?tags=kv_cache").status == 200
    assert states("is_sleeping") == [False] * 6
    assert is_in_state("awake")
    assert pair.core().pid == pid
    assert pair.ask("POST", "/v1/completions", {"prompt": "ab", "max_tokens": 2}).status == 200


def test_a_wake_up_waits_for_a_sleep_at_another_front_end(pair: Pair) -> None:
    until(pair.is_whole)
    with ThreadPoolExecutor() as pool, streams(pair, 4, max_tokens=150):
        sleeping = pool.submit(pair.ask, "POST", "/sleep?mode=wait")
        until(lambda: all(pair.ask("GET", "/is_sleeping").json["is_sleeping"] for _ in range(6)))
        assert not sleeping.done()
        waking = list(pool.map(lambda _: pair.ask("POST", "/wake_up").status, range(4)))
        assert (sleeping.result().status, waking) == (200, [200] * 4)
    assert [pair.ask("GET", "/is_sleeping").json for _ in range(4)] == [{"is_sleeping": False}] * 4
    assert pair.ask("POST", "/v1/completions", {"prompt": "ab", "max_tokens": 2}).status == 200


def test_adapters_are_known_to_all(pair: Pair) -> None:
    def names() -> list[set[str]]:
        return [{each["id"] for each in pair.ask("GET", "/v1/models").json["data"]} for _ in range(4)]

    path = str(Path(__file__).parent)  # a core without a model reads nothing
    for name in ("one", "two"):
        assert pair.ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}).status == 200
    assert names() == [{"tiny", "first", "one", "two"}] * 4
    assert pair.ask("POST", "/v1/completions", {"model": "two", "prompt": "ab", "max_tokens": 2}).status == 200
    for name in ("one", "first"):
        assert pair.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}).status == 200
    assert names() == [{"tiny", "two"}] * 4
    pair.fronts()[0].kill()
    until(lambda: len(pair.fronts()) == 2)
    until(pair.is_whole)
    assert names() == [{"tiny", "two"}] * 4, "also after a start of another front end"


def test_the_first_serves_grpc_and_so_does_its_successor(pair: Pair) -> None:
    request = message_of({"prompt": [5], "max_tokens": 3, "ignore_eos": True})

    def num_tokens() -> int:
        with client_of(f"127.0.0.1:{pair.grpc_port}") as client:
            return client.whole(request).usage.completion_tokens

    first = pair.grpc_server()
    assert first is not None
    assert num_tokens() == 3
    os.kill(first, signal.SIGKILL)
    until(lambda: pair.grpc_server() not in (first, None))
    assert num_tokens() == 3
    until(pair.is_whole)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/scale_elastic_ep", {"new_data_parallel_size": 2}),
        ("GET", "/v1/responses/resp_1", None),
        ("DELETE", "/v1/responses/resp_1", None),
        ("POST", "/v1/responses/resp_1/cancel", None),
        ("POST", "/v1/responses", {"input": "a", "background": True}),
        ("POST", "/v1/responses", {"input": "a", "store": True}),
        ("POST", "/v1/responses", {"input": "a", "previous_response_id": "resp_1"}),
    ],
)
def test_what_lives_in_one_process_is_refused_by_name(pair: Pair, method: str, path: str, body: Any) -> None:
    answer = pair.ask(method, path, body)
    assert (answer.status, "api_server_count=1" in answer.json["error"]["message"]) == (400, True)


def test_a_response_is_not_stored(pair: Pair) -> None:
    answer = pair.ask("POST", "/v1/responses", {"input": "a", "max_output_tokens": 2})
    assert (answer.status, answer.json["store"]) == (200, False)


def test_sigterm_during_the_start_leaves_nothing(tokenizer: str) -> None:
    with nothing_left(), starting(tokenizer) as pair:
        until(lambda: len(pair.fronts()) == 2)
        assert ends_with(pair, signal.SIGTERM) in (0, -signal.SIGTERM)  # in a moment the engine is ready


def test_what_a_front_end_refuses_at_its_start_ends_the_server(tokenizer: str) -> None:
    with nothing_left(), starting(tokenizer, "--lora-modules", "tiny=/x", log=subprocess.PIPE) as pair:
        _, log = pair.process.communicate(timeout=START_SECONDS)
        assert pair.process.returncode == 1
        assert "VLLMValidationError: The name 'tiny' is in use" in log


def test_front_ends_that_die_at_their_start_come_again_and_a_dead_core_ends_all(tokenizer: str) -> None:
    with nothing_left(), contextlib.ExitStack() as stack:
        pair = stack.enter_context(starting(tokenizer))
        until(lambda: len(pair.fronts()) == 2)
        for front in pair.fronts():
            front.kill()
        until(pair.is_whole, START_SECONDS)
        answers = stack.enter_context(streams(pair, 4))
        pair.core().kill()
        began = time.monotonic()
        for answer in answers:
            assert b'"error"' in answer.read()
        assert time.monotonic() - began < 10
        assert pair.process.wait(20) == 1


def test_r7_all_drain_and_then_end(tokenizer: str) -> None:
    with nothing_left(), started(tokenizer, "--shutdown-timeout", "30") as pair:
        with streams(pair, 6, max_tokens=100) as answers:
            pair.process.send_signal(signal.SIGTERM)
            until(lambda: pair.ask("GET", "/health").status == 503)
            assert pair.ask("GET", "/livez").status == 200
            assert all(answer.read().endswith(b"data: [DONE]\n\n") for answer in answers)
        assert pair.process.wait(20) == 0
