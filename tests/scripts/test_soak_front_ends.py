"""scripts/check.py soak --api-server-count 2: kills cost what they may, and each planted fault is found."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from check.soak import DEV_MODE
from check.soaking import front_ends
from check.soaking.answers import fetch, noted_ports, open_session
from check.soaking.front_ends import MOST_QUEUED, Killer, bound_problems
from check.soaking.report import report
from check.soaking.requests import COMPLETIONS, make_asks
from check.soaking.server_soak import ServerSoak
from lib.front_end import serve_command
from lib.servers import HOST, RefusedError, server_process

from tests.e2e.tiny_tokenizer import save_tokenizer
from tests.models.tiny import folder
from tests.scripts.test_soak import FLAGS, LENGTHS

pytestmark = pytest.mark.server

SEVERAL = ("--api-server-count", "2", "--max-num-queued-reqs", str(MOST_QUEUED))
SHARED, KILLED = "bounds and counts are those of all front ends", "front ends were killed under load"
ERRORS = "no errors, and every answer as it was alone"


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerSoak]:
    """Return a soak that has ended."""
    path = tmp_path_factory.mktemp("soak")
    command = serve_command(folder("qwen3"), "--tokenizer", save_tokenizer(path), *FLAGS, *SEVERAL)
    with server_process(command, path / "log.txt", env=os.environ | DEV_MODE) as server:
        source = random.Random()
        soak = ServerSoak(server, source, make_asks(source, 12, LENGTHS), compiles_ahead=False, kills_front_ends=True)
        asyncio.run(soak.run(1.0, 2.0))
        yield soak


def missed(soak: ServerSoak) -> set[str]:
    return {goal for goal, reached in report(soak, 2.0)["goals_reached"].items() if reached is False}


def test_a_kill_costs_the_victims_connections_alone(soak: ServerSoak) -> None:
    assert (soak.violations, soak.left, soak.unshared) == ([], [], [])
    assert missed(soak) <= {"requests were preempted", KILLED}  # not certain in some seconds
    assert soak.killer is not None
    assert soak.killer.num_kills == 1
    assert soak.end == {"exit_status": 0, "streams_drained": 4, "streams": 4, "processes_left": 0}


def test_what_is_not_as_at_one_server_is_said(soak: ServerSoak, monkeypatch: pytest.MonkeyPatch) -> None:
    killer = soak.killer
    assert killer is not None
    monkeypatch.setattr(killer, "num_connections", 3)
    for num_cut, is_good in ((0, False), (1, True), (3, True), (4, False)):
        monkeypatch.setattr(killer, "num_cut", num_cut)
        assert (KILLED not in missed(soak)) == is_good
    monkeypatch.setattr(soak, "unshared", ["a count"])
    assert SHARED in missed(soak)


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Killer:
    monkeypatch.setattr(front_ends, "front_ends", lambda server: [1, 2])
    server: Any = None
    return Killer(server, random.Random())


def test_an_error_is_explained_once_and_by_its_own_connection(killer: Killer) -> None:
    cut = aiohttp.ServerDisconnectedError()
    killer._ports = {5000, 5002}
    assert not killer.explains(cut, {5001})
    assert not killer.explains(RefusedError(500, {}, "wrong"), {5000})
    assert killer.explains(cut, {5000, 5001})
    assert not killer.explains(cut, {5000})
    assert killer.num_cut == 1


async def tell_port(request: web.Request) -> web.Response:
    """Answer with the client's port."""
    assert request.transport is not None
    return web.Response(text=str(request.transport.get_extra_info("peername")[1]))


def test_a_client_knows_its_ports() -> None:
    async def client(session: aiohttp.ClientSession) -> bool:
        ports = noted_ports()
        return {int(await fetch(session, COMPLETIONS, {})) for _ in range(2)} == ports

    async def run() -> list[bool]:
        async with serving(tell_port) as url, open_session(url, keeps=False) as session:
            return await asyncio.gather(*(asyncio.create_task(client(session)) for _ in range(5)))

    assert asyncio.run(run()) == [True] * 5


def test_counts_may_not_fall_or_vanish(killer: Killer) -> None:
    assert killer.fallen({"a_total": 3.0, "b_count": 2.0, "gauge": 4.0, "process_c_total": 9.0}) == []
    assert killer.fallen({"a_total": 3.0, "b_count": 2.5, "gauge": 1.0, "process_c_total": 1.0}) == []
    assert killer.fallen({"a_total": 2.0}) == ["a_total: 2.0 after 3.0", "b_count: None after 2.5"]


@pytest.mark.parametrize(("num_counted", "is_right"), [(6, False), (7, True), (9, True), (12, True), (13, False)])
def test_each_answer_is_counted_once_but_for_a_victims_last_ones(
    soak: ServerSoak, killer: Killer, monkeypatch: pytest.MonkeyPatch, num_counted: int, *, is_right: bool
) -> None:
    """Twelve requests had nine answers, two of them shortly before a kill; 100 were counted before."""

    async def metrics() -> dict[str, float]:
        return {}

    async def num_answers() -> int:
        return 100 + num_counted

    monkeypatch.setattr(soak.watch, "metrics", metrics)
    monkeypatch.setattr(soak.watch, "num_answers", num_answers)
    monkeypatch.setattr("check.soaking.server_soak.COUNT_SECONDS", 0.0)
    monkeypatch.setattr(killer, "killed_at", 50.0)
    for name, value in (("unshared", []), ("_num_asked", 12), ("_num_counted", 100)):
        monkeypatch.setattr(soak, name, value)
    monkeypatch.setattr(soak, "_answered", [40.0] * 3 + [49.5, 50.1] + [60.0] * 4)
    asyncio.run(soak._check_counts(killer))
    assert (soak.unshared == []) == is_right


class FakeServer:
    """Takes requests for some sequences at once, and gives them back late or never."""

    def __init__(self, room: int, *, leaks: bool) -> None:
        self._room, self._leaks = room, leaks

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if (num := body.get("n", 1)) > self._room:
            return web.Response(status=503)
        self._room -= num
        response = web.StreamResponse()
        try:
            await response.prepare(request)
            while body.get("stream"):
                await response.write(b"data: {}\n\n")
                await asyncio.sleep(0.01)
        finally:
            if not self._leaks:
                self._room += num
        return response


@contextlib.asynccontextmanager
async def serving(handler: Any) -> AsyncIterator[str]:
    """Serve a handler while a block runs, and yield its address."""
    app = web.Application()
    app.router.add_post(COMPLETIONS, handler)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, 0).start()
        yield f"http://{HOST}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("room", "leaks", "num_problems"),
    [
        (MOST_QUEUED, False, 0),
        (MOST_QUEUED, True, 1),  # the second time there is no room
        (MOST_QUEUED - 1, False, 2),
        (MOST_QUEUED + 1, False, 16),  # each of eight tries is taken, twice
    ],
)
def test_a_wrong_bound_is_found(monkeypatch: pytest.MonkeyPatch, room: int, *, leaks: bool, num_problems: int) -> None:
    monkeypatch.setattr(front_ends, "_FREE_SECONDS", 0.3)

    async def run() -> list[str]:
        async with serving(FakeServer(room, leaks=leaks).answer) as url:
            return await bound_problems(url, 2)

    assert len(asyncio.run(run())) == num_problems
