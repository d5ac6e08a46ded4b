"""Compare jaxllm with its peers on questions about pictures, as scripts/benchmark.py describes."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fetch_models import MODELS, default_dir, fetch

from peers.compare import median
from peers.contestants import KV_BYTES, Contestant
from peers.report import Metric, as_text, number, times_better
from peers.turns import say
from peers.worker import PROGRAMS, BenchmarkError, Worker

DTYPES = ("float32", "bfloat16")
SHAPES = {"smolvlm": "SmolVLM-256M", "qwen3_vl": "Qwen3-VL-2B, 2 layers"}
"""The shapes that `save_seeing.py` knows, and their names in the report."""
IMAGES = {"smolvlm": "<image>", "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>"}
PROMPT = "<|im_start|>user\n{images}{question}<|im_end|>\n<|im_start|>assistant\n"
QUESTION, SECOND = "What is in the picture?", "Which of its colours is the brightest one?"
AT_ONCE = 8
TOP = 20
ENGINE: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_seqs": AT_ONCE,
    "kv_cache_memory_bytes": KV_BYTES,
    "block_size": 32,
}
"""What jaxllm and vLLM are told: a cache that holds all, no more than the tasks need, and blocks that are found again
in prompts as short as these, where both would have 128 tokens in a block.
"""
OF_LIBRARY: dict[str, dict[str, Any]] = {
    "jaxllm": {"enforce_eager": True},
    "vllm": {"skip_mm_profiling": True, "limit_mm_per_prompt": {"image": AT_ONCE}},
}
"""jaxllm compiles what the tasks need, at its first use; vLLM does not encode hundreds of tiles to measure memory."""
MOST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.12}
"""How far a log-probability may be from the reference's.

