"""Send a server four times the load it can serve; check that it refuses the excess at once and serves the rest.

    scripts/check.py overload            # SmolLM2, 120 seconds; writes benchmarks/results/overload.json
    scripts/check.py overload --mock     # a core without a model, 50 tokens per second and stream (lib/mock_core.py)

`jaxllm serve` runs with --max-num-seqs and --max-num-queued-reqs. First, for --capacity-seconds, as many streams run as
the server runs at once: this gives the requests per second that it can serve, and the time between tokens to compare
with. Then requests come at random times, at four times that rate regardless of answers, each on a new connection. Times
are the client's; a refusal's is from before the connection until its answer is read. The client is one process on the
same machine; its share of a core is shown. The exit status is 1 if a goal is missed.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fetch_models import FetchError
from lib.front_end import mock_server, serve_command
from lib.results import describe_server, find_model, make_server_parser, result_file, save
from lib.servers import RefusedError, ServerError, ServerProcess, Streamed, cpu_seconds, get, server_process
from lib.servers import stream as read_stream

from check.soaking.census import Census
from check.soaking.requests import some_words
from check.soaking.watch import Watch

OVER = 4.0
MARGIN = 1.1
"""The factor of extra load, so that chance, or a server that has become faster, does not leave less than OVER."""
GOALS = {"refusal_ms_p99": 50.0, "itl_p99_by_capacity": 1.5, "memory_growth_mib": 5.0}
CENSUS_SECONDS = HEALTH_SECONDS = 1.0
SHORT_SECONDS = 60.0
"""A shorter run cannot show whether memory grows."""
MOCK_RATE = 50.0
KV_BYTES = 256 << 20
"""So few are in use before the overload begins: a KV cache takes its memory when it fills for the first time."""


@dataclass(frozen=True)
class Plan:
    """How a server is loaded."""

    max_num_seqs: int
    max_num_queued_reqs: int
    capacity_seconds: float
    seconds: float
    prompt_words: tuple[int, int] = (30, 90)
    max_tokens: tuple[int, int] = (32, 96)
    """Lengths are uniform between these, so that streams do not end together."""

    def flags(self) -> list[str]:
        """Return the server's flags."""
        return [
            *("--max-num-seqs", str(self.max_num_seqs)),
            *("--max-num-queued-reqs", str(self.max_num_queued_reqs)),
        ]


@dataclass(frozen=True)
class Refusal:
    """An answer that is an error."""

    seconds: float
    """From before the connection was made."""
    status: int
    retry_after: str | None


@dataclass
class Load:
    """Requests to a server, and their outcomes."""

    port: int
    plan: Plan
    source: random.Random
    num_offered: int = 0
    answers: list[Streamed] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    async def ask(self) -> None:
        """Make one request and record its outcome."""
        self.num_offered += 1
        body = self._body()
        began = time.monotonic()
        try:
            self.answers.append(await read_stream(self.port, body))
        except RefusedError as error:
            self.refusals.append(Refusal(time.monotonic() - began, error.status, error.headers.get("retry-after")))
        except (ServerError, OSError, EOFError) as error:
            self.failures.append(f"{type(error).__name__}: {error}")

    async def keep_full(self, seconds: float) -> None:
        """Keep as many streams running as the server runs at once; the last are read to their end."""
        end = time.monotonic() + seconds

        async def one() -> None:
            while time.monotonic() < end:
                await self.ask()

        await asyncio.gather(*(one() for _ in range(self.plan.max_num_seqs)))

    async def offer(self, seconds: float, rate: float) -> None:
        """Make requests at random times for some seconds, at OVER times the capacity's `rate`, or the served rate if
        that is higher; all are read to their end.
        """
        began = due = time.monotonic()
        tasks: set[asyncio.Task[None]] = set()
        while (now := time.monotonic()) < began + seconds:
            if now < due:
                await asyncio.sleep(due - now)
                continue
            served = len(self.answers) / max(now - began, 1.0)
            due += self.source.expovariate(OVER * MARGIN * max(rate, served))
            task = asyncio.create_task(self.ask())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    def _body(self) -> dict[str, Any]:
        prompt = some_words(self.source, self.source.randint(*self.plan.prompt_words))
        most = self.source.randint(*self.plan.max_tokens)
        return {"prompt": prompt, "max_tokens": most, "ignore_eos": True, "temperature": 0}


