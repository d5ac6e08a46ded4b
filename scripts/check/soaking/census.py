"""Count what a process holds: memory, threads, file descriptors."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import NamedTuple

MIB = 1 << 20
NUM_MEANS = 12


@dataclass(frozen=True)
class Census:
    """A process at one time."""

    minutes: float
    """time.monotonic(), in minutes."""
    resident_mib: float
    threads: int
    fds: int


def census_of(pid: int) -> Census:
    """Return what a process holds now."""
    folder = Path("/proc", str(pid))
    resident = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    threads, fds = len(list((folder / "task").iterdir())), len(list((folder / "fd").iterdir()))
    return Census(time.monotonic() / 60, round(resident / MIB, 2), threads, fds)


class Trend(NamedTuple):
    """How a process's memory changes, in MiB a minute."""

    slope: float
    error: float | None
    """The standard error of the slope; None with too few values."""


def trend(held: Sequence[Census]) -> Trend:
    """Return the slope by least squares, 0.0 for fewer than two censuses.

    Memory varies over minutes, so neighbouring values are correlated: the error is that of a line through the means of
    NUM_MEANS stretches of time, which are less correlated.
    """
    slope, _ = _line([(each.minutes, each.resident_mib) for each in held])
    stretches = list(batched(held, max(1, -(-len(held) // NUM_MEANS))))
    means = [
        (sum(each.minutes for each in some) / len(some), sum(each.resident_mib for each in some) / len(some))
        for some in stretches
    ]
    return Trend(slope, _line(means)[1])


def _line(points: Sequence[tuple[float, float]]) -> Trend:
    """Return the slope of the line through points that least squares give, and its standard error."""
    mean_x = sum(x for x, _ in points) / max(1, len(points))
    mean_y = sum(y for _, y in points) / max(1, len(points))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if not spread:
        return Trend(0.0, None)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    if len(points) < 3:
        return Trend(slope, None)
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return Trend(slope, (rest / (len(points) - 2) / spread) ** 0.5)
