"""Load an AsyncLLM at random, with aborts and kills of its core; check that outputs are right and nothing leaks.

    scripts/check.py soak_engine --minutes 20 --json OUT

A tiny model of tests/data runs in a core process. Each case of a random catalogue (n, seeds, log-probabilities,
grammars, stop strings, long prompts, priorities) is run alone first. Then readers come at random: some read to the end,
some slowly, some abort, are cancelled or stop reading, and some send invalid requests. Every phase of load ends in
rest: all blocks must be free, nothing may wait, and memory, threads and file descriptors are counted. Now and then it
ends with kill -9 of the core instead: then all readers must get EngineDeadError, and a new engine continues. Outputs
are compared with those of the case alone, to the bit. The last line is a JSON record; the exit status is 1 if anything
was wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lib.machine import ROOT, describe_sources, versions
from lib.results import make_parser, save

from check.soaking.catalogue import BAD, Case, Ended, make_catalogue, read
from check.soaking.census import Census, census_of, trend
from jaxllm.engine.client.core_handle import CoreProcess
from jaxllm.engine.client.remote_core import RemoteCore
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import EngineBusyError, EngineDeadError, VLLMValidationError
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from tests.e2e.tiny_tokenizer import save_tokenizer

MODEL = ROOT / "tests" / "data" / "tiny" / "qwen3"
NUM_READERS = 42
MAX_QUEUED = 40
"""Fewer than there are readers, so that some requests are refused."""
NUM_CASES = 60
LOST_SECONDS = 120.0
"""A reader that has waited this long is lost."""
DEATH_SECONDS = 2.0
"""The seconds in which all readers must end after a kill."""
FRONT_MIB_PER_MINUTE = 0.5
"""The most that the front end's memory may grow, over the second half of a run of ten minutes or more."""
MANNERS = ("whole", "slow", "abort", "cancel", "leave", "bad")
WEIGHTS = (50, 10, 12, 10, 8, 10)


class Soak:
    """A run: its engine, its readers, and its violations."""

    def __init__(self, seed: int, tokenizer: str, *, num_cases: int = NUM_CASES) -> None:
        self._random = random.Random(seed)
        self._engine_args = AsyncEngineArgs(
            model=str(MODEL), tokenizer=tokenizer, dtype="float32", batch_invariant=True, block_size=16,
            num_gpu_blocks_override=48, max_num_seqs=16, max_num_batched_tokens=64, max_logprobs=5,
            scheduling_policy="priority", max_num_queued_reqs=MAX_QUEUED, disable_log_stats=True,
        )  # fmt: skip
        self._cases = make_catalogue(self._random, num_cases)
        self._alone: dict[Case, Ended] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_requests = 0
        self._was_killed = False
        self.num_kills = self.num_preemptions = 0
        self.outcomes: Counter[str] = Counter()
        self.violations: list[str] = []
        self.death_seconds: list[float] = []
        self.front: list[Census] = []
        """A census of this process after every phase, its engine at rest."""
        self.cores: list[list[Census]] = []
        """The same of each core."""

    async def run(self, seconds: float, phase_seconds: float, phases_to_kill: int) -> None:
        """Load engines for some seconds; each is killed in one of every `phases` phases."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            llm = await asyncio.to_thread(AsyncLLM.from_engine_args, self._engine_args)
            self._was_killed = False
            await llm.warm_up()
            if not self._alone:
                self._alone = {case: await read(llm, case, f"alone-{i}") for i, case in enumerate(self._cases)}
                end = time.monotonic() + seconds  # what comes before is not load
            self.cores.append([])
            for _ in range(phases_to_kill):
                await self._load(llm, phase_seconds)
                await self._rest(llm)
            await self._load(llm, phase_seconds * self._random.uniform(0.25, 1.0))
            await self._kill(llm)

    async def _load(self, llm: AsyncLLM, seconds: float) -> None:
        """Keep readers busy."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._add_readers(llm)
            await asyncio.sleep(self._random.expovariate(50.0))

    def _add_readers(self, llm: AsyncLLM) -> None:
        while len(self._tasks) < NUM_READERS:
            self._num_requests += 1
            task = asyncio.create_task(self._reader(llm, f"r{self._num_requests}"))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _rest(self, llm: AsyncLLM) -> None:
        """Wait for all readers to end, and check that nothing is left."""
        await asyncio.gather(*self._tasks)
        is_free = False
        for _ in range(100):  # the core may still be at the last abort
            if is_free := await llm.reset_prefix_cache():
                break
            await asyncio.sleep(0.05)
        if not is_free:
            self.violations.append("blocks are in use at rest")
        if num := llm.front.outputs.num_unfinished_requests:
            self.violations.append(f"{num} requests are unfinished at rest")
        self.front.append(census_of(os.getpid()))
        self.cores[-1].append(census_of(handle_of(llm).pid))

    async def _kill(self, llm: AsyncLLM) -> None:
        """Kill the core under load; its readers must end, and soon."""
        # A core that stands still finishes nothing, so that some readers wait for it when it is killed.
        os.kill(handle_of(llm).pid, signal.SIGSTOP)
        self._add_readers(llm)
        await asyncio.sleep(0.05)
        self._was_killed = True
        self.num_kills += 1
        began = time.monotonic()
        os.kill(handle_of(llm).pid, signal.SIGKILL)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LOST_SECONDS)
        # Readers that had just finished, or were refused, end before the death is noticed.
        while not llm.errored and time.monotonic() - began < DEATH_SECONDS:
            await asyncio.sleep(0.01)
        self.death_seconds.append(time.monotonic() - began)
        if self.death_seconds[-1] > DEATH_SECONDS:
            self.violations.append(f"readers ended {self.death_seconds[-1]:.1f} s after the kill")
        if not llm.errored:
            self.violations.append("a killed engine says that it runs")
        self.num_preemptions += llm.front.metrics.of(0).stats.num_preemptions
        folder = handle_of(llm).meeting.folder
        await asyncio.to_thread(llm.shutdown)
        if folder is not None and folder.exists():
            self.violations.append("the sockets' folder is left")

    async def _reader(self, llm: AsyncLLM, request_id: str) -> None:
        manner = self._random.choices(MANNERS, WEIGHTS)[0]
        try:
            async with asyncio.timeout(LOST_SECONDS):
                outcome = await self._act(llm, request_id, manner)
        except EngineDeadError as error:
            outcome = "dead"
            if not self._was_killed:
                self.violations.append(f"{request_id}: {error}")
        except EngineBusyError:
            outcome = "busy"
            await asyncio.sleep(0.05)
        except TimeoutError:
            outcome = "lost"
            self.violations.append(f"{request_id} ({manner}) got nothing for {LOST_SECONDS:g} s")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what we look for
            outcome = "failed"
            self.violations.append(f"{request_id} ({manner}): {type(error).__name__}: {error}")
        self.outcomes[f"{manner}: {outcome}"] += 1

    async def _act(self, llm: AsyncLLM, request_id: str, manner: str) -> str:
        """Be one reader; return how it ended."""
        if manner == "bad":
            return await self._ask_for_what_cannot_be(llm, request_id)
        case, priority = self._random.choice(self._cases), self._random.randrange(3)
        alone = self._alone[case]
        if manner in ("whole", "slow"):
            pause = self._random.random() * 0.05 if manner == "slow" else 0.0
            got = await read(llm, case, request_id, priority=priority, pause=pause)
            if got != alone:
                self.violations.append(f"{request_id}: {case} gave {got}, alone {alone}")
            return "equal" if got == alone else "mixed"
        most = self._random.randrange(1, 8)
        if manner == "cancel":
            task = asyncio.ensure_future(read(llm, case, request_id, priority=priority))
            await asyncio.sleep(self._random.random() * 0.2)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                return "cancelled"
            return "finished"
        got = await read(llm, case, request_id, priority=priority, most=most, is_aborted=manner == "abort")
        if not got.is_beginning_of(alone):
            self.violations.append(f"{request_id}: {case} began with {got}, alone {alone}")
            return "mixed"
        return "finished" if got == alone else "cut"

    async def _ask_for_what_cannot_be(self, llm: AsyncLLM, request_id: str) -> str:
        prompt, params = self._random.choice(BAD)
        try:
            async for _ in llm.generate(prompt, params, request_id):
                pass
        except VLLMValidationError:
            return "refused"
        self.violations.append(f"{request_id}: {params} was not refused")
        return "taken"


