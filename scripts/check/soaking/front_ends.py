"""Kill front ends of a server that has several, and judge what that may cost."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import aiohttp
from lib.servers import ServerError, ServerProcess, descendants

MODULE = b"jaxllm.server.front_end"
MOST_QUEUED = 512
"""The --max-num-queued-reqs of such a server: more than all clients ask for, so that only a leak fills it."""
_ESTABLISHED = "01"
_CUT_SECONDS = 5.0
"""The time after a kill in which clients notice that their connections have gone."""
_PROCESS = ("process_", "python_", "jaxllm_core_process_")


def front_ends(server: ServerProcess) -> list[int]:
    """Return the ids of the processes of a server's front ends; none for a server of one process."""
    return [pid for pid in descendants(server.pid) if MODULE in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""


def num_connections(pid: int, port: int) -> int:
    """Return the number of open connections of a process to a local port."""
    return len(set(_sockets(pid)) & set(_open_inodes(port)))


def _sockets(pid: int) -> Iterator[str]:
    for descriptor in Path("/proc", str(pid), "fd").iterdir():
        try:
            name = os.readlink(descriptor)
        except OSError:  # it has just been closed
            continue
        if name.startswith("socket:["):
            yield name[8:-1]


def _open_inodes(port: int) -> Iterator[str]:
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == _ESTABLISHED and int(words[1].rpartition(":")[2], 16) == port:
            yield words[9]


class Killer:
    """Kills one front end at a time; the errors that this explains are those of its connections, soon after."""

    def __init__(self, server: ServerProcess, source: random.Random) -> None:
        self._server, self._random = server, source
        self._killed_at = float("-inf")
        self._num_left = 0
        """The connections of the last victim whose ends no client has reported yet."""
        self.num_kills = self.num_connections = self.num_cut = 0
        """The number of all kills, of the victims' connections, and of the requests that ended with them."""
        self._counts: Mapping[str, float] = {}

    async def kill_one(self, seconds: float) -> None:
        """Kill a front end at some time within `seconds`, and wait until there is another."""
        await asyncio.sleep(seconds * self._random.uniform(0.2, 0.6))
        fronts = front_ends(self._server)
        victim = self._random.choice(fronts)
        os.kill(victim, signal.SIGSTOP)  # so that no connection comes or goes while they are counted
        self._num_left = num_connections(victim, self._server.port)
        self._killed_at = time.monotonic()
        self.num_kills, self.num_connections = self.num_kills + 1, self.num_connections + self._num_left
        os.kill(victim, signal.SIGKILL)
        while len(front_ends(self._server)) < len(fronts) or victim in front_ends(self._server):
            await asyncio.sleep(0.05)

    def explains(self, error: Exception) -> bool:
        """Return whether an error is the end of a connection of the last victim; each connection explains one."""
        is_cut = isinstance(error, (aiohttp.ClientError, ServerError)) and not hasattr(error, "status")
        is_soon = time.monotonic() - self._killed_at < _CUT_SECONDS
        if not is_cut or not is_soon or self._num_left == 0:
            return False
        self._num_left -= 1
        self.num_cut += 1
        return True

    def fallen(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the counts that are lower than at the last call."""
        counts = {
            name: value
            for name, value in metrics.items()
            if name.endswith(("_total", "_count", "_bucket")) and not name.startswith(_PROCESS)
        }
        before, self._counts = self._counts, counts
        return [
            f"{name}: {value} after {before[name]}" for name, value in counts.items() if value < before.get(name, 0)
        ]
