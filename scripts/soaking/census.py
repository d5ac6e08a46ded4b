"""Count what a process holds: memory, threads, file descriptors."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20


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


def slope(held: Sequence[Census]) -> float:
    """Return by how many MiB a minute a process grows, by least squares; 0.0 for fewer than two censuses."""
    if len(held) < 2:
        return 0.0
    mean_x = sum(each.minutes for each in held) / len(held)
    mean_y = sum(each.resident_mib for each in held) / len(held)
    spread = sum((each.minutes - mean_x) ** 2 for each in held)
    return sum((each.minutes - mean_x) * (each.resident_mib - mean_y) for each in held) / spread
