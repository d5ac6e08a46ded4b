"""Measure the host's work per step beside a device that computes nothing: the engine, scheduler and packing are real.

    scripts/bench.py host                    # at 64, 256 and 1,024 sequences
    scripts/bench.py host --beside TREE      # in turns with another tree; writes benchmarks/results/host_time_cpu.json
    scripts/bench.py host --profile          # also shows the functions that take the most time

All figures are processor time of the engine's thread, so that other programs on the machine do not count. The device is
that of lib/mock_device.py, and its clock is the same processor time. What matters is the time from when a step's result
is there to the next launch: the device needs that launch before it has ended the step that it then runs. "output" is
what users get made of a step: text, stop strings, log-probabilities.

Workloads:
    plain     sequences that decode, with a temperature, for final outputs, as in LLM.generate
    rich      sequences that decode, streamed, with two stop strings and logprobs=1
    turnover  as plain, but answers have 32 to 159 tokens: in a step some end, and others begin; all steps count
"""

from __future__ import annotations

import argparse
import cProfile
import datetime as dt
import json
import os
import platform
import pstats
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import count, pairwise
from pathlib import Path
from time import thread_time
from typing import Any

import jax
import numpy as np
from fetch_models import MODELS, default_dir
from lib.machine import describe_machine, describe_sources
from lib.mock_core import TEXT, start_mock
from lib.mock_device import DeviceClock, MockLauncher, ProcessorTime, StepTimes
from lib.results import RESULTS, make_parser, save

import jaxllm
from jaxllm import SamplingParams
from jaxllm.engine.client.in_process import InprocClient
from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.engine.offline.llm_engine import LLMEngine
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.sampling_params import RequestOutputKind

PARTS = {
    "plan": "schedule the next step, grow block tables",
    "build": "pack the plan into two host buffers",
    "dispatch": "hand the step to the runtime",
    "fetch": "turn the result's arrays into Python values",
    "commit": "record tokens, register blocks, end sequences",
    "output": "detokenize, look for stop strings, make outputs",
    "other": "the rest of LLMEngine.step",
}
TARGETS_MS = {256: 1.5, 1024: 4.0}
"""The most milliseconds from a plain step's result to the next launch, by sequences."""
TIMES = StepTimes(plain=10.0, chunk=12.0, full=12.0)
SIZES = (64, 256, 1024)
WARM_UP_STEPS = 20
STOP = ["[[END OF THE ANSWER]]", "[[NOTHING FOLLOWS]]"]
MAX_MODEL_LEN, BLOCK_SIZE = 4096, 64
Steps = list[dict[str, float]]


class Stopwatch:
    """Times wrapped methods; time in a wrapped method that another one calls counts for the inner one only."""

    def __init__(self, now: Callable[[], float] = thread_time) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._now = now
        self._inner = [0.0]
        """For each open call, the time already counted for others inside it."""

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Replace a function of `owner` by a function that adds its time to `part`."""
        setattr(owner, name, self.timed(getattr(owner, name), part))

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return `function`, wrapped so that its time is added to `part`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = self._now()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = self._now() - start
                self.seconds[part] += elapsed - self._inner.pop()
                self._inner[-1] += elapsed

        return call


def make_engine(model: str, seqs: int, clock: DeviceClock) -> tuple[LLMEngine, Any]:
    """Return an engine on the mock device, and its core."""
    num_blocks = 1 + seqs * (MAX_MODEL_LEN // BLOCK_SIZE)  # none is preempted
    args = EngineArgs(
        model=model, max_num_seqs=seqs, max_num_batched_tokens=max(2048, 2 * seqs), max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE, num_gpu_blocks_override=num_blocks, disable_log_stats=True,
    )  # fmt: skip
    tokenizers: list[Any] = []
    core, ready = start_mock(args, tokenizers.append, device=clock)
    return LLMEngine(InprocClient(core), FrontEnd(ready, tokenizers[0], core.check)), core


def instrument(engine: Any, core: Any, watch: Stopwatch) -> None:
    """Wrap the parts of the host's work; waiting for the device and its work are no part."""
    from jaxllm.execution import model_runner

    watch.wrap(core._scheduler, "plan", "plan")
    watch.wrap(core._runner, "run", "build")
    watch.wrap(MockLauncher, "_send", "dispatch")
    for name in ("_milliseconds", "_sample", "_logprobs"):
        watch.wrap(MockLauncher, name, "device")
    watch.wrap(model_runner.RunningStep, "result", "fetch")
    watch.wrap(core._scheduler, "commit", "commit")
    watch.wrap(engine.front.outputs, "process_outputs", "output")
    watch.wrap(engine, "step", "other")