@dataclass
class Health:
    """What /health answered, asked every HEALTH_SECONDS."""

    statuses: dict[int, int] = field(default_factory=dict)
    slowest_ms: float = 0.0

    async def probe(self, port: int) -> None:
        """Ask until cancelled."""
        while True:
            began, status = time.monotonic(), 200
            try:
                await get(port, "/health")
            except RefusedError as error:
                status = error.status
            self.statuses[status] = self.statuses.get(status, 0) + 1
            self.slowest_ms = max(self.slowest_ms, round((time.monotonic() - began) * 1e3, 1))
            await asyncio.sleep(HEALTH_SECONDS)


async def measure(server: ServerProcess, plan: Plan, seed: int = 0) -> dict[str, Any]:
    """Load a server to its capacity, then beyond, and return the figures."""
    watch, source = Watch(server), random.Random(seed)
    await watch.warm()
    await Load(server.port, plan, source).keep_full(plan.capacity_seconds / 4)  # what comes first is slower
    capacity = Load(server.port, plan, source)
    began = time.monotonic()
    await capacity.keep_full(plan.capacity_seconds)
    at_capacity = _figures(capacity.answers, began, plan.capacity_seconds)
    left = await watch.rest()
    over, health = Load(server.port, plan, source), Health()
    before, cpu = await watch.metrics(), _cpu(watch)
    began = time.monotonic()
    beside = [asyncio.create_task(task) for task in (watch.look_every(CENSUS_SECONDS), health.probe(server.port))]
    await over.offer(plan.seconds, at_capacity["requests_per_second"])
    for task in beside:
        task.cancel()
    seconds = time.monotonic() - began
    shares = {name: round((after - cpu[name]) / seconds, 3) for name, after in _cpu(watch).items()}
    left |= await watch.rest()
    after = await watch.metrics()
    counted = after["vllm:admission_rejections_total"] - before["vllm:admission_rejections_total"]
    beyond = _figures(over.answers, began, plan.seconds)
    return {
        "capacity": at_capacity,
        "overload": beyond
        | {
            "offered": over.num_offered,
            "offered_by_served": round(over.num_offered / plan.seconds / beyond["requests_per_second"], 2),
            "accepted": len(over.answers),
            "refused": len(over.refusals),
            "refused_by_the_server's_count": int(counted),
            "refusals_with_503_and_retry_after": sum(each.status == 503 and _tells(each) for each in over.refusals),
            "refusal_ms": _quantiles([each.seconds for each in over.refusals]),
            "itl_p99_by_capacity": round(beyond["itl_ms"]["p99"] / at_capacity["itl_ms"]["p99"], 3),
            "health": asdict(health),
            "share_of_a_core": shares,
            "resident_mib": {name: _memory(held) for name, held in watch.held.items()},
        },
        "failures": (capacity.failures + over.failures)[:20],
        "num_failures": len(capacity.failures) + len(over.failures) + len(capacity.refusals),
        "left_at_rest": left,
    }


def verdicts(figures: dict[str, Any], seconds: float) -> dict[str, bool | None]:
    """Return which goals the figures reach; None for a goal that so short a run cannot judge."""
    over = figures["overload"]
    growth = max(each["growth"] for each in over["resident_mib"].values())
    return {
        "four times as much was offered as served": over["offered_by_served"] >= OVER,
        "each refusal is 503 with Retry-After": over["refusals_with_503_and_retry_after"] == over["refused"] > 0,
        "the server counts the refusals that were seen": over["refused_by_the_server's_count"] == over["refused"],
        f"refused within {GOALS['refusal_ms_p99']:g} ms, p99": over["refusal_ms"]["p99"] <= GOALS["refusal_ms_p99"],
        f"p99 between tokens up to {GOALS['itl_p99_by_capacity']:g} times that at capacity": (
            over["itl_p99_by_capacity"] <= GOALS["itl_p99_by_capacity"]
        ),
        f"memory grows by less than {GOALS['memory_growth_mib']:g} MiB": (
            growth < GOALS["memory_growth_mib"] if seconds >= SHORT_SECONDS else None
        ),
        "/health is always 200": set(over["health"]["statuses"]) == {200},
        "nothing else fails": figures["num_failures"] == 0,
        "afterwards nothing runs, waits, or holds a block": not figures["left_at_rest"],
    }


