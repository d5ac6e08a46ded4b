"""Compare whole engines in turns: with jaxllm's own kernels of the CPU, and in plain XLA."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peers.contestants import Contestant, jaxllm
from peers.prompts import Requests, Source
from peers.turns import take_turns

LABELS = {"cpu": "own kernels", "xla": "xla"}
"""The backends of `attention_config`; in plain XLA the matmuls are XLA's too."""
STREAMS = 16
CONTEXT = 2000
ENGINE = {"max_model_len": 2304}
REPEATS = 2

Figures = dict[str, float]


def beside_xla(model: Path, dtype: str, *, rounds: int, quick: bool, scratch: Path) -> dict[str, Figures]:
    """Return tokens/s of each task by both backends, and the median over the rounds of their ratio."""
    runs = [
        Run(
            replace(jaxllm(model, dtype, attention_config={"backend": backend}, **ENGINE), name=label, label=label),
            scratch / backend,
            quick,
        )
        for backend, label in LABELS.items()
    ]
    results = take_turns(runs, Run.warm, rounds=rounds, compared="programs are compiled")
    kernels, xla = (results[label]["rounds"] for label in LABELS.values())
    return {task: _row([of[task] for of in kernels], [of[task] for of in xla]) for task in kernels[0]}


@dataclass(frozen=True)
class Run:
    """An engine with one of the backends."""

    contestant: Contestant
    cache: Path
    quick: bool

    def cold(self) -> dict[str, Any]:
        """Start with empty caches, and fill them."""
        with self.contestant.start(self.cache) as worker:
            worker.call("warm_up")
        return {"rounds": []}

    def warm(self, _: Mapping[str, Any]) -> Figures:
        """Return the tokens/s of each task, in a new process."""
        length = 8 if self.quick else 48
        context = CONTEXT // 10 if self.quick else CONTEXT
        with self.contestant.start(self.cache) as worker:
            source = Source(worker.call("shapes").value["vocab_size"])
            worker.call("warm_up")

            def speed(num_tokens: int, requests: Callable[[], Requests]) -> float:
                """Return the tokens/s of the median call, after a first one that does not count."""
                times = [worker.generate(requests()).seconds for _ in range(1 + REPEATS)]
                return num_tokens / statistics.median(times[1:])

            # A repeated prompt is a prefix hit: only its last block is computed, and then decodes.
            known = source.equal(1, context, length)
            return {
                "one stream, output tokens/s": speed(length, lambda: source.equal(1, 32, length)),
                f"{STREAMS} streams, output tokens/s": speed(
                    STREAMS * length, lambda: source.equal(STREAMS, 32, length)
                ),
                "a prompt of 512, tokens/s": speed(512, lambda: source.equal(1, 512, 1)),
                f"a stream behind {context:,} tokens, tokens/s": speed(length, lambda: known),
            }


def _row(kernels: list[float], xla: list[float]) -> Figures:
    ratio = statistics.median(ours / theirs for ours, theirs in zip(kernels, xla, strict=True))
    medians = (round(statistics.median(each), 1) for each in (kernels, xla))
    return {**dict(zip(LABELS.values(), medians, strict=True)), "times": round(ratio, 2)}
