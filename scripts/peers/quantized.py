"""Compare jaxllm with llama.cpp on the same GGUF files: perplexity, then speed, as scripts/benchmark.py describes."""

from __future__ import annotations

import math
import pydoc_data.topics
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.compare import median
from peers.contestants import Contestant
from peers.prompts import Requests, Source
from peers.report import Metric, as_text, number, times_better
from peers.turns import say, take_turns
from peers.worker import BenchmarkError

STREAMS = 16
KV_BYTES = 1 << 28
"""The size of jaxllm's KV cache; it holds all streams."""
PIECES, PIECE = 16, 512
"""The number of pieces of text for the perplexity, and the tokens of each."""
OURS, ROUNDED, THEIRS = "jaxllm", "jaxllm_int8", "llamacpp"
"""The names of contestants: jaxllm by default, jaxllm rounding like llama.cpp, and llama.cpp."""
ROUNDS = {"linear_backend": "cpu_int8", "kv_cache_dtype": "float16"}
"""Settings that round as llama.cpp does: inputs of quantized weights to 8 bits, keys and values to 16."""
METRICS = (
    Metric("stream", "one stream, output tokens/s", True),
    Metric("prefill", "a prompt of 512 tokens, tokens/s", True),
    Metric("streams", f"{STREAMS} streams, output tokens/s", True),
    Metric("cold_s", "process start to first token, empty caches, s", False),
    Metric("warm_s", "process start to first token, warm caches, s", False),
    Metric("peak_gib", "peak memory, GiB", False),
)
TARGETS = {"stream": 1.3, "prefill": 2.0, "streams": 3.0}
"""The targets: jaxllm's speed as a multiple of llama.cpp's."""
MAX_MEMORY, MAX_PERPLEXITY = 1.15, 1.005
"""The most bytes of arrays besides the KV cache, by the file's, and the most perplexity, by llama.cpp's."""


@dataclass(frozen=True)
class Tasks:
    """The requests of the benchmark, the same for all; no prompt comes twice."""

    first: Requests
    warm_up: Sequence[Requests]
    stream: Sequence[Requests]
    prefill: Sequence[Requests]
    streams: Requests

    @classmethod
    def make(cls, vocab_size: int, *, quick: bool) -> Tasks:
        """Make the tasks, or fewer and shorter ones that only show that everything runs."""
        source, length = Source(vocab_size), 8 if quick else 128

        def prefills() -> list[Requests]:
            return [source.equal(1, 512, 1) for _ in range(1 if quick else 5)]

        return cls(
            first=source.equal(1, 32, 1),
            warm_up=[source.equal(STREAMS, 32, 8), *prefills()],
            stream=[source.equal(1, 32, length) for _ in range(1 if quick else 3)],
            prefill=prefills(),
            streams=source.equal(STREAMS, 32, length),
        )


def contestants(gguf: Path, dtype: str, llamacpp: str | None) -> list[Contestant]:
    """Return jaxllm in two settings and, where its Python is given, llama.cpp, which read one file."""
    contestants = []
    for name, label, changes in ((OURS, "jaxllm", {}), (ROUNDED, "jaxllm, cpu_int8, float16 KV", ROUNDS)):
        engine = {"kv_cache_memory_bytes": KV_BYTES, "max_model_len": 2048, **changes}
        settings = {"library": "jaxllm", "model": str(gguf), "dtype": dtype, "engine": engine}
        contestants.append(Contestant(name, label, "vllm_api", sys.executable, settings))
    if llamacpp:
        settings = {"gguf": str(gguf), "streams": STREAMS}
        contestants.append(Contestant(THEIRS, "llama.cpp", "llamacpp_api", llamacpp, settings))
    return contestants


def compare(gguf: Path, dtype: str, llamacpp: str | None, *, rounds: int, quick: bool, scratch: Path) -> dict[str, Any]:
    """Measure jaxllm and llama.cpp with one file and return the figures."""
    runners = contestants(gguf, dtype, llamacpp)
    runners = [each for each in runners if each.name != ROUNDED or _starts(each, scratch / "starts")]
    with runners[0].start(scratch / "shapes") as worker:
        tasks = Tasks.make(worker.call("shapes").value["vocab_size"], quick=quick)
        text = "\n".join(pydoc_data.topics.topics.values())
        pieces = worker.call("tokens", text, 1 if quick else PIECES, PIECE).value
    runs = [Run(each, tasks, pieces, scratch / each.name) for each in runners]
    results = take_turns(runs, lambda run, _: run.warm(), rounds=rounds, compared="perplexity", of=f"{gguf.name}: ")
    return {"file_bytes": gguf.stat().st_size, "kv_bytes": KV_BYTES, "contestants": results}


