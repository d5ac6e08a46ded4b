"""Load a server at random in phases that end in rest, and record every violation."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from lib.servers import HOST, RefusedError, ServerError, ServerProcess, get

from check.soaking.answers import (
    Said,
    fetch,
    noted_ports,
    open_session,
    open_slow_session,
    read_stream,
    read_whole,
)
from check.soaking.census import Census
from check.soaking.front_ends import Killer, bound_problems, front_ends
from check.soaking.requests import BAD, COMPLETIONS, LOOKS, STEADY, Ask
from check.soaking.watch import Watch

LOST_SECONDS = 120.0
"""A client that has waited this long is lost."""
CLOSE_SECONDS = 1.0
"""The seconds in which the server must close its side of connections."""
LOOK_SECONDS = 5.0
NUM_DRAINED = 4
CROWD = 5
"""How many times the usual number of clients come at once before the load."""
DRAIN_SECONDS = 90.0
COUNT_SECONDS = 5.0
"""The time in which all front ends have shared their counts."""
MANNERS = ("whole", "stream", "slow", "leave", "cancel", "bad", "look")
WEIGHTS = (30, 30, 6, 8, 8, 8, 10)


class ServerSoak:
    """A run: its server, its clients, and its violations."""

    def __init__(
        self,
        server: ServerProcess,
        source: random.Random,
        asks: Sequence[Ask],
        *,
        bad: Sequence[tuple[str, Any, int]] = BAD,
        others: Mapping[Ask, Ask] | None = None,
        num_clients: int = 12,
        compiles_ahead: bool = True,
        kills_front_ends: bool = False,
    ) -> None:
        """Load a server that has started with `asks`, and `bad` ones that it refuses with a status.

        `others` has, for each one with pictures or videos, the same about others of the same sizes.
        One that compiles nothing ahead (--enforce-eager) is never warm. With `kills_front_ends` one of several front
        ends is killed under each load.
        """
        self.killer = Killer(server, source) if kills_front_ends else None
        self._server, self._url = server, f"http://{HOST}:{server.port}"
        self._random, self._num_clients = source, num_clients
        self._asks, self._bad, self._others = list(asks), bad, others or {}
        self._alone: dict[Ask, Said] = {}
        self.compiles_ahead = compiles_ahead
        self._looks: dict[str, bytes] = {}
        """The first answers to the steady ones of LOOKS, by path and body."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession
        self._slow: aiohttp.ClientSession
        self.watch = Watch(server)
        """Censuses at rest."""
        self.loaded = Watch(server)
        """Censuses under load."""
        self.outcomes: Counter[str] = Counter()
        self.num_with_media = 0
        """The number of requests with pictures or videos, without those that were asked alone and the bad ones."""
        self.num_moved, self.num_others = 0, len(self._others)
        """How many of the answers about other items differ from those about the first ones, and of how many."""
        self.num_renamed = 0
        """The number of items that were sent under a new name in requests that were answered."""
        self.num_processed = 0
        """The number of items that the front end did not find among its processed ones, so that they are encoded."""
        self.violations: list[str] = []
        self.left: list[str] = []
        """What was not free, or not at rest, at the end of a phase."""
        self.unshared: list[str] = []
        """What several front ends do not count, or bound, as one server does."""
        self._answered: list[float] = []
        """The times at which clients had whole answers, since the counts were last compared."""
        self._num_asked = self._num_counted = 0
        """The number of requests since then, and what the server had counted then."""
        self.num_compiled: list[int] = []
        """How many programs were compiled, when the engine said that it was warm and after every phase."""
        self.num_preemptions = 0
        self.end: dict[str, Any] = {}
        """How the server ended."""

    async def run(self, seconds: float, phase_seconds: float, least_with_media: int = 0) -> None:
        """Load the server for some seconds, and until this many requests with media have come, and end it.

        Raises ServerError if it does not become warm.
        """
        if self.compiles_ahead:
            await self.watch.warm()
        await self._note_counts()
        async with self._clients():
            await self._answer_alone()
            await self._ask_about_others()
            # Memory reaches its greatest use at once, not whenever chance brings many requests together.
            await asyncio.gather(*(self._client() for _ in range(CROWD * self._num_clients)))
        await self._rest()
        self.watch.held = {name: [] for name in self.watch.pids}  # the first census is that of the first phase
        end = time.monotonic() + seconds
        while time.monotonic() < end or self.num_with_media < least_with_media:
            looking = asyncio.create_task(self.loaded.look_every(LOOK_SECONDS))
            async with self._clients():
                killing = self.killer and asyncio.create_task(self.killer.kill_one(phase_seconds))
                await self._load(phase_seconds)
                if killing is not None:
                    await killing
            looking.cancel()
            await self._rest()
            self.watch.look()
            self._tell(end - time.monotonic())
        await self._end()

    @asynccontextmanager
    async def _clients(self) -> AsyncIterator[None]:
        """Run clients during a block; their connections close at its end."""
        keeps = self.killer is None  # else each connection is one request's, which ends with it
        async with open_session(self._url, keeps=keeps) as self._session, open_slow_session(self._url) as self._slow:
            yield

    async def _answer_alone(self) -> None:
        """Ask everything once, whole, and as a stream, which has to be the same."""
        for ask in self._asks:
            self._num_asked += 1 + ask.may_stream
            try:
                alone = self._alone[ask] = await read_whole(self._session, ask)
                if ask.may_stream and (streamed := await read_stream(self._session, ask)) != alone:
                    self.violations.append(f"{ask} is {alone}, but streamed {streamed}")
            except (ServerError, aiohttp.ClientError) as error:
                self.violations.append(f"{ask}, alone: {error}")
        self._asks = list(self._alone)
        for path, body in LOOKS:
            self._looks[repr((path, body))] = await fetch(self._session, path, body)

    async def _ask_about_others(self) -> None:
        """Count the answers that differ when nothing but the pixels does, their log-probabilities included."""
        for pair in self._others.items():
            self._num_asked += 2
            try:
                first, second = [await read_whole(self._session, ask, logprobs=True) for ask in pair]
                self.num_moved += first != second
            except (ServerError, aiohttp.ClientError) as error:
                self.violations.append(f"{pair[1]}, about other items: {error}")

    async def _load(self, seconds: float) -> None:
        """Keep clients busy, and let the last ones end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            while len(self._tasks) < self._num_clients:
                task = asyncio.create_task(self._client())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(self._random.expovariate(20.0))
        await asyncio.gather(*self._tasks)

    async def _rest(self) -> None:
        """Check that nothing is left once all clients have ended."""
        if self.killer is not None:
            try:
                await self.killer.wait_whole()
            except ServerError as error:
                self.violations.append(str(error))
        left: dict[str, Any] = await self.watch.rest()
        if num := json.loads(await get(self._server.port, "/load"))["server_load"]:
            left["/load"] = num
        async with open_session(self._url) as session:
            if not json.loads(await fetch(session, "/reset_prefix_cache", {}))["success"]:
                left["blocks"] = "in use"
            if not json.loads(await fetch(session, "/reset_encoder_cache", {}))["success"]:
                left["encoded items"] = "in use"
        if self.killer is not None:
            await self._check_counts(self.killer)
            self.unshared += await bound_problems(self._url, self.killer.count)
            left |= await self.watch.rest()
        if left:
            self.left.append(str(left))
        await self._note_counts()
        await asyncio.sleep(CLOSE_SECONDS)
        if self.killer is not None:
            self._answered, self._num_asked, self._num_counted = [], 0, await self.watch.num_answers()

    async def _check_counts(self, killer: Killer) -> None:
        """Check that no count has fallen, and that each answer is counted once, but for a victim's last ones."""
        if fallen := killer.fallen(await self.watch.metrics()):
            self.unshared.append(f"counts that fell: {fallen}")
        least, most = len(self._answered) - killer.num_lost(self._answered), self._num_asked
        deadline = time.monotonic() + COUNT_SECONDS
        while not least <= (num := await self.watch.num_answers() - self._num_counted) <= most:
            if time.monotonic() > deadline:
                self.unshared.append(f"{num} answers are counted, and there were {least} to {most}")
                return
            await asyncio.sleep(0.1)

    def _tell(self, seconds: float) -> None:
        """Print the progress."""
        memory = ", ".join(f"{name} {held[-1].resident_mib:.0f} MiB" for name, held in self.watch.held.items())
        num, wrong = sum(self.outcomes.values()), len(self.violations) + len(self.left)
        shown = f" ({self.num_with_media} with media)" if self.num_with_media else ""
        print(f"soak: {num} requests{shown}, {wrong} wrong, {memory}, {max(0.0, seconds):.0f} s to go", file=sys.stderr)

    async def _note_counts(self) -> None:
        metrics = await self.watch.metrics()
        self.num_compiled.append(int(metrics["vllm:programs_compiled_total"]))
        self.num_preemptions = int(metrics["vllm:num_preemptions_total"])
        self.num_processed = int(metrics["vllm:mm_cache_queries_total"] - metrics["vllm:mm_cache_hits_total"])

    async def _client(self) -> None:
        manner, ports = self._random.choices(MANNERS, WEIGHTS)[0], noted_ports()
        try:
            async with asyncio.timeout(LOST_SECONDS):
                outcome = await self._act(manner)
        except TimeoutError:
            outcome = "lost"
            self.violations.append(f"{manner}: nothing for {LOST_SECONDS:g} s")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what we look for
            outcome = "cut by a kill" if self.killer is not None and self.killer.explains(error, ports) else "failed"
            if outcome == "failed":
                self.violations.append(f"{manner}: {type(error).__name__}: {error}")
        self.outcomes[f"{manner}: {outcome}"] += 1

    async def _act(self, manner: str) -> str:
        """Be one client; return how it ended."""
        if manner == "bad":
            return await self._ask_for_what_cannot_be()
        if manner == "look":
            return await self._look_around()
        ask = self._random.choice(self._asks)
        self._num_asked += 1
        self.num_with_media += ask.has_media
        more = ask.unshared(self._random) if self._random.random() < 0.3 else {}
        if manner == "cancel":
            with suppress(TimeoutError):
                async with asyncio.timeout(self._random.random()):
                    return self._compared(ask, await read_whole(self._session, ask, **more))
            return "cut"
        self.num_renamed += ask.num_items if more else 0
        if manner == "whole" or not ask.may_stream:
            return self._compared(ask, await read_whole(self._session, ask, **more))
        if manner == "leave":
            got = await read_stream(self._session, ask, most=self._random.randint(1, 8), **more)
            if got.is_beginning_of(self._alone[ask]):
                return "cut"
            return self._compared(ask, got)
        if manner == "slow":
            return self._compared(ask, await read_stream(self._slow, ask, pause=self._random.random() * 0.05, **more))
        return self._compared(ask, await read_stream(self._session, ask, **more))

    def _compared(self, ask: Ask, got: Said) -> str:
        self._answered.append(time.monotonic())
        if got == self._alone[ask]:
            return "equal"
        self.violations.append(f"{ask} gave {got}, alone {self._alone[ask]}")
        return "mixed"

    async def _ask_for_what_cannot_be(self) -> str:
        path, body, status = self._random.choice(self._bad)
        try:
            await fetch(self._session, path, body)
        except RefusedError as error:
            if error.status == status:
                return "refused"
            self.violations.append(f"{path} {str(body)[:200]}: {error}")
            return "refused otherwise"
        self.violations.append(f"{path} {str(body)[:200]} was not refused")
        return "taken"

    async def _look_around(self) -> str:
        path, body = self._random.choice(LOOKS)
        got = await fetch(self._session, path, body)
        if path in STEADY and got != self._looks[repr((path, body))]:
            self.violations.append(f"{path} {body} is now {got[:500]}")
            return "changed"
        return "as before"

    async def _end(self) -> None:
        """End the server while streams run; check that they are whole and that no process is left."""
        pids = [Path("/proc", str(pid)) for pid in {*self.watch.pids.values(), *front_ends(self._server)}]
        long = Ask(COMPLETIONS, {"prompt": "the sea", "max_tokens": 200, "ignore_eos": True, "seed": 1}, True)
        async with self._clients():
            streams = [asyncio.create_task(read_stream(self._session, long)) for _ in range(NUM_DRAINED)]
            while not await self._has_taken(NUM_DRAINED) and not any(stream.done() for stream in streams):
                await asyncio.sleep(0.01)
            ending = asyncio.create_task(asyncio.to_thread(self._server.end, DRAIN_SECONDS))
            got = await asyncio.gather(*streams, return_exceptions=True)
        whole = [each for each in got if isinstance(each, Said) and each.usage and each.usage[1] == 200]
        try:
            status: int | None = await ending
        except subprocess.TimeoutExpired:
            status = None
        self.end = {
            "exit_status": status,
            "streams_drained": len(whole),
            "streams": NUM_DRAINED,
            "processes_left": sum(each.exists() for each in pids),
        }

    async def _has_taken(self, num: int) -> bool:
        """Return whether this many requests run or wait."""
        metrics = await self.watch.metrics()
        return metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"] >= num

    def rests(self, name: str) -> list[Census]:
        """Return the censuses of a process at rest, without those of the first quarter."""
        held = self.watch.held[name]
        return held[len(held) // 4 :]
