"""Compare jaxllm's embeddings with its peers': cosines, then texts per second, as scripts/benchmark.py describes."""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from peers.compare import median
from peers.contestants import KV_BYTES, Contestant
from peers.report import Metric, as_text, number, times_better
from peers.turns import say, take_turns
from peers.worker import Answer, BenchmarkError, Worker

SEED = 23
LENGTHS, MEDIAN_LENGTH, SPREAD = (4, 500), 64, 1.0
"""The tokens of texts: a log-normal mix, cut to a range; `SPREAD` is the deviation of the logarithm."""
MAX_LENGTH = 512
DTYPES = ("float32", "bfloat16")
BATCH_SIZES = (8, 16, 32, 64, 128)
"""The batch sizes that sentence-transformers is tried with."""
MIN_COSINE = {"float32": 1 - 1e-5, "bfloat16": 0.999}
"""The least cosine of embeddings that agree with the reference's, by dtype."""
ENGINE = {"vllm": {"kv_cache_memory_bytes": KV_BYTES}}
"""Without a size vLLM requires nearly all of the machine's memory to be free, even for a model without a KV cache."""
OURS, TARGET = "jaxllm", 2.0
METRICS = (
    Metric("texts_per_s", "texts/s", True),
    Metric("tokens_per_s", "tokens/s", True),
    Metric("one_ms", "one text alone, ms", False),
    Metric("cold_s", "process start to first embedding, empty caches, s", False),
    Metric("warm_s", "process start to first embedding, warm caches, s", False),
    Metric("peak_gib", "peak memory, GiB", False),
)


class Texts:
    """Makes texts of random words, each one token of the model's, from a fixed seed."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._random = random.Random(SEED)
        self._special = self.num_tokens([""])
        words = {entry.lstrip("\u0120\u2581") for entry in self._tokenizer.get_vocab()}
        self._words = sorted(word for word in words if len(word) > 1 and word.isascii() and word.isalpha())

    def mixed(self, num: int) -> list[str]:
        """Return texts of mixed lengths."""
        low, high = LENGTHS
        lengths = (MEDIAN_LENGTH * self._random.lognormvariate(0, SPREAD) for _ in range(num))
        return [self.text(min(max(round(length), low), high)) for length in lengths]

    def text(self, length: int) -> str:
        """Return a text of a number of tokens, including those that the tokenizer adds."""
        return " ".join(self._random.choices(self._words, k=length - self._special))

    def num_tokens(self, texts: Sequence[str]) -> int:
        """Count the tokens of texts."""
        return sum(len(encoding.ids) for encoding in self._tokenizer.encode_batch(list(texts)))


@dataclass(frozen=True)
class Tasks:
    """The texts of the benchmark, the same for each contestant; none comes twice."""

    first: Sequence[str]
    warm_up: Sequence[str]
    measured: Sequence[str]
    alone: Sequence[str]
    num_tokens: int
    """The number of tokens of the measured texts."""

    @classmethod
    def make(cls, model: Path, *, quick: bool) -> Tasks:
        """Make the tasks, or fewer that only show that everything runs."""
        texts, num = Texts(model), 24 if quick else 512
        measured = texts.mixed(num)
        return cls(
            first=[texts.text(16)],
            warm_up=texts.mixed(num),
            measured=measured,
            alone=[texts.text(MEDIAN_LENGTH) for _ in range(2 if quick else 9)],
            num_tokens=texts.num_tokens(measured),
        )


def contestants(model: Path, dtypes: Sequence[str], *, vllm: str | None, hf: str | None) -> list[Contestant]:
    """Return jaxllm in each dtype, then the peers with a given Python."""
    contestants = []
    for name, label, program, python in (
        (OURS, "jaxllm", "vllm_api", sys.executable),
        ("sentence_transformers", "sentence-transformers", "sentence_transformers_api", hf),
        ("vllm", "vLLM", "vllm_api", vllm),
    ):
        for dtype in dtypes if python else ():
            settings: dict[str, Any] = {"model": str(model), "dtype": dtype}
            if program == "vllm_api":
                settings |= {"library": name, "engine": {"runner": "pooling"} | ENGINE.get(name, {})}
            contestants.append(Contestant(f"{name}_{dtype}", f"{label}, {dtype}", program, python or "", settings))
    return contestants


def with_whole_length(model: Path, folder: Path) -> Path:
    """Return a folder of links to a model's files, with sentence-transformers' limit raised to all positions.

    So every contestant reads the texts to their end.
    """
    limits, config = model / "sentence_bert_config.json", model / "config.json"
    if not limits.is_file() or json.loads(config.read_text()).get("max_position_embeddings", 0) < MAX_LENGTH:
        return model
    made = folder / model.name
    made.mkdir(parents=True)
    for path in model.iterdir():
        (made / path.name).symlink_to(path.resolve())
    (made / limits.name).unlink()
    (made / limits.name).write_text(json.dumps(json.loads(limits.read_text()) | {"max_seq_length": MAX_LENGTH}))
    return made


def compare(runners: Sequence[Contestant], model: Path, *, rounds: int, quick: bool, scratch: Path) -> dict[str, Any]:
    """Measure all contestants and return the report's figures. Raises BenchmarkError if embeddings disagree."""
    tasks = Tasks.make(model, quick=quick)
    first = next((each for each in runners if each.program == "sentence_transformers_api"), runners[0])
    judge = replace(first, settings=first.settings | {"dtype": "float32"})
    say(f"the reference: {judge.name.rpartition('_')[0]} in float32")
    with judge.start(scratch / "reference") as worker:
        worker.call("embed", tasks.measured)
        reference = np.array(worker.call("vectors").value, np.float64)
    runs = [Run(each, tasks, reference, scratch / each.name) for each in runners]
    results = take_turns(runs, lambda run, cold: run.warm(cold.get("batch_size")), rounds=rounds, compared="embeddings")
    described = {"texts": len(tasks.measured), "tokens": tasks.num_tokens, "lengths": LENGTHS}
    return {"tasks": described, "contestants": results}


