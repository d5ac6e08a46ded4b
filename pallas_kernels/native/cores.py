"""The number of cores that this process may use, by its affinity and by the quotas of its control groups."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path


@functools.cache
def num_cores() -> int:
    """Return the number of cores that this process may use, at least 1."""
    allowed = num_allowed()
    return max(1, min(allowed, math.ceil(quota(Path("/")) or allowed)))


def num_allowed() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(root: Path) -> float | None:
    """Return the number of cores that this process's control groups grant it; None for no limit.

    `root` is the root of the file system.
    """
    return min(_quotas(root), default=None)


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quota of each group that has one, in version 2 of control groups or version 1."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in ("", "cpu", "cpu,cpuacct") if controllers else ("", "unified"):
            base = root / "sys/fs/cgroup" / mount
            inner = Path(path.lstrip("/"))
            # In a container a path may be the host's, while only the mount's own root is visible.
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
