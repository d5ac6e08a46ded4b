"""Measure the host's work per step: 64 sequences that really decode, with text, two stop strings and logprobs=1.

The real engine and tokenizer run a real model, twice. In the first run this machine's device computes; each part of the
host's work is timed while the device rests. On a CPU this is not the host alone: a step's computation evicts the
host's data from the processor's caches. So the second run repeats the first, step for step, with the device's recorded
answers in place of the device, as if it were another chip. The outputs are DELTA, the most expensive kind: every step
makes a RequestOutput per sequence.
"""

from __future__ import annotations

import argparse
import datetime as dt
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import jax
import numpy as np
from fetch_models import MODELS, default_dir
from lib.machine import describe_machine
from lib.results import make_parser, save

import jaxllm

PARTS = {
    "plan": "plan the next step: schedule, grow block tables",
    "build": "pack the plan into two host buffers",
    "dispatch": "hand the step to the runtime",
    "fetch": "turn the result's arrays into Python values",
    "commit": "record tokens, free and register blocks",
    "output": "detokenize, look for stop strings, log-probabilities, RequestOutputs",
    "other": "the rest of LLMEngine.step",
    "total": "",
    "host": "total less dispatch",
}
QUANTILES = {"p50": 50, "p99": 99, "max": 100}
TARGET_MS = 2.0
STOP = ["[[END OF THE ANSWER]]", "[[NOTHING FOLLOWS]]"]
WARM_UP_STEPS = 20
TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
Steps = list[dict[str, float]]


class Stopwatch:
    """Times wrapped methods; time in a wrapped method that another one calls counts for the inner one only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]
        """For each open call, the time already counted for others inside it."""

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Replace a function of `owner` by a function that adds its time to `part`."""
        setattr(owner, name, self.timed(getattr(owner, name), part))

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return `function`, wrapped so that its time is added to `part`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = perf_counter() - start
                self.seconds[part] += elapsed - self._inner.pop()
                self._inner[-1] += elapsed

        return call


class Replay:
    """Replaces the compiled programs: returns recorded answers, and computes nothing."""

    def __init__(self, answers: list[Any], watch: Stopwatch, keys: Sequence[Any]) -> None:
        self.keys = keys
        self._answers = iter(answers)
        self._make = watch.timed(lambda: jax.device_put(next(self._answers)), "device")

    def __contains__(self, key: Any) -> bool:
        return True

    def get(self, key: Any) -> Callable[..., Any]:
        """Return the program of one step."""
        del key
        return self._run

    def _run(self, params: Any, state: Any, previous_tokens: Any, *inputs: Any) -> tuple[Any, Any]:
        del params, previous_tokens
        jax.device_put(inputs)  # as a real program sends them
        return state, self._make()


def make_engine(args: argparse.Namespace) -> Any:
    """Load the model."""
    from jaxllm.engine.offline.llm_engine import LLMEngine
    from jaxllm.resolve.engine_args import EngineArgs

    # enforce_eager: no thread compiles what is not needed while we measure. No sequence may be preempted.
    settings = {"max_num_seqs": args.seqs, "enforce_eager": True, "kv_cache_memory_bytes": args.seqs << 26}
    return LLMEngine.from_engine_args(EngineArgs(model=args.model, **settings))


def instrument(engine: Any, watch: Stopwatch) -> list[Any]:
    """Wrap the parts of the host's work, and return the list that will hold the device's answers.

    Waiting for the device is counted as "device", which no figure includes.
    """
    from jaxllm.execution import model_runner

    core, running_step = engine._core._core, cast("Any", model_runner.RunningStep)
    run, result = core._runner.run, watch.timed(running_step.result, "fetch")
    answers: list[Any] = []

    def run_and_wait(plan: Any, masks: Any) -> Any:
        step = run(plan, masks)
        wait(step._output)
        return step

    def result_and_record(step: Any) -> Any:
        values = result(step)
        record(step._output)
        return values

    wait = watch.timed(jax.block_until_ready, "device")
    record = watch.timed(lambda output: answers.append(jax.device_get(output)), "device")
    core._runner.run, running_step.result = run_and_wait, result_and_record
    for owner, name, part in (
        (core._scheduler, "plan", "plan"),
        (model_runner, "build", "build"),
        (core._runner, "run", "dispatch"),
        (core._scheduler, "commit", "commit"),
        (engine.front.outputs, "process_outputs", "output"),
        (engine, "step", "other"),
    ):
        watch.wrap(owner, name, part)
    return answers