Rounding makes it 7e-6 in float32 and 0.055 in bfloat16; another picture, 0.18 (SmolVLM) and 0.68 (Qwen3-VL).
"""
OURS = "jaxllm"
METRICS = (
    Metric("one_ms", "one picture, ms to the first token", False),
    Metric("second_ms", "second question about it, ms", False),
    Metric("second_sooner", "how many times sooner that is", True),
    Metric("eight_ms", "eight requests at once, ms to the last first token", False),
    Metric("joint_ms", "one request with eight pictures, ms", False),
    Metric("pictures_per_s", "pictures/s, whole way, eight at once", True),
    Metric("tower_per_s", "pictures/s, tower alone", True),
    Metric("start_s", "process start to first answer, s", False),
    Metric("peak_gib", "peak memory, GiB", False),
)
TARGETS = (("one_ms", "hf", 1.5), ("eight_ms", "hf", 1.5), ("one_ms", "vllm", 1.0), ("eight_ms", "vllm", 1.0))
"""How many times better jaxllm has to be than a peer in the same dtype."""
SOONER = 5.0


def checkpoint(shape: str, hf_python: str | None) -> Path:
    """Return the folder of a shape's checkpoint, made once with HF's Python. Raises BenchmarkError without it."""
    folder = default_dir() / f"random-{shape}"
    if folder.is_dir():
        return folder
    if not hf_python:
        raise BenchmarkError("--task pictures needs --hf-python, which makes the checkpoints")
    gguf = fetch(MODELS["smollm2"], default_dir())
    scratch = folder.with_name(f".{folder.name}")
    say(f"writing {folder}")
    command = [hf_python, str(PROGRAMS / "save_seeing.py"), shape, str(gguf.resolve()), str(scratch)]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise BenchmarkError(f"{hf_python} could not make {shape}:\n{done.stderr}")
    return scratch.rename(folder)


def contestants(model: Path, dtypes: Sequence[str], *, vllm: str | None, hf: str | None) -> list[Contestant]:
    """Return jaxllm in each dtype, then the peers with a given Python."""
    runners = []
    for name, label, program, python in (
        (OURS, "jaxllm", "seeing_api", sys.executable),
        ("hf", "HF", "seeing_hf", hf),
        ("vllm", "vLLM", "seeing_api", vllm),
    ):
        for dtype in dtypes if python else ():
            settings: dict[str, Any] = {"model": str(model), "dtype": dtype}
            if program == "seeing_api":
                settings |= {"library": name, "engine": ENGINE | OF_LIBRARY[name]}
            runners.append(Contestant(f"{name}_{dtype}", f"{label}, {dtype}", program, python or "", settings))
    return runners


@dataclass(frozen=True)
class Tasks:
    """The prompts of a model, and how often each is asked: `alone` about one picture, `together` about eight."""

    image: str
    alone: int = 5
    together: int = 1
    of_tower: int = 4
    """The number of pictures that go through the tower alone."""

    def prompt(self, question: str, num_pictures: int = 1) -> str:
        """Return a prompt with pictures before a question."""
        return PROMPT.format(images=self.image * num_pictures, question=question)


def compare(shape: str, runners: Sequence[Contestant], *, rounds: int, quick: bool, scratch: Path) -> dict[str, Any]:
    """Measure all contestants in turns, and return their figures by name. Raises BenchmarkError if answers disagree."""
    tasks = Tasks(IMAGES[shape], alone=1, of_tower=1) if quick else Tasks(IMAGES[shape])
    results: dict[str, Any] = {
        runner.name: {"label": runner.label, "dtype": runner.settings["dtype"], "rounds": []} for runner in runners
    }
    reference: list[Any] = []
    for turn in range(rounds):
        # The reference is first in the first round; then another one is first in each.
        first = turn % len(runners)
        for runner in [*runners[first:], *runners[:first]]:
            say(f"{SHAPES[shape]}, round {turn + 1} of {rounds}: {runner.label}")
            result = results[runner.name]
            with runner.start(scratch / shape / runner.name) as worker:
                answers, start_s = _answers(worker, tasks)
                reference = reference or answers
                result["difference"] = _check(runner, reference, answers)
                result["versions"] = worker.call("versions").value
                result["rounds"].append(_measure(worker, tasks) | {"start_s": round(start_s, 2)})
            say("  " + ", ".join(f"{name} {value:.4g}" for name, value in result["rounds"][-1].items()))
    return {"model": SHAPES[shape], "influence": round(_influence(reference), 3), "contestants": results}


def _answers(worker: Worker, tasks: Tasks) -> tuple[list[Any], float]:
    """Return the ids and likeliest tokens of three questions, one about two pictures, and when the first one came."""
    pictures = [[1], [2, 0]]
    worker.call("draw", [0, 1, 2])
    first = worker.call("answers", [tasks.prompt(QUESTION)], [[0]], TOP)
    prompts = [tasks.prompt(QUESTION, len(numbers)) for numbers in pictures]
    others = worker.call("answers", prompts, pictures, TOP)
    return [*first.value, *others.value], worker.seconds_to(first)


def _measure(worker: Worker, tasks: Tasks) -> dict[str, float]:
    """Return the figures of a warm process: everything is asked once before it is measured."""
    fresh = itertools.count(100)
    prompt, second = tasks.prompt(QUESTION), tasks.prompt(SECOND)

    def draw(num: int) -> list[int]:
        numbers = list(itertools.islice(fresh, num))
        worker.call("draw", numbers)
        return numbers

    def one() -> tuple[float, float]:
        numbers = [draw(1)]
        return worker.call("ask", [prompt], numbers).seconds, worker.call("ask", [second], numbers).seconds

    def eight() -> float:
        return worker.call("ask", [prompt] * AT_ONCE, [[each] for each in draw(AT_ONCE)]).seconds

    def joint() -> float:
        return worker.call("ask", [tasks.prompt(QUESTION, AT_ONCE)], [draw(AT_ONCE)]).seconds

    for warm_up in (one, eight, joint):
        warm_up()
    pairs = [one() for _ in range(tasks.alone)]
    one_s, second_s = (statistics.median(each) for each in zip(*pairs, strict=True))
    eight_s = statistics.median(eight() for _ in range(tasks.together))
    joint_s = statistics.median(joint() for _ in range(tasks.together))
    tower = worker.call("tower", prompt, draw(tasks.of_tower))
    figures = {
        "one_ms": one_s * 1e3,
        "second_ms": second_s * 1e3,
        "second_sooner": one_s / second_s,
        "eight_ms": eight_s * 1e3,
        "joint_ms": joint_s * 1e3,
        "pictures_per_s": AT_ONCE / eight_s,
        "peak_gib": tower.peak_bytes / 2**30,
    }
    if tower.value is not None:
        figures["tower_per_s"] = tasks.of_tower / tower.value
    return {name: round(value, 4) for name, value in figures.items()}


def _check(runner: Contestant, reference: Sequence[Any], answers: Sequence[Any]) -> float:
    """Return the largest difference from the reference's log-probabilities. Raises BenchmarkError if it is too large.

    The tokens that both list are compared: at the end of a list rounding may put one token in another's place.
    """
    differences = []
    for (ids, top), (reference_ids, reference_top) in zip(answers, reference, strict=True):
        if ids != reference_ids:
            lengths = f"{len(ids)}, and the reference {len(reference_ids)}"
            raise BenchmarkError(f"{runner.label} reads a prompt as other tokens: it has {lengths}")
        differences.append(_difference(top, reference_top))
    bound, largest = MOST_DIFFERENCE[runner.settings["dtype"]], float(np.max(differences))
    if not largest <= bound:  # NaN does not compare
        raise BenchmarkError(
            f"{runner.label} disagrees with the reference: log-probabilities differ by {largest:.3g}, and up "
            f"to {bound:g} would be rounding. There is no point in comparing the speed of different results."
        )
    return round(largest, 5)


def _influence(reference: Sequence[Any]) -> float:
    """Return how far another picture moves a log-probability. Raises BenchmarkError if rounding may do as much."""
    moved = _difference(reference[0][1], reference[1][1])
    if not moved > max(MOST_DIFFERENCE.values()):
        raise BenchmarkError(f"another picture moves a log-probability of the reference by only {moved:.3g}")
    return moved


def _difference(left: Sequence[Any], right: Sequence[Any]) -> float:
    """Return the largest difference of two lists of [token, log-probability].

    It is infinite if most tokens are others, and NaN if one of the differences is.
    """
    ours, theirs = dict(map(tuple, left[:TOP])), dict(map(tuple, right[:TOP]))
    common = ours.keys() & theirs.keys()
    if 2 * len(common) <= TOP:
        return float("inf")
    return float(np.max([abs(ours[token] - theirs[token]) for token in common]))


def table(figures: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of one model's table, heading first: medians, and jaxllm's advantage in brackets."""
    results = figures["contestants"]
    medians = {name: median(result["rounds"]) for name, result in results.items()}
    rows = [[figures["model"], *(result["label"] for result in results.values())]]
    for metric in METRICS:
        row = [metric.label]
        for name, result in results.items():
            ours, theirs = medians[f"{OURS}_{result['dtype']}"][metric.key], medians[name].get(metric.key)
            if theirs is None:
                row.append("")
            elif name.startswith(OURS) or metric.key == "second_sooner":
                row.append(number(theirs))
            else:
                row.append(f"{number(theirs)} ({times_better(metric, ours, theirs):.2g}x)")
        rows.append(row)
    return [*rows, ["difference of log-probabilities", *(f"{each['difference']:.2g}" for each in results.values())]]