@dataclass(frozen=True)
class Run:
    """A contestant and the reference for its embeddings."""

    contestant: Contestant
    tasks: Tasks
    reference: np.ndarray
    cache: Path

    def cold(self) -> dict[str, Any]:
        """Start with empty caches, time the first embedding, compare all, and find the best size of a batch."""
        with self.contestant.start(self.cache) as worker:
            result: dict[str, Any] = {
                "label": self.contestant.label,
                "dtype": self.contestant.settings["dtype"],
                "cold_s": round(worker.seconds_to(worker.call("embed", self.tasks.first)), 2),
                "versions": worker.call("versions").value,
            }
            worker.call("warm_up")  # this fills the caches
            worker.call("embed", self.tasks.measured)
            result["lowest_cosine"] = self._check(worker)
            if self.contestant.program == "sentence_transformers_api":
                result |= self._best_batch_size(worker)
        return result | {"rounds": []}

    def warm(self, batch_size: int | None) -> dict[str, float]:
        """Start with the caches of the cold run and measure everything."""
        tasks = self.tasks
        options = [] if batch_size is None else [batch_size]
        with self.contestant.start(self.cache) as worker:
            figures = {"warm_s": worker.seconds_to(worker.call("embed", tasks.first))}
            worker.call("warm_up")
            worker.call("embed", tasks.warm_up, *options)
            answer = worker.call("embed", tasks.measured, *options)
            self._check(worker)
            figures["texts_per_s"] = len(tasks.measured) / answer.seconds
            figures["tokens_per_s"] = tasks.num_tokens / answer.seconds
            alone: list[Answer] = [worker.call("embed", [text], *options) for text in tasks.alone]
            figures["one_ms"] = statistics.median(each.seconds * 1e3 for each in alone)
            figures["peak_gib"] = alone[-1].peak_bytes / 2**30
        return {name: round(value, 4) for name, value in figures.items()}

    def _best_batch_size(self, worker: Worker) -> dict[str, Any]:
        worker.call("embed", self.tasks.warm_up, BATCH_SIZES[0])  # a first time
        seconds = {size: worker.call("embed", self.tasks.warm_up, size).seconds for size in BATCH_SIZES}
        speeds = {str(size): round(len(self.tasks.warm_up) / each, 2) for size, each in seconds.items()}
        return {"batch_size": min(BATCH_SIZES, key=lambda size: seconds[size]), "batch_sizes_texts_per_s": speeds}

    def _check(self, worker: Worker) -> float:
        """Return the lowest cosine between the last embeddings and the reference's. Raises BenchmarkError."""
        vectors = np.array(worker.call("vectors").value, np.float64)
        if vectors.shape != self.reference.shape:
            shapes = f"{vectors.shape}, not {self.reference.shape}"
            raise BenchmarkError(f"{self.contestant.label} gave embeddings of shape {shapes}")
        lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(self.reference, axis=1)
        cosines = np.sum(vectors * self.reference, axis=1) / lengths
        worst, bound = int(np.argmin(cosines)), MIN_COSINE[self.contestant.settings["dtype"]]
        if not cosines[worst] >= bound:  # NaN is no cosine
            raise BenchmarkError(
                f"{self.contestant.label} disagrees with the reference: the cosine of text {worst} is "
                f"{cosines[worst]:.6f}, and from {bound:.6g} on it would be rounding. There is no point in comparing "
                "the speed of different results."
            )
        return round(float(cosines[worst]), 8)


