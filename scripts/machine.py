"""Describe the machine that figures were measured on, with nothing that tells one such machine from another."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Return the processor, the cores this process may use, memory, and the load now, from which figures suffer."""
    try:
        cpu = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        cpu = None
    return {
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load_average": round(os.getloadavg()[0], 1),
    }
