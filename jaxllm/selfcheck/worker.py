"""Run trials in a child process, and send each phase and verdict to the parent as a line of JSON."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from typing import Any, Literal

import jax
import msgspec

from jaxllm.config.environment import limit_cpu
from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.options import compiler_options, widens_rounded_weights
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.resolve.model import make_model
from jaxllm.resolve.resolve_engine import resolve
from jaxllm.selfcheck.report import Began, Done, Judged, Message, Mistake, Opened, Request, Verdict
from jaxllm.selfcheck.trials import engine_trials
from jaxllm.utils.child_process import receive
from pallas_kernels.trials.trial import Outcome, Trial

_ON_CHIP = ("vmem", "smem", "shared memory")
_LONGEST = 200
"""The most characters of an error's text."""


def main() -> int:
    """Serve the request on standard input; return the exit status."""
    lines = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what else writes to standard output writes to the log
    logging.getLogger("jaxllm").addHandler(logging.NullHandler())  # the parent's engine will log the same
    logging.getLogger("jaxllm").propagate = False
    for message in _work(receive(Request)):
        lines.write(msgspec.json.encode(message) + b"\n")
        if isinstance(message, Judged) and message.verdict.status == "failed":
            lines.close()
            os._exit(0)  # a device's error may stay with the process: another one goes on
    return 0


def _work(request: Request) -> Iterator[Message]:
    try:
        args: Any = request.engine_args
        engine_args = EngineArgs(**args)
        limit_cpu()
        # Each of the devices runs the same share of a model, so that one can stand for all of them.
        devices = [jax.devices()[0]] * engine_args.tensor_parallel_size
        if devices[0].platform == "cpu" and not request.checks_cpu:
            yield Opened("cpu", devices[0].device_kind)
            yield Done()
            return
        config = resolve(engine_args, devices)
        trials = engine_trials(config)
    except VLLMValidationError as error:
        yield Mistake(str(error), error.parameter)
        return
    yield Opened(config.platform, devices[0].device_kind)
    options = compiler_options(
        config.platform,
        config.dtype,
        batch_invariant=False,
        quantized=widens_rounded_weights(make_model(config)),
        devices=devices[:1],
    )
    for index, trial in enumerate(trials):
        if index >= request.first and trial.op not in request.without:
            yield from _try(index, trial, options)
    yield Done()


def _try(index: int, trial: Trial, options: dict[str, Any]) -> Iterator[Message]:
    names: dict[str, Any] = {name: value for name, value in trial._asdict().items() if name != "make"}
    fields = dict(names)

    def begin(phase: Literal["compile", "run", "compare"]) -> Began:
        return Began(index, **names, phase=phase)

    try:
        yield begin("compile")
        started = time.perf_counter()
        call = trial.make()
        compiled = jax.jit(call.function).lower(*call.arguments).compile(options)
        fields["compile_seconds"] = time.perf_counter() - started
        yield begin("run")
        started = time.perf_counter()
        results = [jax.block_until_ready(compiled(*call.arguments)) for _ in range(2)]
        fields["run_seconds"] = time.perf_counter() - started
        yield begin("compare")
        fields |= _judge([call.compare(result) for result in results])
    except Exception as error:  # noqa: BLE001 (compilers and runtimes raise every kind here)
        text = " ".join(str(error).split())[:_LONGEST] or type(error).__name__
        # A kernel that does not fit on the chip is at fault, unlike one whose arrays do not fit in the memory.
        is_full = "RESOURCE_EXHAUSTED" in text and not any(space in text.lower() for space in _ON_CHIP)
        fields |= {"status": "unknown" if is_full else "failed", "reason": text}
    yield Judged(index, Verdict(**fields))


def _judge(outcomes: list[Outcome]) -> dict[str, Any]:
    """Return the fields of the verdict on a trial that ran twice, by the worse run."""
    worse = max(outcomes, key=lambda outcome: (not outcome.is_right, outcome.error))
    wrong = [] if worse.error <= worse.allowed else [f"the error is {worse.error:.1e}, allowed {worse.allowed:.1e}"]
    wrong += worse.missed
    figures = {"error": worse.error, "allowed": worse.allowed}
    return figures | {"status": "wrong" if wrong else "right", "reason": "; ".join(wrong)}
