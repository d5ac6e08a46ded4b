"""`jaxllm collect-env` prints the facts about a machine that a bug report needs. It shows no secrets."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxllm
from jaxllm.config.environment import default_cache_dir, environment
from jaxllm.utils.streams import show

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "llvmlite",
    "numpy",
    "ml-dtypes",
    "msgspec",
    "transformers",
    "tokenizers",
    "huggingface-hub",
    "safetensors",
    "torch",
    "vllm",
)
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")
_PREFIXES = ("JAXLLM_", "HF_", "JAX_", "XLA_", "TPU_", "CUDA_", "LIBTPU_", "OMP_")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand."""
    parser = commands.add_parser("collect-env", help="print versions and devices, for bug reports", allow_abbrev=False)
    parser.set_defaults(run=run)
    return parser


def run(_args: argparse.Namespace) -> int:
    """Print one `name: value` line per fact and return the exit status."""
    for name, value in facts():
        show(f"{name}: {value}")
    return 0


def facts() -> Iterator[tuple[str, str]]:
    """Yield (name, value) for each fact of the report."""
    yield "jaxllm", jaxllm.__version__
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", platform.platform()
    yield from _cpu(Path("/proc/cpuinfo"), Path("/proc/meminfo"))
    for package in _PACKAGES:
        yield package, _version(package)
    yield from _devices()
    yield "cache", default_cache_dir()
    yield "hub cache", _hub_cache()
    for name, value in environment(_PREFIXES).items():
        yield f"env {name}", "(hidden)" if _SECRET.search(name) else value


def _cpu(cpuinfo: Path, meminfo: Path) -> Iterator[tuple[str, str]]:
    try:
        text, memory = cpuinfo.read_text(), meminfo.read_text()
    except OSError:
        text, memory = "", ""
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    total = re.search(r"^MemTotal:\s*(\d+) kB", memory, re.MULTILINE)
    present = set(flags.group(1).split()) if flags else set()
    yield "cpu", f"{model.group(1) if model else platform.machine()}, {os.cpu_count()} cores"
    yield "cpu flags", " ".join(flag for flag in _CPU_FLAGS if flag in present) or "none of interest"
    yield "memory", f"{int(total.group(1)) / 2**20:.1f} GiB" if total else "unknown"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> Iterator[tuple[str, str]]:
    try:
        import jax

        devices = jax.devices()
        yield "backend", jax.default_backend()
    except Exception as error:  # noqa: BLE001 (a broken backend is what the report is about)
        yield "devices", f"JAX does not start: {error}"
        return
    for device in devices:
        limit = (device.memory_stats() or {}).get("bytes_limit")
        memory = f", {limit / 2**30:.1f} GiB" if limit else ""
        yield f"device {device.id}", f"{device.platform} {device.device_kind}{memory}"


def _hub_cache() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    return str(HF_HUB_CACHE)
