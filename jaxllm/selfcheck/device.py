"""Name this machine's accelerators without opening them, which only one process may do on a TPU."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

_NVIDIA = Path("/proc/driver/nvidia")
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_QUERY_SECONDS = 20.0


class Proof(NamedTuple):
    """The runs of kernels on a kind of device."""

    ops: tuple[str, ...]
    """The ops that were right there and have the same kernels still, by `Trial.op`'s names."""
    results: str
    """The folder of the results."""


PROVEN: Mapping[str, Proof] = {
    "NVIDIA H200": Proof(("recurrent_state.causal_conv",), "benchmarks/results/gpu/recurrent"),
    "NVIDIA H100 80GB HBM3": Proof(
        ("recurrent_state.causal_conv", "recurrent_state.gated_delta", "recurrent_state.state_space"),
        "benchmarks/results/gpu_h100/recurrent",
    ),
}
"""What is proven, by the kind of device. Who changes a kernel takes its op out until it has run again."""


class Accelerators(NamedTuple):
    """The devices that JAX will use, if it can."""

    kinds: tuple[str, ...]
    """Their names: JAX's for NVIDIA's GPUs."""
    driver: str

    @property
    def name(self) -> str:
        """Return their names for people."""
        return " and ".join(self.kinds)

    @property
    def proven_ops(self) -> tuple[str, ...]:
        """Return the ops that are proven on all of them."""
        proven = [set(PROVEN[kind].ops) if kind in PROVEN else set[str]() for kind in self.kinds]
        return tuple(sorted(set.intersection(*proven)))


def find_accelerators() -> Accelerators | None:
    """Return this machine's GPUs or TPUs, or None if it has none, or none that the kernels are for."""
    return _find_gpus() or _find_tpus()


def _find_gpus() -> Accelerators | None:
    if not any(importlib.util.find_spec(name) for name in _PLUGINS):
        return None  # JAX cannot use them
    try:
        infos = [path.read_text(encoding="utf-8") for path in sorted(_NVIDIA.glob("gpus/*/information"))]
        version = (_NVIDIA / "version").read_text(encoding="utf-8") if infos else ""
    except OSError:
        infos, version = [], ""
    kinds = [match[1].strip() for info in infos if (match := re.search(r"^Model:(.*)$", info, re.MULTILINE))]
    driver = re.search(r"\b\d+\.\d+(\.\d+)?\b", version)
    if kinds and driver:
        return Accelerators(_distinct(kinds), driver[0])
    return _ask_for_gpus()


def _ask_for_gpus() -> Accelerators | None:
    """Ask NVIDIA's program, where the driver has no files, as in Windows' Linux."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_QUERY_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [line.rpartition(",") for line in output.splitlines() if "," in line]
    return Accelerators(_distinct(name.strip() for name, _, _ in rows), rows[0][2].strip()) if rows else None


def _find_tpus() -> Accelerators | None:
    from jax._src import hardware_utils

    count, kind = hardware_utils.num_available_tpu_chips_and_device_id()
    if not count:
        return None
    try:
        driver = f"libtpu {metadata.version('libtpu')}"
    except metadata.PackageNotFoundError:
        return None  # JAX cannot use them
    return Accelerators((f"TPU {getattr(kind, 'name', kind)}",), driver)


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))
