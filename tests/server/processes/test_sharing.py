"""What several front ends share: counts and bounds on the board, connections of one listener, and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.engine.online.admission import Admission, PromptSpeed, Reservation
from jaxllm.exceptions import LateFirstTokenError, MaxQueuedTokensError, QueueOverflowError, VLLMValidationError
from jaxllm.server.processes.acceptor import Acceptor
from jaxllm.server.processes.board import Board, Column, SharedAdmission, SharedLoad
from jaxllm.server.processes.reports import Family, Sample, merged, registry_of, totals
from jaxllm.server.processes.start import check_several
from tests.server.http.test_tls import DATA


@pytest.fixture
def boards() -> Iterator[tuple[Board, Board]]:
    """Return two views of one board, as two processes have them."""
    one = Board.make(2)
    other = Board(os.dup(one.fd), 2)
    yield one, other
    one.close()
    other.close()


def test_the_bounds_count_the_requests_of_all(boards: tuple[Board, Board]) -> None:
    one, other = (SharedAdmission(3, 100, board=board, row=row) for row, board in enumerate(boards))
    held = Reservation(one, 2)
    held.hold_prompt(60)
    more = Reservation(other, 1)
    with pytest.raises(QueueOverflowError, match="has 3 requests"):
        Reservation(other, 1)
    with pytest.raises(MaxQueuedTokensError, match="60 tokens"):
        more.hold_prompt(41)
    held.release()
    more.hold_prompt(41)
    assert (one.num_rejected, other.num_rejected["max_num_queued_reqs"]) == (dict.fromkeys(one.num_rejected, 0), 1)
    more.release()
    assert (boards[0].total(Column.QUEUED_REQS), boards[0].total(Column.QUEUED_TOKENS)) == (0, 0)


def test_what_a_dead_process_held_is_free_again(boards: tuple[Board, Board]) -> None:
    one, other = (SharedAdmission(1, None, board=board, row=row) for row, board in enumerate(boards))
    one.reserve_reqs(1)
    boards[1].clear(0)
    other.check_room()


class Clock:
    """A clock that is set by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("short_prompts_pass", [True, False])
def test_late_first_tokens_are_refused_as_by_one_process(
    boards: tuple[Board, Board], *, short_prompts_pass: bool
) -> None:
    """Random prompts come to two processes, and all of them to a third that is alone: it refuses the same ones."""
    clock, source = Clock(), random.Random()
    alone = Admission(None, None, 2000.0, PromptSpeed(clock), short_prompts_pass=short_prompts_pass)
    pair = [
        SharedAdmission(
            None, None, 2000.0, PromptSpeed(clock), short_prompts_pass=short_prompts_pass, board=board, row=row
        )
        for row, board in enumerate(boards)
    ]
    held: list[tuple[Reservation, Reservation]] = []
    for _ in range(400):
        clock.now += source.random()
        if held and source.random() < 0.55:
            has_output = source.random() < 0.9
            for reservation in held.pop(source.randrange(len(held))):
                if has_output:
                    reservation.release_prompt()
                reservation.release()
            continue
        length, answers = int(10 ** source.uniform(0, 4)), []
        both = Reservation(source.choice(pair), 1), Reservation(alone, 1)
        for reservation in both:
            try:
                reservation.hold_prompt(length)
                answers.append("")
            except LateFirstTokenError as error:
                answers.append(str(error))
        assert answers[0] == answers[1]
        if not answers[0]:
            held.append(both)
        assert sum(map(sum, boards[0].lengths)) == alone.num_tokens
    assert alone.num_rejected["max_ttft_ms"] > 0
    boards[0].clear(0)
    boards[0].clear(1)
    assert [sum(lengths) for lengths in boards[1].lengths] == [0, 0], "the dead wait for nothing"


def test_numbers_are_given_once(boards: tuple[Board, Board]) -> None:
    one, other = boards[0].arrivals(), boards[1].arrivals()
    assert [next(one), next(other), next(other), next(one)] == [0, 1, 2, 3]
    assert (boards[0].next_adapter(), boards[1].next_adapter()) == (1, 2)


def test_the_load_is_that_of_all(boards: tuple[Board, Board]) -> None:
    one, other = (SharedLoad(board, row) for row, board in enumerate(boards))
    with one.counted(), one.counted(), other.counted():
        assert (one.total(), other.total(), one.num_requests) == (3, 3, 2)
    assert one.total() == 0


def test_connections_go_to_whoever_has_the_fewest(boards: tuple[Board, Board]) -> None:
    """Two acceptors wait at one queue. The first has two connections already: the next two are the other's."""
    asyncio.run(accept_four(boards))
    assert boards[0].least_connections() == 0, "nobody accepts any more"


