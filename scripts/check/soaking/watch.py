"""Watch a server under load: the memory, threads and descriptors of its lasting processes, and its metrics."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping

from lib.servers import ServerError, ServerProcess, descendants, get
from prometheus_client.parser import text_string_to_metric_families

from check.soaking.census import Census, census_of
from check.soaking.front_ends import front_ends
from check.soaking.requests import CHAT, COMPLETIONS

REST_SECONDS = 10.0
"""The seconds in which a server without requests must be at rest."""
WARM_SECONDS = 1800.0
POLL_SECONDS = 0.05
BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
"""The gauges that are 0 at rest."""


class Watch:
    """Counts what a server's front end and core hold, or the core and the parent of several front ends."""

    def __init__(self, server: ServerProcess) -> None:
        """Watch a server that has started. Raises ServerError unless it has one core."""
        fronts = front_ends(server)
        children = [pid for pid in descendants(server.pid) if pid not in fronts]
        if len(children) != 1:
            raise ServerError(f"a server has one core, and this one has {len(children)} children")
        self._port = server.port
        self.pids = {"parent" if fronts else "front": server.pid, "core": children[0]}
        self.held: dict[str, list[Census]] = {name: [] for name in self.pids}

    def look(self) -> None:
        """Take a census of each process."""
        for name, pid in self.pids.items():
            self.held[name].append(census_of(pid))

    async def look_every(self, seconds: float) -> None:
        """Take censuses until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(seconds)

    async def warm(self, seconds: float = WARM_SECONDS) -> None:
        """Wait until every program is compiled. Raises ServerError if that takes too long."""
        deadline = time.monotonic() + seconds
        while not (await self.metrics())["vllm:engine_is_warm"]:
            if time.monotonic() > deadline:
                raise ServerError(f"not all programs were compiled within {seconds:g} s")
            await asyncio.sleep(1.0)

    async def rest(self, seconds: float = REST_SECONDS) -> dict[str, float]:
        """Wait until nothing runs, waits or holds a KV block; return the gauges that are not 0, {} at rest."""
        deadline = time.monotonic() + seconds
        while True:
            metrics = await self.metrics()
            left = {name: metrics[name] for name in BUSY if metrics[name]}
            if not left or time.monotonic() > deadline:
                return left
            await asyncio.sleep(POLL_SECONDS)

    async def num_answers(self) -> int:
        """Return how many requests to generate the server has counted as answered, by all its front ends."""
        text = (await get(self._port, "/metrics")).decode()
        samples = (each for family in text_string_to_metric_families(text) for each in family.samples)
        labels = {("2xx", path) for path in (CHAT, COMPLETIONS)}
        answers = (each for each in samples if each.name == "http_requests_total")
        return int(sum(each.value for each in answers if (each.labels["status"], each.labels["handler"]) in labels))

    async def metrics(self) -> Mapping[str, float]:
        """Return the values of /metrics by name, summed over labels; a missing name is 0."""
        totals: defaultdict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families((await get(self._port, "/metrics")).decode()):
            for sample in family.samples:
                totals[sample.name] += sample.value
        return totals
