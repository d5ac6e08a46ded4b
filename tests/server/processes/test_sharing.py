"""What several front ends share: counts and bounds on the board, connections of one listener, and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.engine.online.admission import Reservation
from jaxllm.exceptions import MaxQueuedTokensError, QueueOverflowError, VLLMValidationError
from jaxllm.server.processes.acceptor import Acceptor
from jaxllm.server.processes.board import Board, Column, SharedAdmission, SharedLoad
from jaxllm.server.processes.reports import Family, Sample, merged, registry_of, totals
from jaxllm.server.processes.start import check_several


@pytest.fixture
def boards() -> Iterator[tuple[Board, Board]]:
    """Return two views of one board, as two processes have them."""
    one = Board.make(2)
    other = Board(os.dup(one.fd), 2)
    yield one, other
    one.close()
    other.close()


def test_the_bounds_count_the_requests_of_all(boards: tuple[Board, Board]) -> None:
    one, other = (SharedAdmission(3, 100, board, row) for row, board in enumerate(boards))
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
    one, other = (SharedAdmission(1, None, board, row) for row, board in enumerate(boards))
    one.reserve_reqs(1)
    boards[1].clear(0)
    other.check_room()


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
            while len(made[0]) + len(made[1]) < number:
                await asyncio.sleep(0.001)
        assert len(made[1]) - len(made[0]) == 2
        for acceptor in acceptors:
            acceptor.end()


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
        ("grpc_port", {"grpc_port": 0}),
        ("disable_frontend_multiprocessing", {"disable_frontend_multiprocessing": True}),
        ("max_ttft_ms", {}),
        ("uvicorn_kwargs", {}),
    ],
)
def test_what_one_process_alone_can_do_is_refused_by_name(name: str, arguments: dict[str, object]) -> None:
    more = {"root_path": "/a"} if name == "uvicorn_kwargs" else {}
    ttft = 100.0 if name == "max_ttft_ms" else None
    with pytest.raises(VLLMValidationError, match=f"^{name} needs api_server_count=1: ") as refused:
        check_several(ServerArgs(api_server_count=2, **arguments), ttft, more)  # pyright: ignore[reportArgumentType]
    assert refused.value.parameter == name
    check_several(ServerArgs(api_server_count=2), None, {})
