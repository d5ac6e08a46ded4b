"""Compare jaxllm with its peers: outputs first, then speed, in turns, as scripts/benchmark.py describes."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from peers import agreement
from peers.contestants import Contestant, jaxllm
from peers.prompts import Requests, Source
from peers.turns import say, take_turns
from peers.worker import Answer, Worker

CHECKED_REQUESTS, CHECKED_TOKENS = 16, 32
ROWS = (4, 16, 32, 64, 128, 512)
"""The numbers of rows that matmuls are timed with; XLA is no faster with fewer than 4."""


@dataclass(frozen=True)
class Tasks:
    """The requests of the benchmark, the same for each contestant."""

    first: Requests
    warm_up: Requests
    offline: Requests
    streams: Sequence[Requests]
    first_tokens: Sequence[Requests]

    @classmethod
    def make(cls, vocab_size: int, *, quick: bool, requests: int = 64, context: int | None = None) -> Tasks:
        """Make the tasks, or fewer and shorter ones that only show that everything runs.

        `requests` is how many are generated offline. Prompts have up to 256 tokens offline and 128 for times to first
        tokens, or half of `context` to all of it, and `context`.
        """
        source = Source(vocab_size)
        prompt = (context // 2, context) if context else (16, 256)
        return cls(
            first=source.equal(1, 32, 1),
            warm_up=source.mixed(4 if quick else 16, (16, 128), (8, 16)),
            offline=source.mixed(6, (16, 64), (8, 16)) if quick else source.mixed(requests, prompt, (16, 128)),
            streams=[source.equal(1, 32, 16 if quick else 128) for _ in range(1 if quick else 2)],
            first_tokens=[source.equal(1, context or 128, 1) for _ in range(2 if quick else 5)],
        )

    @property
    def checked(self) -> Requests:
        """Return the requests with outputs to compare with the reference: the first of the offline ones."""
        return self.offline.first(CHECKED_REQUESTS, CHECKED_TOKENS)

    def describe(self) -> dict[str, Any]:
        """Return the numbers for the report."""
        return {
            "offline_requests": len(self.offline.prompts),
            "offline_prompt_tokens": self.offline.prompt_tokens,
            "offline_output_tokens": self.offline.output_tokens,
            "offline_decodes": self.offline.decodes,
            "offline_cached_tokens": self.offline.cached_tokens,
            "stream_output_tokens": self.streams[0].output_tokens,
            "first_token_prompt_tokens": self.first_tokens[0].prompt_tokens,
        }


def compare(
    contestants: Sequence[Contestant], model: Path, dtype: str, *, rounds: int, quick: bool, scratch: Path
) -> dict[str, Any]:
    """Measure all contestants, jaxllm first, and return the report's figures.

    Raises BenchmarkError if outputs disagree.
    """
    shapes, tasks, reference = prepare(model, quick=quick, scratch=scratch)
    runs = [Run(each, tasks, reference, dtype, scratch / each.name) for each in contestants]
    hardware_rounds = []

    def measure_hardware(run: Run) -> None:
        if run is runs[0]:
            say("  and the hardware's own speeds beside it")
            hardware_rounds.append(_hardware_speeds(shapes, dtype, scratch))

    results = take_turns(runs, lambda run, _: run.warm(), rounds=rounds, compared="outputs", after=measure_hardware)
    described = tasks.describe()
    return {
        "tasks": described,
        "shapes": shapes,
        "hardware_speeds": median(hardware_rounds),
        "hardware_speed_rounds": hardware_rounds,
        "reference_speed_rounds": [reference_speeds(each, described, shapes, dtype) for each in hardware_rounds],
        "contestants": results,
    }


def median(rounds: Sequence[Any]) -> Any:
    """Return the median of numbers, or of each number in nested dicts of one structure."""
    if isinstance(rounds[0], Mapping):
        return {name: median([each[name] for each in rounds]) for name in rounds[0]}
    return statistics.median(rounds)


def reference_speeds(
    hardware: Mapping[str, Any], tasks: Mapping[str, Any], shapes: Mapping[str, int], dtype: str
) -> dict[str, float]:
    """Return the speeds of a program that only multiplies and reads K and V, at the rates measured for each alone.

    They are no limits: a better matmul, or a faster moment of the machine, exceeds them.

    Offline, prompts are computed 512 tokens at a time; then each step has a token of every unfinished request, and
    reads their K and V. "stream_memory" is the speed of one stream if only reading the weights once per token takes
    time.
    """
    matmuls = {int(rows): times for rows, times in hardware["matmuls"].items()}
    smallest, bytes_per_s = matmuls[min(matmuls)], hardware["bandwidth"]["read_gb_per_s"] * 1e9
    rows = sorted(matmuls)
    layers, head = ([matmuls[count][name] for count in rows] for name in ("layers_s", "head_s"))
    prompts = tasks["offline_prompt_tokens"] / 512 * matmuls[512]["layers_s"]
    outputs = sum(np.interp(tasks["offline_decodes"], rows, each).sum() for each in (layers, head))
    outputs += np.interp(tasks["offline_requests"], rows, head)  # of the prompts
    cached_bytes = 2 * shapes["num_layers"] * shapes["num_kv_heads"] * shapes["head_dim"] * bytes_each(dtype)
    offline = float(prompts + outputs + tasks["offline_cached_tokens"] * cached_bytes / bytes_per_s)
    weight_bytes = num_weights(shapes) * bytes_each(dtype)
    return {
        "offline_output": tasks["offline_output_tokens"] / offline,
        "offline_total": (tasks["offline_prompt_tokens"] + tasks["offline_output_tokens"]) / offline,
        "stream": 1 / (smallest["layers_s"] + smallest["head_s"]),
        "stream_memory": bytes_per_s / weight_bytes,
        "first_token_ms": (matmuls[128]["layers_s"] + smallest["head_s"]) * 1e3,
    }


def num_weights(shapes: Mapping[str, int], *, head: bool = True) -> int:
    """Return the number of weights that the matmuls of one token read, with or without the output head."""
    d, heads = shapes["hidden_size"], 2 * shapes["num_heads"] + 2 * shapes["num_kv_heads"]
    layer = d * (heads * shapes["head_dim"] + 3 * shapes["intermediate_size"])
    return shapes["num_layers"] * layer + (d * shapes["vocab_size"] if head else 0)


def bytes_each(dtype: str) -> int:
    """Return the bytes of one number."""
    return {"float32": 4, "bfloat16": 2}[dtype]


def prepare(
    model: Path, *, quick: bool, scratch: Path, sizes: Mapping[str, Any] | None = None, **engine: Any
) -> tuple[dict[str, int], Tasks, list[Any]]:
    """Return the model's sizes, the tasks of these `sizes`, and the reference.

    The reference is jaxllm's greedy tokens in float32 and near ties.
    """
    say("jaxllm in float32: the reference")
    with jaxllm(model, "float32", enforce_eager=True, **engine).start(scratch / "reference") as worker:
        shapes = worker.call("shapes").value
        tasks = Tasks.make(shapes["vocab_size"], quick=quick, **(sizes or {}))
        checked = tasks.checked
        reference = worker.call("reference", checked.prompts, checked.lengths, agreement.TOP).value
    return shapes, tasks, reference


@dataclass(frozen=True)
class Run:
    """A contestant and the reference for its outputs."""

    contestant: Contestant
    tasks: Tasks
    reference: Sequence[Any]
    dtype: str
    cache: Path

    def cold(self) -> dict[str, Any]:
        """Start with empty caches, time the first token, and check the outputs."""
        with self.contestant.start(self.cache) as worker:
            result = {
                "label": self.contestant.label,
                "shares_weights": self.contestant.shares_weights,
                "cold_s": round(self._first_token(worker), 2),
                "versions": worker.call("versions").value,
            }
            if self.contestant.shares_weights:
                result["agreement"] = asdict(self._check(worker.generate(self.tasks.checked)))
            worker.call("warm_up")  # this fills the caches
        return result | {"rounds": []}

    def warm(self) -> dict[str, float]:
        """Start with the caches of the cold run and measure everything."""
        with self.contestant.start(self.cache) as worker:
            figures = {"warm_s": self._first_token(worker)}
            worker.call("warm_up")
            if self.contestant.batches:
                worker.generate(self.tasks.warm_up)
                figures |= self._offline(worker)
            streams = [(stream, worker.generate(stream)) for stream in self.tasks.streams]
            figures["stream"] = statistics.median(stream.output_tokens / answer.seconds for stream, answer in streams)
            firsts = [worker.generate(first) for first in self.tasks.first_tokens]
            figures["first_token_ms"] = statistics.median(answer.seconds * 1e3 for answer in firsts)
            figures["peak_gib"] = firsts[-1].peak_bytes / 2**30
        return {name: round(value, 4) for name, value in figures.items()}

    def _first_token(self, worker: Worker) -> float:
        return worker.seconds_to(worker.generate(self.tasks.first))

    def _offline(self, worker: Worker) -> dict[str, float]:
        offline = self.tasks.offline
        answer = worker.generate(offline)
        if self.contestant.shares_weights:
            self._check(answer)
        total = offline.prompt_tokens + offline.output_tokens
        return {"offline_output": offline.output_tokens / answer.seconds, "offline_total": total / answer.seconds}

    def _check(self, answer: Answer) -> agreement.Agreement:
        outputs = answer.value[: len(self.reference)]
        return agreement.compare(self.contestant.label, self.reference, outputs, self.dtype)


def _hardware_speeds(shapes: Mapping[str, int], dtype: str, scratch: Path) -> dict[str, Any]:
    settings = {"shapes": shapes, "dtype": dtype}
    weight_bytes = num_weights(shapes) * bytes_each(dtype)
    with Worker("hardware_speeds", sys.executable, settings, scratch / "hardware_speeds") as worker:
        matmuls = {str(rows): worker.call("matmuls", rows).value for rows in ROWS}
        bandwidth = worker.call("bandwidth", weight_bytes).value
    for rows, times in matmuls.items():
        times["gflop_per_s"] = 2e-9 * int(rows) * num_weights(shapes, head=False) / times["layers_s"]
    return {"matmuls": matmuls, "bandwidth": bandwidth}
