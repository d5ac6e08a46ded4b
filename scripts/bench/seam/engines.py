"""Compare `AsyncLLM`, its core in a process of its own, with `LLM`: tokens per second, and time to a first token."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers.prompts import Source
from peers.worker import Worker

KINDS = ("llm", "async")
NUM_STREAMS = 64
PROMPT_TOKENS = 64


def measure_throughput(
    model: Path, *, rounds: int, num_tokens: int, vocab_size: int, engine: dict[str, Any], scratch: Path
) -> dict[str, Any]:
    """Return tokens per second of 64 streams in both engines, in rounds that begin with another engine each time.

    Both engines run through all rounds, so that a drift of the machine's speed affects them alike. The CPU time of an
    engine during the other's turn is measured too, to show that it is idle.
    """
    source = Source(vocab_size)
    speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    idle_share: list[float] = []
    num_same = num_compared = 0
    with (
        _start("llm", model, engine, scratch) as offline,
        _start("async", model, engine, scratch) as online,
    ):
        workers = {"llm": offline, "async": online}
        for worker in workers.values():
            worker.call("warm_up")
            worker.call("generate", source.equal(NUM_STREAMS, PROMPT_TOKENS, num_tokens).prompts, num_tokens)
        for index in range(rounds):
            prompts = source.equal(NUM_STREAMS, PROMPT_TOKENS, num_tokens).prompts
            outputs = {}
            for kind in KINDS if index % 2 == 0 else KINDS[::-1]:
                idle = workers["async" if kind == "llm" else "llm"]
                before = idle.call("cpu_seconds").value
                answer = workers[kind].call("generate", prompts, num_tokens)
                idle_share.append((idle.call("cpu_seconds").value - before) / answer.seconds)
                speeds[kind].append(NUM_STREAMS * num_tokens / answer.seconds)
                outputs[kind] = answer.value
            num_same += sum(a == b for a, b in zip(outputs["llm"], outputs["async"], strict=True))
            num_compared += NUM_STREAMS
            print(
                f"round {index + 1}: " + ", ".join(f"{k} {v[-1]:.0f} tokens/s" for k, v in speeds.items()),
                file=sys.stderr,
            )
    ratios = [online / offline for online, offline in zip(speeds["async"], speeds["llm"], strict=True)]
    return {
        "streams": NUM_STREAMS,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": num_tokens,
        "rounds": {kind: [round(speed, 1) for speed in speeds[kind]] for kind in KINDS},
        "tokens_per_second": {kind: round(statistics.median(speeds[kind]), 1) for kind in KINDS},
        "ratio": round(statistics.median(ratios), 4),
        "share_of_outputs_that_are_the_same": round(num_same / num_compared, 4),
        "cpu_of_the_idle_engine": round(max(idle_share), 4),
    }


def measure_startup(model: Path, *, pairs: int, engine: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Return the seconds from the start of a process to its first token, in both engines with warm caches, in turns."""

    def seconds(kind: str) -> float:
        with _start(kind, model, engine, scratch) as worker:
            return worker.seconds_to(worker.call("first_token", "The capital of France is"))

    for kind in KINDS:
        _fill_caches(kind, model, engine, scratch)
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for index in range(pairs):
        for kind in KINDS if index % 2 == 0 else KINDS[::-1]:
            taken[kind].append(seconds(kind))
        print(f"pair {index + 1}: " + ", ".join(f"{k} {v[-1]:.2f} s" for k, v in taken.items()), file=sys.stderr)
    median: Callable[[list[float]], float] = statistics.median
    return {
        "pairs": {kind: [round(value, 3) for value in taken[kind]] for kind in KINDS},
        "seconds": {kind: round(median(taken[kind]), 3) for kind in KINDS},
        "more_seconds": round(median([b - a for a, b in zip(taken["llm"], taken["async"], strict=True)]), 3),
    }


def _fill_caches(kind: str, model: Path, engine: dict[str, Any], scratch: Path) -> None:
    with _start(kind, model, engine, scratch) as worker:
        worker.call("warm_up")
        worker.call("first_token", "The capital of France is")


def _start(kind: str, model: Path, engine: dict[str, Any], scratch: Path) -> Worker:
    """Start an engine with a folder for its kind's caches and log."""
    settings = {"kind": kind, "model": str(model), "engine": engine}
    return Worker("jaxllm_engines", sys.executable, settings, scratch / kind)