def judge(figures: Mapping[str, Any]) -> list[str]:
    """Return, for each target of each dtype, whether jaxllm reaches it."""
    results = figures["contestants"]
    medians = {name: median(result["rounds"]) for name, result in results.items()}
    lines = []
    for dtype in dict.fromkeys(result["dtype"] for result in results.values()):
        ours = medians[f"{OURS}_{dtype}"]
        for key, peer, bound in TARGETS:
            if f"{peer}_{dtype}" in medians:
                metric = next(metric for metric in METRICS if metric.key == key)
                ratio = times_better(metric, ours[key], medians[f"{peer}_{dtype}"][key])
                lines.append(f"{_verdict(ratio, bound)}  {dtype}: {metric.label}, {bound:g} times {peer}  {ratio:.2f}")
        sooner = ours["second_sooner"]
        lines.append(f"{_verdict(sooner, SOONER)}  {dtype}: second question {SOONER:g} times sooner  {sooner:.3g}")
    return lines


def _verdict(ratio: float, bound: float) -> str:
    return f"{'met' if ratio >= bound else 'missed':8}"


def summary(report: Mapping[str, Any]) -> str:
    """Return the report as text."""
    return "\n\n".join("\n".join([as_text(table(each)), "", *judge(each)]) for each in report["models"].values())
