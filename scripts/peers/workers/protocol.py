"""Serve the methods of one object: lines of JSON on stdin call them, lines on stdout answer.

This imports nothing but Python's own, and runs under Python 3.11: workers live in their libraries' environments.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def serve(make: Callable[[dict[str, Any]], Any]) -> None:
    """Make an object of the settings in the first line; then call a method per line, [name, *arguments], till the end.

    At the end `close` is called where there is one.
    `ended` is on the clock that all processes of the machine share, in seconds.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    worker = make(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        start = time.monotonic()
        value = getattr(worker, method)(*arguments)
        ended = time.monotonic()
        answer = {"value": value, "seconds": ended - start, "ended": ended, "peak_bytes": peak_bytes()}
        print(json.dumps(answer), file=answers, flush=True)
    if hasattr(worker, "close"):
        worker.close()


def peak_bytes() -> int:
    """Return the peak resident memory of this process and its descendants, summed: shared pages count in each."""
    family, parents = {os.getpid()}, _parents()
    while children := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= children
    return sum(map(_peak_of, family))


def _parents() -> dict[int, int]:
    """Return each process's parent."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
        except OSError:
            continue  # it has ended
        parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    return parents


def _peak_of(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return int(fields.get("VmHWM", "0 kB").split()[0]) * 1024