def measure(engine: Any, watch: Stopwatch, args: argparse.Namespace) -> Steps:
    """Return each part's seconds in the steps in which all sequences decode, except the first of these."""
    from jaxllm import SamplingParams
    from jaxllm.sampling_params import RequestOutputKind

    words = TEXT.read_text(encoding="utf-8").split()
    num_steps = WARM_UP_STEPS + args.steps
    for i in range(args.seqs):
        params = SamplingParams(
            max_tokens=num_steps + args.seqs, ignore_eos=True, seed=i, stop=STOP, logprobs=1,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        # Their lengths differ, so that they fill blocks at different steps.
        start = 7 * i % (len(words) // 2)
        engine.add_request(str(i), " ".join(words[start : start + 2 * i + 16]), params)
    steps: Steps = []
    while len(steps) < num_steps:
        watch.seconds.clear()
        outputs = engine.step()
        lengths = [len(chunk.token_ids) for chunk in engine._core._core._in_flight.plan.chunks]
        if len(outputs) == lengths.count(1) == args.seqs:
            steps.append(dict(watch.seconds))
            if len(steps) % 50 == 0:
                print(f"{len(steps)} of {num_steps} steps", file=sys.stderr)
        elif steps:
            raise RuntimeError("a sequence ended: these steps are not what is to be measured")
    engine.abort_request(map(str, range(args.seqs)))
    while engine._core._core.has_unfinished_requests():
        engine.step()
    engine.reset_prefix_cache()
    return steps[WARM_UP_STEPS:]


def summarize(steps: Steps) -> dict[str, dict[str, float]]:
    """Return p50, p99 and the maximum, in milliseconds, of each part, the total, and the total less dispatch."""
    columns = {part: np.array([step.get(part, 0.0) for step in steps]) for part in PARTS}
    columns["total"] = sum(columns.values(), np.zeros(len(steps)))
    columns["host"] = columns["total"] - columns["dispatch"]
    return {
        part: {name: round(float(np.percentile(seconds, q) * 1e3), 3) for name, q in QUANTILES.items()}
        for part, seconds in columns.items()
    }


def show(title: str, figures: dict[str, dict[str, float]]) -> None:
    """Print one run's figures."""
    print(f"\n{title}\n{'ms per step':12}" + "".join(f"{name:>9}" for name in QUANTILES))
    for part, row in figures.items():
        print(f"{part:12}" + "".join(f"{row[name]:9.3f}" for name in QUANTILES) + f"  {PARTS[part]}".rstrip())


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the figures depend on."""
    packages = ("jax", "jaxlib", "numpy", "msgspec", "tokenizers")
    return {
        "date": dt.date.today().isoformat(),
        "machine": describe_machine() | {"device": jax.devices()[0].device_kind},
        "versions": {"jaxllm": jaxllm.__version__, "python": platform.python_version()}
        | {name: version(name) for name in packages},
        "settings": {
            "model": Path(args.model).name,
            "sequences": args.seqs,
            "steps": args.steps,
        },
    }


def main() -> int:
    parser = make_parser(__doc__)
    default_model = default_dir() / MODELS["smollm2"].name
    parser.add_argument("--model", default=str(default_model), help="folder, .gguf or hub id (default: %(default)s)")
    parser.add_argument("--seqs", type=int, default=64, help="sequences that decode (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=250, help="steps to measure (default: %(default)s)")
    args = parser.parse_args()
    if args.model == str(default_model) and not default_model.is_file():
        parser.error(f"{default_model} is missing: run scripts/fetch_models.py smollm2, or give --model")
    engine, watch = make_engine(args), Stopwatch()
    answers = instrument(engine, watch)
    device = jax.devices()[0]
    figures = {"with_device": summarize(measure(engine, watch, args))}
    launcher = engine._core._core._runner.launcher
    programs, launcher.programs = launcher.programs, Replay(answers[:], watch, launcher.programs.keys)
    figures["device_elsewhere"] = summarize(measure(engine, watch, args))
    launcher.programs = programs
    show(f"with {device.device_kind} as the device, resting while the host is timed", figures["with_device"])
    show("the same steps, with the device elsewhere", figures["device_elsewhere"])
    p50 = figures["device_elsewhere"]["host"]["p50"]
    print(f"\nhost p50 is {p50:.2f} ms, {'under' if p50 < TARGET_MS else 'OVER'} the target of {TARGET_MS:g} ms")
    save(args.json, describe(args) | {"milliseconds_per_step": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
