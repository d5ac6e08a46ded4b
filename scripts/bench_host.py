#!/usr/bin/env python3
"""Measure the host's work per step: 64 sequences that really decode, with text, two stop strings and logprobs=1.

The real engine and tokenizer run a real model. What the device does is left out: before a part of the host is timed,
the device has finished, as if it were not this machine's CPU (--beside-device leaves the two to compete). The outputs
are DELTA, the dearest kind: every step makes a RequestOutput per sequence.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import numpy as np
from fetch_models import MODELS, default_dir

PARTS = {
    "plan": "plan the next step: schedule, grow block tables",
    "build": "pack the plan into two host buffers",
    "dispatch": "hand the step to the runtime (on CPU it may begin to compute right there)",
    "fetch": "turn the result's arrays into Python values",
    "commit": "record tokens, free and register blocks",
    "output": "detokenize, look for stop strings, log-probabilities, RequestOutputs",
    "other": "the rest of LLMEngine.step",
}
QUANTILES = {"p50": 50, "p99": 99, "max": 100}
HOST = "host"
TARGET_MS = 2.0
STOP = ["[[END OF THE ANSWER]]", "[[NOTHING FOLLOWS]]"]
WARM_UP_STEPS = 20
TEXT = Path(__file__).resolve().parent.parent / "LICENSE"


class Stopwatch:
    """Times wrapped methods; time in a wrapped method that another one calls counts for the inner one only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]
        """Per wrapped call that is open, the time already counted for others inside it."""

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Replace a function of `owner` by one that counts its time for `part`."""
        setattr(owner, name, self.timed(getattr(owner, name), part))

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return `function`, its time counted for `part`."""

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


def make_engine(args: argparse.Namespace) -> Any:
    """Load the model and queue the sequences. Their lengths differ, so that they fill blocks at different steps."""
    from jaxllm import SamplingParams
    from jaxllm.config import EngineArgs
    from jaxllm.engine.llm_engine import LLMEngine
    from jaxllm.sampling_params import RequestOutputKind

    # enforce_eager: no thread compiles what is not needed while we measure.
    engine = LLMEngine.from_engine_args(EngineArgs(model=args.model, max_num_seqs=args.seqs, enforce_eager=True))
    words = TEXT.read_text(encoding="utf-8").split()
    for i in range(args.seqs):
        params = SamplingParams(
            max_tokens=args.steps + WARM_UP_STEPS + args.seqs, ignore_eos=True, seed=i, stop=STOP, logprobs=1,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        engine.add_request(str(i), " ".join(words[7 * i : 9 * i + 16]), params)
    return engine


def instrument(engine: Any, watch: Stopwatch, *, beside_device: bool) -> None:
    """Wrap the parts of the host's work; waiting for the device becomes a part of its own, "device"."""
    import jax

    from jaxllm.execution import model_runner

    core, running_step = engine._core._core, cast("Any", model_runner.RunningStep)
    run, result = core._runner.run, running_step.result
    wait = watch.timed(jax.block_until_ready, "device")

    def run_and_wait(plan: Any) -> Any:
        step = run(plan)
        if not beside_device:
            wait(step._output)
        return step

    def wait_for_result(step: Any) -> Any:
        wait(step._output)
        return result(step)

    core._runner.run, running_step.result = run_and_wait, wait_for_result
    for owner, name, part in (
        (core._scheduler, "plan", "plan"),
        (model_runner, "build", "build"),
        (core._runner, "run", "dispatch"),
        (running_step, "result", "fetch"),
        (core._scheduler, "commit", "commit"),
        (engine._outputs, "process_outputs", "output"),
        (engine, "step", "other"),
    ):
        watch.wrap(owner, name, part)


def measure(engine: Any, watch: Stopwatch, num_seqs: int, num_steps: int) -> list[dict[str, float]]:
    """Return each part's seconds for `num_steps` steps in which all sequences decode, after some to warm up."""
    steps: list[dict[str, float]] = []
    show_every = max(1, num_steps // 10)
    while len(steps) < WARM_UP_STEPS + num_steps:
        watch.seconds.clear()
        outputs = engine.step()
        plan = engine._core._core._in_flight.plan
        if len(outputs) == plan.num_decodes == num_seqs:
            steps.append(dict(watch.seconds))
            if len(steps) % show_every == 0:
                print(f"{len(steps)} of {WARM_UP_STEPS + num_steps} steps", file=sys.stderr)
        elif steps:
            raise RuntimeError(f"a step gave {len(outputs)} outputs and planned {plan.num_decodes} decodes")
    return steps[WARM_UP_STEPS:]


def summarize(steps: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return p50, p99 and the most, in milliseconds, of each part, of their total, and of the total less dispatch."""
    columns = {part: np.array([step[part] for step in steps]) for part in PARTS}
    columns["total"] = sum(columns.values(), np.zeros(len(steps)))
    columns[HOST] = columns["total"] - columns["dispatch"]
    return {
        part: {name: round(float(np.percentile(seconds, q) * 1e3), 3) for name, q in QUANTILES.items()}
        for part, seconds in columns.items()
    }


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the figures depend on."""
    import jax

    import jaxllm

    try:
        cpu = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        cpu = None
    packages = ("jax", "jaxlib", "numpy", "msgspec", "tokenizers")
    return {
        "date": dt.date.today().isoformat(),
        "machine": {
            "cpu": cpu[1] if cpu else platform.processor(),
            "cores": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 1),
            "device": jax.devices()[0].device_kind,
        },
        "versions": {"jaxllm": jaxllm.__version__, "python": platform.python_version()}
        | {name: version(name) for name in packages},
        "settings": {
            "model": Path(args.model).name,
            "sequences": args.seqs,
            "steps": args.steps,
            "beside_device": args.beside_device,
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_model = default_dir() / MODELS["smollm2"].name
    parser.add_argument("--model", default=str(default_model), help="folder, .gguf or hub id (default: %(default)s)")
    parser.add_argument("--seqs", type=int, default=64, help="sequences that decode (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=250, help="steps to measure (default: %(default)s)")
    parser.add_argument("--beside-device", action="store_true", help="let the device compute while the host is timed")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the figures to this file")
    args = parser.parse_args()
    if args.model == str(default_model) and not default_model.is_file():
        parser.error(f"{default_model} is missing: run scripts/fetch_models.py smollm2, or give --model")
    engine = make_engine(args)
    watch = Stopwatch()
    instrument(engine, watch, beside_device=args.beside_device)
    figures = summarize(measure(engine, watch, args.seqs, args.steps))
    engine.shutdown()
    print(f"{'ms per step':12}" + "".join(f"{name:>8}" for name in QUANTILES))
    for part, row in figures.items():
        print(f"{part:12}" + "".join(f"{row[name]:8.3f}" for name in QUANTILES) + f"  {PARTS.get(part, '')}".rstrip())
    verdict = "under" if figures[HOST]["p50"] < TARGET_MS else "OVER"
    print(f"host = total less dispatch; its p50 is {verdict} the target of {TARGET_MS:g} ms")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(describe(args) | {"milliseconds_per_step": figures}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
