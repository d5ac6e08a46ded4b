"""The verdicts of a self check, the messages in which a child process sends them, and their form for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

type Status = Literal["right", "wrong", "hung", "crashed", "failed", "unknown"]
"""wrong: its numbers or the memory it wrote. failed: an error in place of numbers. unknown: there was too little
memory to try."""
DETAILS = "(`jaxllm selfcheck` has the details)"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one trial of an op has shown."""

    op: str
    """The op's name, as `Trial.op` has it."""
    implementation: str
    shape: str
    step: str
    status: Status
    reason: str = ""
    """What is wrong, for people."""
    error: float | None = None
    """The largest error, in parts of a number's size plus its row's root mean square."""
    allowed: float | None = None
    compile_seconds: float | None = None
    run_seconds: float | None = None

    @property
    def is_fault(self) -> bool:
        """Return whether its kernels must not be used."""
        return self.status not in ("right", "unknown")


class Report(msgspec.Struct, kw_only=True):
    """The results of a self check of one engine on one device."""

    model: str
    device: str = ""
    """The kind of the device, such as "NVIDIA L4"."""
    platform: str = ""
    driver: str = ""
    versions: dict[str, str] = {}
    date: str = ""
    complete: bool = False
    """False if the check could not go on; `problem` says why."""
    problem: str = ""
    verdicts: list[Verdict] = []

    @property
    def is_right(self) -> bool:
        """Return whether all was checked and nothing is wrong."""
        return self.complete and all(verdict.status == "right" for verdict in self.verdicts)

    def disproved(self) -> Mapping[str, str]:
        """Return why each op must not be used, by the op's name, for the engine's log."""
        faults = {verdict.op: verdict for verdict in reversed(self.verdicts) if verdict.is_fault}
        return {op: f"{_claim(verdict)} on this {self.device} {DETAILS}" for op, verdict in faults.items()}


def _claim(verdict: Verdict) -> str:
    match verdict.status:
        case "wrong":
            return "they gave wrong results"
        case "failed":
            return f"they failed ({verdict.reason})"
        case _:
            return f"they {verdict.reason}"


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The child has opened the device and resolved the engine."""

    platform: str
    device: str


class Began(msgspec.Struct, frozen=True, tag=True):
    """The child begins a phase of a trial."""

    index: int
    op: str
    implementation: str
    shape: str
    step: str
    phase: Literal["compile", "run", "compare"]


class Judged(msgspec.Struct, frozen=True, tag=True):
    """A trial has ended."""

    index: int
    verdict: Verdict


class Mistake(msgspec.Struct, frozen=True, tag=True):
    """The engine's arguments are refused."""

    message: str
    parameter: str | None


class Done(msgspec.Struct, frozen=True, tag=True):
    """All trials have been run."""


type Message = Opened | Began | Judged | Mistake | Done


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a child process is to do."""

    engine_args: dict[str, object]
    """The engine's arguments, as `EngineArgs.portable` returns them."""
    first: int
    """The number of the first trial; those before it have been run."""
    without: tuple[str, ...]
    """The ops that are not tried, because they hung or crashed, or are proven."""
    checks_cpu: bool
    """False if nothing is tried where JAX has only a CPU."""


HEAD = ("op", "step", "kernel", "verdict", "error", "allowed", "compile", "run", "shape")
_WIDTHS = (28, 10, 7, 8, 9, 9, 9, 9, 0)


def render_head() -> str:
    """Return the first line of the table of verdicts."""
    return _line(HEAD)


def render(verdict: Verdict) -> str:
    """Return a line of the table, and what is wrong in another line."""
    figures = [f"{x:.1e}" if x is not None else "" for x in (verdict.error, verdict.allowed)]
    seconds = [f"{x:.2f} s" if x is not None else "" for x in (verdict.compile_seconds, verdict.run_seconds)]
    cells = (verdict.op, verdict.step, verdict.implementation, verdict.status, *figures, *seconds, verdict.shape)
    return _line(cells) + (f"\n  {verdict.reason}" if verdict.reason else "")


def _line(cells: Iterable[str]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip()
