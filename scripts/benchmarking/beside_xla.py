"""Compare whole engines in turns: with jaxllm's own kernels of the CPU, and in plain XLA."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from benchmarking.contestants import Contestant, jaxllm
from benchmarking.prompts import Requests, Source
from benchmarking.worker import BenchmarkError, Worker

BACKENDS = ("cpu", "xla")
"""Those of `attention_config`; in plain XLA the matmuls are XLA's too."""
STREAMS = 16
CONTEXT = 2000
ENGINE = {"enable_prefix_caching": False, "max_model_len": 2304}
REPEATS = 2

Figures = dict[str, float]


def beside_xla(model: Path, dtype: str, *, rounds: int, quick: bool, scratch: Path) -> dict[str, Figures]:
    """Return tokens/s of each task by both backends, and the median over the rounds of their ratio."""
    speeds: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        order = BACKENDS if number % 2 == 0 else BACKENDS[::-1]
        for backend in order:
            contestant = jaxllm(model, dtype, attention_config={"backend": backend}, **ENGINE)
            for task, speed in _measure(contestant, scratch / backend, quick=quick).items():
                speeds.setdefault(task, {}).setdefault(backend, []).append(speed)
                print(f"round {number + 1}: {task}, {backend}: {speed:.4g}", file=sys.stderr, flush=True)
    return {task: _row(of_task["cpu"], of_task["xla"]) for task, of_task in speeds.items()}


def _row(own: list[float], xla: list[float]) -> Figures:
    ratio = statistics.median(ours / theirs for ours, theirs in zip(own, xla, strict=True))
    return {
        "own kernels": round(statistics.median(own), 1),
        "xla": round(statistics.median(xla), 1),
        "times": round(ratio, 2),
    }


def _measure(contestant: Contestant, cache: Path, *, quick: bool) -> Figures:
    """Return the tokens/s of each task, in a new process."""
    length = 8 if quick else 48
    with contestant.start(cache) as worker:
        source = Source(worker.call("shapes").value["vocab_size"])
        worker.call("warm_up")

        def seconds(num: int, prompt: int, output: int) -> float:
            """Return the median seconds of a call, after one that is not counted."""
            times = [_seconds(worker, source.equal(num, prompt, output)) for _ in range(1 + REPEATS)]
            return statistics.median(times[1:])

        context = CONTEXT // 10 if quick else CONTEXT
        return {
            "one stream, output tokens/s": length / seconds(1, 32, length),
            f"{STREAMS} streams, output tokens/s": STREAMS * length / seconds(STREAMS, 32, length),
            "a prompt of 512, tokens/s": 512 / seconds(1, 512, 1),
            f"a stream behind {context:,} tokens, tokens/s": (length - 1)
            / (seconds(1, context, length) - seconds(1, context, 1)),
        }


def _seconds(worker: Worker, requests: Requests) -> float:
    answer = worker.call("generate", requests.prompts, requests.lengths)
    if list(map(len, answer.value)) != list(requests.lengths):
        raise BenchmarkError("outputs have other lengths than asked")
    return answer.seconds
