"""Describe the machine that figures were measured on, without anything that identifies it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REVISION = ROOT / "pack" / "REVISION"
"""Where scripts/make/gpu_pack.sh writes the revision, for a machine that gets the sources without git."""
GPU_FACTS = "driver_version,power.limit,clocks.max.sm,memory.total"


def describe_machine() -> dict[str, Any]:
    """Return the processor, the cores this process may use, the memory, and the load, which distorts figures."""
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


def describe_device() -> dict[str, Any]:
    """Return JAX's device and the versions that its figures depend on; this starts JAX's backend."""
    import jax

    from pallas_kernels.paged_attention.gpu.assembler import assembler_doubt

    device = jax.devices()[0]
    on_gpu = jax_platform() == "gpu"
    return describe_sources() | {
        "device": device.device_kind,
        "num_devices": len(jax.devices()),
        "versions": versions("jax", "jaxlib", "libtpu", "jax-cuda13-plugin"),
        "runtime": " ".join(device.client.platform_version.split()),
        "gpu": gpu_facts() if on_gpu else None,
        "ptxas": find_ptxas(),
        "ptxas_doubt": assembler_doubt() if on_gpu else None,
    }


def jax_platform() -> str:
    """Return "cpu", "gpu" or "tpu"."""
    import jax

    return {"cuda": "gpu"}.get(jax.default_backend(), jax.default_backend())


def describe_sources() -> dict[str, Any]:
    """Return the date, the revision of the sources, and the machine."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": find_revision(),
        "machine": describe_machine(),
    }


def find_revision() -> str | None:
    """Return git's name of the revision, or else the revision packed with the sources."""
    said = output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12")
    return said or (REVISION.read_text().strip() if REVISION.is_file() else None)


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    installed = {}
    for package in packages:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def gpu_facts() -> dict[str, str] | None:
    """Return the first GPU's driver, power limit, clock and memory, as nvidia-smi prints them."""
    said = output_of("nvidia-smi", f"--query-gpu={GPU_FACTS}", "--format=csv,noheader")
    return dict(zip(GPU_FACTS.split(","), said.splitlines()[0].split(", "), strict=True)) if said else None


def find_ptxas() -> dict[str, str] | None:
    """Return the release and the path of the ptxas that PATH names first, or None without one."""
    path = shutil.which("ptxas")
    release = re.search(r"\bV([\d.]+)", output_of(path, "--version") or "") if path else None
    return {"path": _shown(Path(path)), "release": release[1]} if path and release else None


def _shown(path: Path) -> str:
    """Return a path, with the sources' folder as "." and the user's as "~"."""
    for folder, name in ((ROOT, "."), (Path.home(), "~")):
        if path.is_relative_to(folder):
            return f"{name}/{path.relative_to(folder)}"
    return str(path)


def output_of(*command: str) -> str | None:
    """Return a command's output, or None if the command is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