def _figures(answers: Sequence[Streamed], began: float, seconds: float) -> dict[str, Any]:
    """Return what clients saw within some seconds: after that the load decreases."""
    end = began + seconds
    ended = [each for each in answers if each.ended <= end]
    gaps = [
        later - earlier
        for each in answers
        for earlier, later in zip(each.arrivals, each.arrivals[1:], strict=False)
        if later <= end
    ]
    return {
        "requests_per_second": round(len(ended) / seconds, 3),
        "tokens_per_second": round(sum(each.num_tokens for each in ended) / seconds, 1),
        "ttft_ms": _quantiles([each.arrivals[0] - each.began for each in answers if each.arrivals[0] <= end]),
        "itl_ms": _quantiles(gaps),
    }


def _quantiles(seconds: Iterable[float]) -> dict[str, float]:
    """Return median, 99th percentile and maximum, in milliseconds. Raises ServerError without values."""
    values = sorted(each * 1e3 for each in seconds)
    if not values:
        raise ServerError("the run was too short: some of what it is to measure has not happened once")
    named = {"p50": values[len(values) // 2], "p99": values[int(0.99 * (len(values) - 1))], "max": values[-1]}
    return {name: round(value, 2) for name, value in named.items()}


def _memory(held: Sequence[Census]) -> dict[str, float]:
    """Return the memory over time; its growth is from the median of the second quarter to that of the last."""
    values, quarter = [each.resident_mib for each in held], max(1, len(held) // 4)
    early, late = statistics.median(values[quarter : 2 * quarter] or values), statistics.median(values[-quarter:])
    return {"first": values[0], "last": values[-1], "greatest": max(values), "growth": round(late - early, 2)}


def _tells(refusal: Refusal) -> bool:
    return refusal.retry_after is not None and refusal.retry_after.isdigit()


def _cpu(watch: Watch) -> dict[str, float]:
    return {name: cpu_seconds(pid) for name, pid in watch.pids.items()} | {"client": time.process_time()}


def show(figures: dict[str, Any], reached: dict[str, bool | None]) -> None:
    """Print figures and verdicts as tables."""
    over = figures["overload"]
    for name in ("requests_per_second", "tokens_per_second"):
        print(f"{name:24}{figures['capacity'][name]:>16} at capacity {over[name]:>16} beyond")
    for name in ("ttft_ms", "itl_ms"):
        first, second = (
            " / ".join(f"{each:.1f}" for each in part[name].values()) for part in (figures["capacity"], over)
        )
        print(f"{name + ' p50/p99/max':24}{first:>28} {second:>23}")
    for name, value in over.items():
        if name not in figures["capacity"]:
            print(f"{name:40} {json.dumps(value)}")
    for name, is_reached in reached.items():
        print(f"{'?' if is_reached is None else 'yes' if is_reached else 'NO':4} {name}")


def main() -> int:
    """Measure, print and save; returns the exit status."""
    parser = make_server_parser(__doc__)
    parser.add_argument("--mock", action="store_true", help="a core without a model")
    parser.add_argument("--seconds", type=float, default=120.0, help="of overload (default: %(default)s)")
    parser.add_argument("--capacity-seconds", type=float, default=60.0, help="before it (default: %(default)s)")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="streams at once (default: %(default)s)")
    parser.add_argument(
        "--max-num-queued-reqs", type=int, default=32, help="requests that run or wait (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    seconds = (4.0, 6.0) if args.quick else (args.capacity_seconds, args.seconds)
    plan = Plan(args.max_num_seqs, args.max_num_queued_reqs, *seconds)
    out = result_file(args, "overload.json")
    try:
        model = find_model(args)
        with tempfile.TemporaryDirectory(prefix="overload-") as scratch:
            log = Path(scratch) / "server.txt"
            if args.mock:
                serving = mock_server(model, log, *plan.flags(), "--tokens-per-second", str(MOCK_RATE))
            else:
                command = serve_command(model, *plan.flags(), "--kv-cache-memory-bytes", str(KV_BYTES))
                serving = server_process(command, log)
            with serving as server:
                figures = asyncio.run(measure(server, plan, args.seed))
    except (FetchError, OSError, ServerError) as error:
        print(f"overload: {error}", file=sys.stderr)
        return 1
    reached = verdicts(figures, plan.seconds)
    show(figures, reached)
    core = "mock" if args.mock else "jaxllm"
    facts = describe_server() | {"model": model.name, "core": core, "plan": asdict(plan)}
    save(out, facts | {"figures": figures, "goals_reached": reached})
    return 1 if False in reached.values() else 0


if __name__ == "__main__":
    sys.exit(main())