def requests(workload: str, num_tokens: int) -> Iterator[tuple[str, SamplingParams]]:
    """Yield prompts that differ in length, so that they fill blocks at different steps, and their parameters."""
    words = TEXT.read_text(encoding="utf-8").split()
    for i in count():
        start = 7 * i % (len(words) // 2)
        prompt = " ".join(words[start : start + 16 + 2 * i % 96])
        more: dict[str, Any] = {"output_kind": RequestOutputKind.FINAL_ONLY}
        if workload == "rich":
            more = {"stop": STOP, "logprobs": 1, "output_kind": RequestOutputKind.DELTA}
        if workload == "turnover":
            num_tokens = 32 + 37 * i % 128
        yield prompt, SamplingParams(temperature=0.8, max_tokens=num_tokens, ignore_eos=True, seed=i, **more)


def measure(model: str, workload: str, seqs: int, num_steps: int, profile: bool = False) -> dict[str, Any]:
    """Return the figures of one workload and size."""
    clock, watch = DeviceClock(TIMES, ProcessorTime()), Stopwatch()
    engine, core = make_engine(model, seqs, clock)
    new = requests(workload, 4 * num_steps + seqs)
    names = map(str, count())

    def add() -> None:
        prompt, params = next(new)
        engine.add_request(next(names), prompt, params)

    for _ in range(seqs):
        add()
    most = 0.7 * seqs if workload == "turnover" else seqs  # there the first end before the last begin
    while not clock.steps or clock.steps[-1].num_rows < most:
        _step(engine, add)
    for _ in range(WARM_UP_STEPS):
        _step(engine, add)
    originals = {name: getattr(MockLauncher, name) for name in ("_send", "_milliseconds", "_sample", "_logprobs")}
    from jaxllm.execution.model_runner import RunningStep

    result = RunningStep.result
    profiler = cProfile.Profile(thread_time)
    if not profile:
        instrument(engine, core, watch)
    steps, first = [], len(clock.steps)
    for _ in range(num_steps):
        watch.seconds.clear()
        if profile:
            profiler.enable()
        outputs = engine.step()
        if profile:
            profiler.disable()
        steps.append(dict(watch.seconds))
        for output in outputs:
            if output.finished:
                add()
    for name, original in originals.items():
        setattr(MockLauncher, name, original)
    RunningStep.result = result
    if profile:
        return {"profile": _slowest(profiler, num_steps)}
    return _summarize(steps, clock.steps[first:])


def _step(engine: LLMEngine, add: Callable[[], None]) -> None:
    for output in engine.step():
        if output.finished:
            add()


def _summarize(steps: Steps, on_device: list[Any]) -> dict[str, Any]:
    """Return milliseconds per step, microseconds per token, and the device's idle milliseconds per step."""
    launches = [step.launched for step in on_device]
    gaps = [after.begins - before.ends for before, after in pairwise(on_device)]
    waits = []
    for step in on_device:
        if step.taken is not None and step.taken < launches[-1]:
            waits.append(launches[int(np.searchsorted(launches, step.taken))] - step.taken)
    columns = {part: np.array([step.get(part, 0.0) for step in steps]) * 1e3 for part in PARTS}
    total = sum(columns.values(), np.zeros(len(steps)))
    num_rows = statistics.mean(step.num_rows for step in on_device)
    to_launch = np.array(waits) * 1e3
    return {
        "result_to_launch_ms": _rounded(np.median(to_launch)),
        "result_to_launch_ms_mean": _rounded(to_launch.mean()),
        "result_to_launch_ms_p99": _rounded(np.percentile(to_launch, 99)),
        "output_ms": _rounded(np.median(columns["output"])),
        "output_us_per_token": _rounded(columns["output"].mean() * 1e3 / num_rows),
        "step_ms": _rounded(np.median(total)),
        "step_ms_mean": _rounded(total.mean()),
        "us_per_token": _rounded(total.mean() * 1e3 / num_rows),
        "device_idle_ms": _rounded(statistics.mean(gaps) * 1e3),
        "parts_ms": {part: _rounded(np.median(column)) for part, column in columns.items()},
    }


def _rounded(value: Any) -> float:
    return round(float(value), 3)


def _slowest(profiler: cProfile.Profile, num_steps: int, most: int = 25) -> list[dict[str, Any]]:
    """Return the functions with the most time of their own, under cProfile, which makes calls of Python slower."""
    stats: Any = pstats.Stats(profiler)
    rows = sorted(stats.stats.items(), key=lambda row: -row[1][2])[:most]
    return [
        {
            "function": f"{Path(file).name}:{line} {name}" if line else name,
            "calls_per_step": round(calls / num_steps, 1),
            "own_us_per_step": round(own * 1e6 / num_steps, 1),
        }
        for (file, line, name), (_, calls, own, _, _) in rows
    ]


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each workload and size, of this process's jaxllm."""
    figures: dict[str, Any] = {}
    for workload in args.workloads:
        for seqs in args.seqs:
            print(f"{workload} {seqs}", file=sys.stderr, flush=True)
            figures[f"{workload} {seqs}"] = measure(args.model, workload, seqs, args.steps)
    if args.profile:
        figures["profile"] = {
            name: measure(args.model, name, max(args.seqs), args.steps, profile=True)["profile"]
            for name in args.workloads
        }
    return figures


def measure_in_turns(args: argparse.Namespace, trees: dict[str, Path]) -> dict[str, Any]:
    """Return each tree's medians over the rounds; in a round each tree measures all in a process of its own."""
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "figures.json"
        for _ in range(args.rounds):
            for name, tree in trees.items():
                program = str(Path(__file__).resolve().parents[1] / "bench.py")
                command = [sys.executable, program, "host", "--model", args.model, "--steps", str(args.steps)]
                command += ["--json", str(out), "--seqs", *map(str, args.seqs), "--workloads", *args.workloads]
                subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(tree)})
                rounds[name].append(json.loads(out.read_text())["figures"])
    return {name: _median(each) for name, each in rounds.items()}