def handle_of(llm: AsyncLLM) -> CoreProcess:
    """Return the handle of an engine's core process."""
    remote = llm._core.remote
    assert isinstance(remote, RemoteCore)
    assert isinstance(remote.handle, CoreProcess)
    return remote.handle


def report(soak: Soak, seconds: float) -> dict[str, Any]:
    """Return the record of a run; too much growth becomes a violation."""
    front = soak.front[len(soak.front) // 2 :]
    growth = trend(front).slope
    if seconds >= 600 and growth > FRONT_MIB_PER_MINUTE:
        soak.violations.append(f"the front end's memory grows by {growth:.2f} MiB a minute")
    for name in ("fds", "threads"):
        counts = [getattr(each, name) for each in soak.front]
        if counts and counts[-1] > max(counts[: max(1, len(counts) // 2)]):
            soak.violations.append(f"the front end's {name} grow: {counts}")
        for core in soak.cores:
            of_core = [getattr(each, name) for each in core]
            if len(of_core) > 2 and of_core[-1] > max(of_core[:-1]):
                soak.violations.append(f"a core's {name} grow: {of_core}")
    return describe_sources() | {
        "versions": versions("jax", "msgspec", "pyzmq", "tokenizers"),
        "seconds": round(seconds, 1),
        "outcomes": dict(sorted(soak.outcomes.items())),
        "requests": sum(soak.outcomes.values()),
        "kills": soak.num_kills,
        "preemptions": soak.num_preemptions,
        "seconds_from_kill_to_last_error": round(max(soak.death_seconds, default=0.0), 3),
        "front_mib_per_minute": round(growth, 3),
        "front": [asdict(each) for each in (soak.front[:1] + soak.front[-1:])],
        "core_mib_per_minute": [round(trend(core).slope, 3) for core in soak.cores if len(core) > 2],
        "cores": [[asdict(core[0]), asdict(core[-1])] for core in soak.cores if core],
        "violations": soak.violations[:20],
        "num_violations": len(soak.violations),
    }


def main() -> int:
    """Run a soak; returns the exit status."""
    parser = make_parser(__doc__)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=20.0, help="of load (default: %(default)s)")
    length.add_argument("--seconds", type=float, help="instead of --minutes")
    parser.add_argument(
        "--phase-seconds", type=float, default=15.0, help="of load between rests (default: %(default)s)"
    )
    parser.add_argument(
        "--phases", type=int, default=8, help="phases that end in rest before a kill (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    seconds = args.minutes * 60 if args.seconds is None else args.seconds
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(args.seed, save_tokenizer(Path(folder)))
        began = time.monotonic()
        asyncio.run(soak.run(seconds, args.phase_seconds, args.phases))
        record = {"seed": args.seed} | report(soak, time.monotonic() - began)
    print(json.dumps(record))
    save(args.json, record)
    return 1 if soak.violations else 0


if __name__ == "__main__":
    sys.exit(main())