async def accept_four(boards: tuple[Board, Board]) -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(socket.create_server(("127.0.0.1", 0))))
        views = [stack.enter_context(contextlib.closing(socket.socket(fileno=os.dup(listener.fileno())))) for _ in "ab"]
        made: list[list[asyncio.Protocol]] = [[], []]
        acceptors = []
        for row, (board, view, mine) in enumerate(zip(boards, views, made, strict=True)):
            count = 2 if row == 0 else 0
            acceptors.append(Acceptor(view, board, row, lambda mine=mine, count=count: count + len(mine)))

        def maker(mine: list[asyncio.Protocol]) -> asyncio.Protocol:
            mine.append(asyncio.Protocol())
            return mine[-1]

        for acceptor, mine in zip(acceptors, made, strict=True):
            acceptor.begin(lambda mine=mine: maker(mine), None, 16)
        for number in range(1, 5):
            stack.enter_context(contextlib.closing(socket.create_connection(listener.getsockname())))
            while boards[0].get(0, Column.CONNECTIONS) + boards[0].get(1, Column.CONNECTIONS) != 2 + number:
                await asyncio.sleep(0.001)
        assert len(made[1]) - len(made[0]) == 2
        for acceptor in acceptors:
            acceptor.end()


class Echo(asyncio.Protocol):
    """Sends back what comes."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_connections_may_be_local_and_encrypted(
    tmp_path: Path, family: socket.AddressFamily, *, is_encrypted: bool
) -> None:
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=str(DATA / "one.pem"))
    ours.load_cert_chain(DATA / "one.pem", DATA / "one.key")
    theirs.check_hostname = False

    def talk(address: Any) -> bytes:
        with socket.socket(family) as plain:
            plain.settimeout(10)
            plain.connect(address)
            with theirs.wrap_socket(plain) if is_encrypted else plain as connection:
                connection.sendall(b"abc")
                return connection.recv(3)

    async def run() -> bytes:
        with contextlib.closing(Board.make(1)) as board, socket.socket(family) as listener:
            listener.bind(str(tmp_path / "socket") if family == socket.AF_UNIX else ("127.0.0.1", 0))
            acceptor = Acceptor(listener, board, 0, lambda: 0)
            acceptor.begin(Echo, ours if is_encrypted else None, 16)
            try:
                return await asyncio.to_thread(talk, listener.getsockname())
            finally:
                acceptor.end()

    assert uvloop.run(run()) == b"abc"


def counter(value: float, created: float, name: str = "requests", **labels: str) -> Family:
    samples = [Sample(f"{name}_total", labels, value), Sample(f"{name}_created", labels, created)]
    return Family(name, "Requests.", "counter", samples)


def test_counts_are_added_and_processes_shown_apart() -> None:
    cpu = [counter(value, 1.0, "process_cpu_seconds", api_server=str(row)) for row, value in enumerate((3.0, 4.0))]
    reports = [[counter(2.0, 50.0, status="2xx"), cpu[0]], [counter(5.0, 40.0, status="2xx"), cpu[1]]]
    registry = registry_of(merged(reports))
    assert registry.get_sample_value("requests_total", {"status": "2xx"}) == 7.0
    assert registry.get_sample_value("requests_created", {"status": "2xx"}) == 40.0
    assert registry.get_sample_value("process_cpu_seconds_total", {"api_server": "1"}) == 4.0
    assert [each.name for each in totals(reports[0])] == ["requests"], "of a process that has ended, its counts stay"


def test_adapters_in_use_are_those_of_all() -> None:
    def gauge(waiting: str, running: str, time: float) -> Family:
        labels = {"max_lora": "2", "waiting_lora_adapters": waiting, "running_lora_adapters": running}
        return Family("vllm:lora_requests_info", "", "gauge", [Sample("vllm:lora_requests_info", labels, time)])

    (family,) = merged([[gauge("", "b,a", 7.0)], [gauge("c", "a", 8.0)]])
    assert [
        (each.labels["waiting_lora_adapters"], each.labels["running_lora_adapters"]) for each in family.samples
    ] == [("c", "a,b")]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("disable_frontend_multiprocessing", {"disable_frontend_multiprocessing": True}),
        ("uvicorn_kwargs", {}),
    ],
)
def test_what_one_process_alone_can_do_is_refused_by_name(name: str, arguments: dict[str, object]) -> None:
    more = {"root_path": "/a"} if name == "uvicorn_kwargs" else {}
    with pytest.raises(VLLMValidationError, match=f"^{name} needs api_server_count=1: .* Leave one") as refused:
        check_several(ServerArgs(api_server_count=2, **arguments), more)  # pyright: ignore[reportArgumentType]
    assert refused.value.parameter == name
    check_several(ServerArgs(api_server_count=2), {})