def _median(rounds: list[Any]) -> Any:
    if isinstance(rounds[0], dict):
        return {key: _median([each[key] for each in rounds]) for key in rounds[0]}
    return round(statistics.median(rounds), 3)


def show(figures: dict[str, Any]) -> None:
    """Print one tree's figures."""
    columns = ("result_to_launch_ms", "output_ms", "output_us_per_token", "step_ms", "step_ms_mean", "us_per_token")
    print(f"{'':14}" + "".join(f"{name:>21}" for name in columns) + "   " + " ".join(f"{name:>8}" for name in PARTS))
    for name, row in figures.items():
        if name == "profile":
            continue
        parts = " ".join(f"{row['parts_ms'][part]:8.3f}" for part in PARTS)
        print(f"{name:14}" + "".join(f"{row[column]:21.3f}" for column in columns) + "   " + parts)
    for workload, rows in figures.get("profile", {}).items():
        print(f"\n{workload}: own time per step, in microseconds under cProfile")
        for row in rows:
            print(f"{row['own_us_per_step']:9.1f} {row['calls_per_step']:9.1f} calls  {row['function']}")


def describe() -> dict[str, Any]:
    """Return what the figures depend on."""
    packages = ("jax", "jaxlib", "numpy", "msgspec", "tokenizers")
    return describe_sources() | {
        "date": dt.date.today().isoformat(),
        "machine": describe_machine() | {"device": jax.devices()[0].device_kind},
        "versions": {"jaxllm": jaxllm.__version__, "python": platform.python_version()}
        | {name: version(name) for name in packages},
    }


def main() -> int:
    """Measure, print and write."""
    parser = make_parser(__doc__)
    default_model = default_dir() / MODELS["smollm2"].name
    parser.add_argument("--model", default=str(default_model), help="its tokenizer and sizes (default: %(default)s)")
    parser.add_argument("--seqs", type=int, nargs="+", default=SIZES, help="sequences that run (default: 64 256 1024)")
    workloads = ("plain", "rich", "turnover")
    parser.add_argument("--workloads", nargs="+", choices=workloads, default=workloads)
    parser.add_argument("--steps", type=int, default=200, help="steps to measure (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of --beside (default: %(default)s)")
    parser.add_argument("--beside", type=Path, metavar="TREE", help="another checkout, measured in turns with this one")
    parser.add_argument("--profile", action="store_true", help="show the slowest functions at the largest size")
    args = parser.parse_args()
    if args.model == str(default_model) and not default_model.is_file():
        parser.error(f"{default_model} is missing: run scripts/fetch_models.py smollm2, or give --model")
    out = args.json
    if args.beside is None:
        figures = measure_all(args)
        show(figures)
    else:
        trees = {"before": args.beside.resolve(), "after": Path(__file__).resolve().parents[2]}
        figures = measure_in_turns(args, trees)
        for name, of_tree in figures.items():
            print(f"\n{name}")
            show(of_tree)
        out = out or RESULTS / "host_time_cpu.json"
    settings = {"tokenizer": Path(args.model).name, "steps": args.steps, "block_size": BLOCK_SIZE}
    settings |= {"rounds": args.rounds if args.beside else 1, "device_ms": TIMES._asdict(), "targets_ms": TARGETS_MS}
    save(out, describe() | {"settings": settings, "figures": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
