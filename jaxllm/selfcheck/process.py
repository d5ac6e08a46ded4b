"""Run the trials of an engine in child processes, under time limits, and start another where one ends or hangs."""

from __future__ import annotations

import datetime as dt
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import msgspec

from jaxllm.config.environment import environment
from jaxllm.exceptions import VLLMValidationError
from jaxllm.selfcheck.report import Began, Done, Judged, Message, Mistake, Opened, Report, Request, Status, Verdict
from jaxllm.utils import child_process
from jaxllm.version import __version__

_MODULE = "jaxllm.selfcheck"
_LIBRARIES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
_SETTINGS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""A GPU's memory is taken as it is needed: others may use the device."""
_VERBS = {"compile": "compile", "run": "end", "compare": "show their result"}
_MESSAGE: Any = Message


class Limits(NamedTuple):
    """The longest times of a child, in seconds."""

    start: float = 600.0
    """Until the device is open, and the engine is resolved."""
    compile: float = 180.0
    """To compile a trial, and to compute the reference's answer."""
    run: float = 20.0


LIMITS = Limits()


class _FaultError(Exception):
    """The child hung, or ended where it should not."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason


def examine(
    engine_args: dict[str, Any],
    *,
    driver: str = "",
    without: Sequence[Verdict] = (),
    proven: Sequence[str] = (),
    checks_cpu: bool = True,
    limits: Limits | None = None,
    tell: Callable[[Verdict], None] = lambda _: None,
) -> Report:
    """Return the report on an engine, whose arguments are `EngineArgs.portable`'s.

    The ops of the verdicts `without` are not tried again, `proven` ones not at all, and none without `checks_cpu` where
    JAX has only a CPU. `tell` gets each verdict when it is known. The report is not complete if a child does not start.
    Raises VLLMValidationError if the arguments are refused.
    """
    report = _begin_report(engine_args["model"], driver, without)
    first, skipped = 0, [*proven, *(verdict.op for verdict in without)]

    def add(verdict: Verdict) -> None:
        report.verdicts.append(verdict)
        tell(verdict)
        if verdict.status not in ("right", "wrong"):
            skipped.append(verdict.op)

    while not report.complete and not report.problem:
        request = Request(
            engine_args=engine_args,
            first=first,
            without=tuple(skipped),
            checks_cpu=checks_cpu,
        )
        began: Began | None = None
        try:
            for message in _read(request, limits or LIMITS):
                match message:
                    case Opened():
                        report.platform, report.device = message.platform, message.device
                    case Began():
                        began, first = message, message.index + 1
                    case Judged():
                        began = None
                        add(message.verdict)
                    case Mistake():
                        raise VLLMValidationError(message.message, parameter=message.parameter)
                    case Done():
                        report.complete = True
        except _FaultError as fault:
            if began is None:
                report.problem = _describe_problem(report, fault)
            else:
                facts: Any = {name: getattr(began, name) for name in ("op", "implementation", "shape", "step")}
                add(Verdict(**facts, status=fault.status, reason=fault.reason))
    return report


def _begin_report(model: str, driver: str, verdicts: Sequence[Verdict]) -> Report:
    date = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    return Report(model=model, driver=driver, versions=versions(), date=date, verdicts=list(verdicts))


def _describe_problem(report: Report, fault: _FaultError) -> str:
    what = fault.reason.replace("ended the process", "ended")
    last = next((verdict for verdict in reversed(report.verdicts) if verdict.is_fault), None)
    if last is None:
        return f"the process that checks kernels {what}"
    return (
        f"the device does not answer after {last.op} {last.reason}: the next process {what}. Reset it or restart the "
        "machine"
    )


def _read(request: Request, limits: Limits) -> Iterator[Message]:
    """Yield the messages of one child; raise `_FaultError` if it hangs or ends otherwise than after a verdict."""
    limit, what = limits.start, "start"
    deadline, last, rest = time.monotonic() + limit, None, b""
    with (
        child_process.started(_MODULE, request, environment(("",)) | _SETTINGS) as process,
        selectors.DefaultSelector() as selector,
    ):
        assert process.stdout is not None
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise _FaultError("hung", f"did not {what} within {limit:g} s")
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                last = msgspec.json.decode(line, type=_MESSAGE)
                phase = last.phase if isinstance(last, Began) else "compile"
                limit, what = limits.run if phase == "run" else limits.compile, _VERBS[phase]
                deadline = time.monotonic() + limit
                yield last
                if isinstance(last, Done | Mistake):
                    return  # a driver may keep the process from ending
        try:
            status = process.wait(child_process.END_SECONDS)
        except subprocess.TimeoutExpired:
            reason = f"did not leave its device within {child_process.END_SECONDS:g} s"
            raise _FaultError("hung", reason) from None
    if not isinstance(last, Judged) or status != 0:
        raise _FaultError("crashed", _describe_end(status))


def _describe_end(status: int) -> str:
    if status < 0:
        try:
            return f"ended the process with {signal.Signals(-status).name}"
        except ValueError:
            return f"ended the process with signal {-status}"
    return f"ended the process with status {status}"


def versions() -> dict[str, str]:
    """Return the versions of the libraries that kernels depend on."""
    numbers = {"jaxllm": __version__}
    for name in _LIBRARIES:
        try:
            numbers[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return numbers
