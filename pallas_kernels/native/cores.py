"""How many cores this process may use: those that it may run on, and no more than its control group's quota buys."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path


@functools.cache
def num_cores() -> int:
    """Return how many cores this process may use, at least 1."""
    allowed = num_allowed()
    return max(1, min(allowed, math.ceil(quota(Path("/")) or allowed)))


def num_allowed() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(root: Path) -> float | None:
    """Return how many cores' time this process's control groups grant it on the system under `root`, None for any."""
    return min(_quotas(root), default=None)


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quota of each group that has one, in the second version of control groups or the first."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in ("", "cpu", "cpu,cpuacct") if controllers else ("", "unified"):
            base = root / "sys/fs/cgroup" / mount
            inner = Path(path.lstrip("/"))
            # In a container a path may be the host's, of which only the mount's own root is to be seen.
            for group in dict.fromkeys(base / part for part in (inner, *inner.parents)):
                if controllers:
                    numbers = [_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
                else:
                    numbers = _read(group / "cpu.max").split()
                if len(numbers) == 2 and all(each.isdecimal() and int(each) for each in numbers):
                    yield int(numbers[0]) / int(numbers[1])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
