"""Measure the cost of the server's process, and its streams' latency, from a client's side."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import json
import os
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.prompts import Source
from peers.worker import Worker

from lib.machine import ROOT
from lib.servers import HOST, ServerProcess, Streamed, ask, server_process, stream

PROMPT_IDS = [8, 9, 10]
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT_IDS},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
}
"""The prompts of the routes whose streams are measured."""
RATE = 50.0
"""The tokens per second of each stream where delays are measured."""
PROMPT_TOKENS = 64


def mock_server(model: Path, log: Path, *flags: str, sources: Path = ROOT) -> Any:
    """Run a server without a model, as `server_process` does, from a copy of these sources."""
    scripts = sources / "scripts"
    env = {**os.environ, "PYTHONPATH": f"{sources}{os.pathsep}{scripts}"}
    return server_process([sys.executable, str(scripts / "mock_server.py"), str(model), *flags], log, env=env)


def measure_saturated(
    model: Path, streams: Sequence[tuple[int, int]], rounds: int, scratch: Path, before: Path | None = None
) -> list[Any]:
    """Return the CPU time per token, in microseconds, for pairs of a number of streams and tokens of each, and for two
    routes. With `before`, the folder of other sources, their server has its rounds in turns with this one's.
    """
    rows = []
    most = max(num for num, _ in streams)
    flags = ("--max-num-seqs", str(most), "--disable-log-stats")
    sources = {"after": ROOT} | ({} if before is None else {"before": before})
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(mock_server(model, scratch / f"saturated-{name}.txt", *flags, sources=folder))
            for name, folder in sources.items()
        }
        for server in servers.values():
            asyncio.run(_streams(server, streams[0][0], 16))
        for (num, num_tokens), path in itertools.product(streams, PROMPTS):
            samples: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
            for index in range(rounds):
                for name in list(servers)[:: 1 if index % 2 == 0 else -1]:
                    samples[name].append(_sample(servers[name], num, num_tokens, path))
            row: dict[str, Any] = {"streams": num, "tokens_of_each": num_tokens, "route": path}
            row |= _medians(samples["after"])
            if before is not None:
                row["before"] = _medians(samples["before"])
                costs = [row["server_cpu_us_per_token"], row["before"]["server_cpu_us_per_token"]]
                row["by_before"] = round(costs[0] / costs[1], 3)
            print(row, file=sys.stderr)
            rows.append(row)
    return rows


def _medians(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: _median(each[name] for each in samples) for name in samples[0]}


def _sample(server: ServerProcess, num: int, num_tokens: int, path: str) -> dict[str, float]:
    cpu, client_cpu, began = server.cpu_seconds(), time.process_time(), time.monotonic()
    answers = asyncio.run(_streams(server, num, num_tokens, path))
    seconds = time.monotonic() - began
    total = sum(each.num_tokens for each in answers)
    return {
        "server_cpu_us_per_token": (server.cpu_seconds() - cpu) / total * 1e6,
        "client_cpu_us_per_token": (time.process_time() - client_cpu) / total * 1e6,
        "tokens_per_second": total / seconds,
        "tokens_per_event": total / sum(len(each.arrivals) for each in answers),
    }


async def _streams(server: ServerProcess, num: int, num_tokens: int, path: str = "/v1/completions") -> list[Streamed]:
    body = {**PROMPTS[path], "max_tokens": num_tokens, "ignore_eos": True}
    return await asyncio.gather(*(stream(server.port, {**body, "seed": 97 * index}, path) for index in range(num)))


def measure_delays(model: Path, num: int, num_tokens: int, scratch: Path) -> dict[str, Any]:
    """Return the milliseconds from the core's step to the client's socket, and the CPU time per token, at RATE.

    The client reads an event later: it shares the cores, and has other streams to read.
    """
    flags = ("--tokens-per-second", str(RATE), "--max-num-seqs", str(num), "--disable-log-stats")
    with mock_server(model, scratch / "delays.txt", *flags) as server:
        asyncio.run(_streams(server, num, 16))
        cpu, client_cpu = server.cpu_seconds(), time.process_time()
        answers = asyncio.run(_streams(server, num, num_tokens))
        cpu, client_cpu = server.cpu_seconds() - cpu, time.process_time() - client_cpu
        with urllib.request.urlopen(f"http://{HOST}:{server.port}/steps") as response:
            steps = sorted(json.load(response))
    total = sum(each.num_tokens for each in answers)
    return {
        "streams": num,
        "tokens_per_second_of_a_stream": RATE,
        "delay_ms": _delays(steps, [moment for each in answers for moment in each.reached]),
        "delay_until_read_ms": _delays(steps, [moment for each in answers for moment in each.arrivals]),
        "server_cpu_us_per_token": round(cpu / total * 1e6, 1),
        "client_cpu_us_per_token": round(client_cpu / total * 1e6, 1),
    }


def _delays(steps: Sequence[float], moments: Sequence[float]) -> dict[str, float]:
    return _quantiles([(each - steps[bisect.bisect_right(steps, each) - 1]) * 1e3 for each in moments])


def measure_requests(model: Path, sizes: Sequence[int], num: int, scratch: Path) -> list[dict[str, Any]]:
    """Return the CPU time of requests for one token, in milliseconds, for several lengths of prompts."""
    rows = []
    flags = ("--max-model-len", str(max(sizes) + 16), "--disable-log-stats")
    with mock_server(model, scratch / "requests.txt", *flags) as server:
        for kind in ("ids", "text"):
            for size in sizes:
                prompt: Any = [8 + i % 1000 for i in range(size)] if kind == "ids" else " the" * size
                body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True}

                async def several(body: dict[str, Any] = body) -> None:
                    for _ in range(num):
                        await ask(server.port, body)

                asyncio.run(several())
                cpu = server.cpu_seconds()
                asyncio.run(several())
                rows.append(
                    {
                        "prompt": kind,
                        "prompt_tokens": size,
                        "server_cpu_ms": round((server.cpu_seconds() - cpu) / num * 1e3, 3),
                    }
                )
    return rows


def serve_command(model: Path, *flags: str) -> list[str]:
    """Return the command of a real server."""
    return [sys.executable, "-m", "jaxllm.cli", "serve", str(model), "--disable-log-stats", *flags]


def measure_served(
    model: Path,
    streams: Sequence[int],
    *,
    rounds: int,
    num_tokens: int,
    vocab_size: int,
    engine: dict[str, Any],
    scratch: Path,
) -> list[dict[str, Any]]:
    """Return tokens per second through the server by those of `LLM.generate` with the same prompts, in turns.

    Both engines run through all rounds, so that a drift of the machine's speed affects them alike. Both get `engine` as
    arguments.
    """
    source, rows = Source(vocab_size), []
    flags = [word for name, value in engine.items() for word in _flag(name, value)]
    with (
        Worker("jaxllm_engines", sys.executable, _offline(model, engine), scratch / "offline") as offline,
        server_process(serve_command(model, *flags), scratch / "served.txt") as server,
    ):
        offline.call("warm_up")
        for num in streams:
            warm = source.equal(num, PROMPT_TOKENS, num_tokens).prompts
            offline.call("generate", warm, num_tokens)
            asyncio.run(complete(server, warm, num_tokens))
            server.wait_idle()
            runs: list[list[Streamed]] = []
            speeds: dict[str, list[float]] = {"llm": [], "server": []}
            for index in range(rounds):
                prompts = source.equal(num, PROMPT_TOKENS, num_tokens).prompts
                for kind in ("llm", "server")[:: 1 if index % 2 == 0 else -1]:
                    if kind == "llm":
                        seconds = offline.call("generate", prompts, num_tokens).seconds
                    else:
                        began = time.monotonic()
                        runs.append(asyncio.run(complete(server, prompts, num_tokens)))
                        seconds = time.monotonic() - began
                    speeds[kind].append(num * num_tokens / seconds)
            rows.append({"streams": num} | _compared(speeds) | latencies(runs))
            print(rows[-1], file=sys.stderr)
    return rows


async def complete(server: ServerProcess, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Streamed]:
    """Continue all prompts at once, greedily, by a number of tokens."""
    body = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    return await asyncio.gather(*(stream(server.port, {"prompt": list(prompt), **body}) for prompt in prompts))


def latencies(runs: Sequence[Sequence[Streamed]]) -> dict[str, Any]:
    """Return medians and 99th percentiles, in milliseconds, of the time to the first event and between events."""
    answers = [each for run in runs for each in run]
    ttft = [(each.arrivals[0] - each.began) * 1e3 for each in answers]
    itl = [(b - a) * 1e3 for each in answers for a, b in zip(each.arrivals, each.arrivals[1:], strict=False)]
    return {name: _quantiles(values) for name, values in (("ttft_ms", ttft), ("itl_ms", itl))}


def _compared(speeds: dict[str, list[float]]) -> dict[str, Any]:
    first, second = speeds
    ratios = [b / a for a, b in zip(speeds[first], speeds[second], strict=True)]
    return {
        "tokens_per_second": {kind: round(statistics.median(each), 1) for kind, each in speeds.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(each, 3) for each in ratios],
    }


def _quantiles(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    return {name: round(values[int(q * (len(values) - 1))], 2) for name, q in (("p50", 0.5), ("p99", 0.99))}


def _offline(model: Path, engine: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "llm", "model": str(model), "engine": {**engine, "disable_log_stats": True}}


def _flag(name: str, value: Any) -> list[str]:
    return [f"--{name.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value)]


def _median(values: Any) -> float:
    return round(statistics.median(values), 1)
