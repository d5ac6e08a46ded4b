"""Kill front ends of a server that has several, and check what that may cost, and that bounds are those of all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import aiohttp
from lib.servers import HOST, RefusedError, ServerError, ServerProcess, descendants

from check.soaking.answers import fetch, open_session
from check.soaking.requests import COMPLETIONS

MODULE = b"jaxllm.server.front_end"
MOST_QUEUED = 512
"""The --max-num-queued-reqs of such a server: more than all clients ask for, so that only a leak fills it."""
_ESTABLISHED = "01"
_START_SECONDS = 60.0
"""The time in which another front end takes the place of one that was killed."""
_FREE_SECONDS = 10.0
"""The time in which the room of a request is free again whose client has left."""
_LATE_SECONDS = 1.0
"""The counts of a front end's last half second are lost with it, and a client may hear of an answer a little later."""
_TRIES = 4
"""How many connections to make for each front end, so that each gets some."""
_PROCESS = ("process_", "python_", "jaxllm_core_process_")


def front_ends(server: ServerProcess) -> list[int]:
    """Return the ids of the processes of a server's front ends; none for a server of one process."""
    return [pid for pid in descendants(server.pid) if MODULE in _read(pid, "cmdline")]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path("/proc", str(pid), name).read_bytes()
    except OSError:  # it has just ended
        return b""


def client_ports(pid: int, port: int) -> set[int]:
    """Return the ports of the clients whose connections to a local port a process has open."""
    sockets = set(_sockets(pid))
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return {
        _port(words[2])
        for words in rows
        if words[3] == _ESTABLISHED and _port(words[1]) == port and words[9] in sockets
    }


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _sockets(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):  # it has just ended
        for descriptor in Path("/proc", str(pid), "fd").iterdir():
            with contextlib.suppress(OSError):  # it has just been closed
                name = os.readlink(descriptor)
                if name.startswith("socket:["):
                    yield name[8:-1]


class Killer:
    """Kills one front end at a time; the errors that this explains are those of its connections."""

    def __init__(self, server: ServerProcess, source: random.Random) -> None:
        self._server, self._random = server, source
        self.count = len(front_ends(server))
        """The number of front ends."""
        self.killed_at = float("-inf")
        """The time.monotonic() of the last kill."""
        self._ports: set[int] = set()
        """The clients' ports of the last victim's connections whose ends no client has reported yet."""
        self.num_kills = self.num_connections = self.num_cut = 0
        """The number of all kills, of the victims' connections, and of the requests that ended with them."""
        self._counts: Mapping[str, float] = {}

    async def kill_one(self, seconds: float) -> None:
        """Kill a front end at some time within `seconds`, under load."""
        await asyncio.sleep(seconds * self._random.uniform(0.2, 0.6))
        victim = self._random.choice(front_ends(self._server))
        os.kill(victim, signal.SIGSTOP)  # so that no connection comes or goes while they are noted
        while (stat := _read(victim, "stat")) and b") T " not in stat:
            await asyncio.sleep(0.001)
        self._ports, self.killed_at = client_ports(victim, self._server.port), time.monotonic()
        self.num_kills, self.num_connections = self.num_kills + 1, self.num_connections + len(self._ports)
        os.kill(victim, signal.SIGKILL)

    async def wait_whole(self, seconds: float = _START_SECONDS) -> None:
        """Wait until each front end of a server at rest takes connections. Raises ServerError if one does not."""
        deadline = time.monotonic() + seconds
        while (num := await self._num_serving()) != self.count:
            if time.monotonic() > deadline:
                raise ServerError(f"{num} of {self.count} front ends take connections after {seconds:g} s")
            await asyncio.sleep(0.2)

    async def _num_serving(self) -> int:
        port = self._server.port
        async with contextlib.AsyncExitStack() as stack:
            mine: set[int] = set()
            for _ in range(_TRIES * self.count):
                _, writer = await asyncio.open_connection(HOST, port)
                stack.callback(writer.close)
                mine.add(writer.get_extra_info("sockname")[1])
                await asyncio.sleep(0.01)
            return sum(bool(client_ports(pid, port) & mine) for pid in front_ends(self._server))

    def explains(self, error: Exception, ports: set[int]) -> bool:
        """Return whether an error is the end of a connection of the last victim, to one of a client's ports."""
        cut = ports & self._ports
        if not isinstance(error, aiohttp.ClientError) or not cut:
            return False
        self._ports -= cut
        self.num_cut += 1
        return True

    def num_lost(self, answered: list[float]) -> int:
        """Return how many answers, by the times at which clients had them, the last victim may have taken along
        uncounted.
        """
        return sum(-_LATE_SECONDS < each - self.killed_at < _LATE_SECONDS for each in answered)

    def fallen(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the counts that are lower than at the last call."""
        counts = {
            name: value
            for name, value in metrics.items()
            if name.endswith(("_total", "_count", "_bucket")) and not name.startswith(_PROCESS)
        }
        before, self._counts = self._counts, counts
        return [
            f"{name}: {counts.get(name)} after {value}" for name, value in before.items() if counts.get(name, 0) < value
        ]


async def bound_problems(base_url: str, num_fronts: int) -> list[str]:
    """Return what is wrong with the bound on the requests of all front ends of a server at rest.

    One request can have all the room; then none of the front ends takes another, until its client has left.
    """
    problems = []
    async with open_session(base_url, keeps=False) as session:
        for _ in range(2):  # what the first has taken, the second finds free
            try:
                problems += await _filled(session, num_fronts)
            except ServerError as error:
                problems.append(f"{MOST_QUEUED} sequences have no room: {error}")
    return problems


async def _filled(session: aiohttp.ClientSession, num_fronts: int) -> list[str]:
    """Fill the bound, and return what is taken all the same. Raises ServerError if it cannot be filled."""
    body = {"prompt": "sea", "max_tokens": 8, "ignore_eos": True, "stream": True, "n": MOST_QUEUED}
    deadline = time.monotonic() + _FREE_SECONDS
    while True:
        async with session.post(COMPLETIONS, json=body) as response:
            if response.status == 200:
                await response.content.readany()
                problems = [await _taken(session) for _ in range(_TRIES * num_fronts)]
                return [each for each in problems if each is not None]
            if response.status != 503 or time.monotonic() > deadline:
                raise ServerError(f"{response.status}: {await response.text()}")
        await asyncio.sleep(0.1)


async def _taken(session: aiohttp.ClientSession) -> str | None:
    """Return what is wrong if the server takes a request while it has no room."""
    try:
        await fetch(session, COMPLETIONS, {"prompt": "sea", "max_tokens": 1})
    except RefusedError as error:
        return None if error.status == 503 else f"beyond the bound: {error}"
    return f"a request beyond {MOST_QUEUED} sequences is taken"