def _starts(contestant: Contestant, cache: Path) -> bool:
    """Return whether jaxllm starts: it refuses a setting that would round nothing."""
    try:
        with contestant.start(cache) as worker:
            worker.call("versions")
    except BenchmarkError as error:
        if "would round nothing" not in str(error):
            raise
        say(f"{contestant.label} is left out: {error}")
        return False
    return True


@dataclass(frozen=True)
class Run:
    """A contestant and its tasks."""

    contestant: Contestant
    tasks: Tasks
    pieces: Sequence[Sequence[int]]
    cache: Path

    def cold(self) -> dict[str, Any]:
        """Start with empty caches, time the first token, and take the perplexity."""
        with self.contestant.start(self.cache) as worker:
            first = worker.generate(self.tasks.first)
            result = {
                "label": self.contestant.label,
                "cold_s": round(worker.seconds_to(first), 2),
                "versions": worker.call("versions").value,
                "instructions": worker.call("instructions").value,
            }
            if self.contestant.name == OURS:
                result["array_bytes"] = worker.call("array_bytes").value
            worker.call("warm_up")  # this fills the caches
            result["perplexity"] = round(math.exp(statistics.fmean(worker.call("losses", self.pieces).value)), 4)
        return result | {"rounds": []}

    def warm(self) -> dict[str, float]:
        """Start with the caches of the cold run and measure everything."""
        tasks = self.tasks
        with self.contestant.start(self.cache) as worker:
            first = worker.generate(tasks.first)
            figures = {"warm_s": worker.seconds_to(first)}
            worker.call("warm_up")
            for task in tasks.warm_up:
                worker.generate(task)
            figures["stream"] = statistics.median(
                task.output_tokens / worker.generate(task).seconds for task in tasks.stream
            )
            # A prompt's one output token is from the same step.
            seconds = statistics.median(worker.generate(task).seconds for task in tasks.prefill)
            figures["prefill"] = tasks.prefill[0].prompt_tokens / seconds
            figures["streams"] = tasks.streams.output_tokens / worker.generate(tasks.streams).seconds
            figures["peak_gib"] = worker.call("versions").peak_bytes / 2**30
        return {name: round(value, 4) for name, value in figures.items()}


def table(results: Mapping[str, Any]) -> list[list[str]]:
    """Return one file's rows, heading first: figures, and in brackets how many times better than llama.cpp's."""
    contestants = results["contestants"]
    figures = {name: median(run["rounds"]) | {"cold_s": run["cold_s"]} for name, run in contestants.items()}
    rows = [["", *(run["label"] for run in contestants.values())]]
    for metric in METRICS:
        cells = []
        for name, run in figures.items():
            cell = number(run[metric.key])
            if THEIRS in figures and name != THEIRS:
                cell += f" ({times_better(metric, run[metric.key], figures[THEIRS][metric.key]):.2f}x)"
            cells.append(cell)
        rows.append([metric.label, *cells])
    rows.append(["perplexity", *(f"{run['perplexity']:.3f}" for run in contestants.values())])
    return rows


def judge(results: Mapping[str, Any]) -> list[str]:
    """Return each target in words, with the measured value and whether it was met."""
    contestants = results["contestants"]
    memory = (contestants[OURS]["array_bytes"] - results["kv_bytes"]) / results["file_bytes"]
    lines = [_verdict(memory <= MAX_MEMORY, f"arrays but the KV cache: at most {MAX_MEMORY} times the file", memory)]
    if theirs := contestants.get(THEIRS):
        lines += [line for name, each in contestants.items() if name != THEIRS for line in _beside(each, theirs)]
    return lines


def _beside(run: Mapping[str, Any], their: Mapping[str, Any]) -> list[str]:
    """Return the verdicts on one of jaxllm's settings."""
    ours, theirs = median(run["rounds"]), median(their["rounds"])
    lines, label = [], run["label"]
    for metric in METRICS:
        if target := TARGETS.get(metric.key):
            ratio = times_better(metric, ours[metric.key], theirs[metric.key])
            words = f"{label}: {metric.label}: at least {target:g} times llama.cpp's"
            lines.append(_verdict(ratio >= target, words, ratio))
    ratio = run["perplexity"] / their["perplexity"]
    words = f"{label}: perplexity: at most {MAX_PERPLEXITY} times llama.cpp's"
    return [*lines, _verdict(ratio <= MAX_PERPLEXITY, words, ratio)]


def summary(report: Mapping[str, Any]) -> str:
    """Return the report as text."""
    parts = []
    for name, results in report["files"].items():
        said = "; ".join(f"{each['label']}: {each['instructions']}" for each in results["contestants"].values())
        parts += [name, as_text(table(results)), "", *judge(results), "", said, ""]
    return "\n".join(parts).rstrip()


def _verdict(is_met: bool, words: str, value: float) -> str:
    return f"{'met' if is_met else 'missed':12}  {words}  {value:.3f}"