def table(report: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the table, heading first: medians of the rounds, and jaxllm's advantage in brackets."""
    results = report["contestants"]
    figures = _medians(results)
    rows = [["", *(result["label"] for result in results.values())]]
    for metric in METRICS:
        row = [metric.label]
        for name, result in results.items():
            ours, theirs = figures[f"{OURS}_{result['dtype']}"][metric.key], figures[name][metric.key]
            better = "" if name.startswith(OURS) else f" ({times_better(metric, ours, theirs):.2g}x)"
            row.append(number(theirs) + better)
        rows.append(row)
    sizes = [str(result.get("batch_size", "")) for result in results.values()]
    cosines = [f"{result['lowest_cosine']:.6f}" for result in results.values()]
    return [*rows, ["batch size, the best of its own", *sizes], ["lowest cosine with the reference", *cosines]]


def judge(report: Mapping[str, Any]) -> list[str]:
    """Return, for each dtype that a peer was measured in, whether jaxllm reaches the target of texts per second."""
    results = report["contestants"]
    figures = _medians(results)
    lines = []
    for dtype in dict.fromkeys(result["dtype"] for result in results.values()):
        peers = [name for name, each in results.items() if each["dtype"] == dtype and not name.startswith(OURS)]
        if peers:
            ratio = figures[f"{OURS}_{dtype}"]["texts_per_s"] / max(figures[name]["texts_per_s"] for name in peers)
            verdict = "met" if ratio >= TARGET else "missed"
            lines.append(f"{verdict:12}  {dtype}: texts/s at least {TARGET:g} times the better peer's  {ratio:.2f}")
    return lines


def summary(report: Mapping[str, Any]) -> str:
    """Return the report as text."""
    tasks = report["tasks"]
    mixed = (
        f"{tasks['texts']} texts of {tasks['tokens']:,} tokens, {tasks['lengths'][0]} to {tasks['lengths'][1]} each."
    )
    return "\n".join([as_text(table(report)), "", mixed, "", *judge(report)])


def _medians(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {name: median(result["rounds"]) | {"cold_s": result["cold_s"]} for name, result in results.items()}
