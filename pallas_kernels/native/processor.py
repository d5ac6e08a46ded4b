"""The processor's features, and the instruction set that kernels are compiled for.

Kernels are written once, in vectors of 16 float32, which LLVM divides into registers. They ask only for the number of
registers and for instructions that they cannot do without.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

SETTING = "JAXLLM_CPU"
"""The environment variable that names a lesser instruction set than the processor's best."""
AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
AVX2 = ("avx2", "fma", "f16c")
AMX = ("amx-tile", "amx-bf16")
type _SetName = Literal["amx", "avx512", "avx2", "neon", "plain"]
LESSER: Mapping[_SetName, tuple[_SetName, ...]] = {
    "amx": ("avx512", "avx2", "plain"),
    "avx512": ("avx2", "plain"),
    "avx2": ("plain",),
    "neon": ("plain",),
}
"""The sets that a processor with a better one can run."""
_MICROARCHITECTURES = {"avx2": "x86-64-v3", "plain": "x86-64"}
"""LLVM's processors that have a lesser set and nothing else."""
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""Linux' call by which a process requests AMX registers, its request code, and the number of the state."""


@dataclass(frozen=True)
class Processor:
    """A processor, as far as kernels depend on it."""

    name: _SetName
    """The instruction set, which includes each lesser one; there are no kernels for a plain one."""
    triple: str
    cpu: str
    features: str
    """LLVM's names of the machine and the processor, and of the features that it has or lacks."""
    num_registers: int
    """The number of its vector registers."""
    register_bytes: int
    has_bfloat16_dot: bool
    """True if one instruction adds products of pairs of bfloat16: `vdpbf16ps`, or AArch64's `bfdot`."""
    has_int8_dot: bool
    """True if one instruction adds products of four int8 each: `vpdpbusd`, or AArch64's `usdot`."""

    @property
    def has_avx512(self) -> bool:
        return self.name in ("amx", "avx512")

    @property
    def has_matrix_unit(self) -> bool:
        """Return whether one instruction multiplies matrices of bfloat16."""
        return self.name == "amx"

    @property
    def is_aarch64(self) -> bool:
        return self.name == "neon"

    @property
    def is_x86(self) -> bool:
        return self.triple.startswith("x86_64")


@functools.cache
def current() -> Processor:
    """Return this processor, with the instruction set that JAXLLM_CPU names, or otherwise its best.

    Raises ValueError for a set that the processor lacks.
    """
    return restricted(host(), os.environ.get(SETTING) or None)


@functools.cache
def host() -> Processor:
    """Return this processor with its best instruction set."""
    import llvmlite.binding as llvm

    triple, cpu, features = llvm.get_default_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features()
    if platform.machine().lower() in ("aarch64", "arm64"):
        return aarch64(triple, cpu, _aarch64_features())
    # Otherwise LLVM halves 512-bit vectors on Intel processors that once lowered their clock for them.
    features = {**features, "prefer-256-bit": False}
    has_amx = all(features.get(name) for name in AMX) and _may_use_amx()
    return x86(triple, cpu, features if has_amx else _without_amx(features))


def x86(triple: str, cpu: str, features: Mapping[str, bool]) -> Processor:
    """Return a processor with these features, by LLVM's names; a plain one for anything that is not x86-64."""

    def has(*names: str) -> bool:
        return all(features.get(name) for name in names)

    flags = ",".join(f"{'+' if has else '-'}{name}" for name, has in sorted(features.items()))
    if has(*AVX512, *AVX2):
        name = "amx" if has(*AMX, "avx512bf16") else "avx512"
        return Processor(name, triple, cpu, flags, 32, 64, has("avx512bf16"), has("avx512vnni"))
    if has(*AVX2):
        return Processor("avx2", triple, cpu, flags, 16, 32, has_bfloat16_dot=False, has_int8_dot=has("avxvnni"))
    return Processor("plain", triple, cpu, flags, 16, 16, has_bfloat16_dot=False, has_int8_dot=False)


def aarch64(triple: str, cpu: str, features: Mapping[str, bool]) -> Processor:
    """Return a processor with NEON, and bf16 and i8mm if they are among its features."""
    flags = ",".join(["+neon", *(f"+{name}" for name in ("bf16", "i8mm") if features.get(name))])
    return Processor("neon", triple, cpu, flags, 32, 16, features.get("bf16", False), features.get("i8mm", False))


def restricted(processor: Processor, name: str | None) -> Processor:
    """Return a processor restricted to an instruction set; None leaves it unchanged.

    Raises ValueError for an unknown set, and for one that the processor lacks.
    """
    if name in (None, processor.name):
        return processor
    if name not in get_args(_SetName.__value__):
        raise ValueError(f"{SETTING}={name} is no instruction set: choose one of {', '.join(_sets(processor))}")
    if name not in LESSER.get(processor.name, ()):
        raise ValueError(f"{SETTING}={name}: the processor lacks it; it has {', '.join(_sets(processor))}")
    if processor.is_aarch64:
        return Processor("plain", processor.triple, processor.cpu, "+neon", 32, 16, False, False)
    if name == "avx512":
        features = {flag[1:]: flag[0] == "+" for flag in processor.features.split(",")}
        return x86(processor.triple, processor.cpu, _without_amx(features))
    made = x86(processor.triple, _MICROARCHITECTURES[name], dict.fromkeys(AVX2 if name == "avx2" else (), True))
    assert made.name == name
    return made


def _sets(processor: Processor) -> list[str]:
    return [processor.name, *LESSER.get(processor.name, ())]


def _without_amx(features: Mapping[str, bool]) -> dict[str, bool]:
    return {name: has and not name.startswith("amx") for name, has in features.items()}


def _may_use_amx() -> bool:
    """Request AMX registers from the system, and return whether it allows them.

    The system saves them only for processes that asked.
    """
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0


def _aarch64_features() -> dict[str, bool]:
    """Return the features that the system reports, since LLVM does not know all.

    Linux reports them in /proc/cpuinfo, macOS by sysctl.
    """
    names = ("bf16", "i8mm")
    if sys.platform == "darwin":
        return {name: _sysctl(f"hw.optional.arm.FEAT_{name.upper()}") for name in names}
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    # Cores of several kinds may differ: a feature that one lacks must not be used.
    kinds = [set(line.split()) for line in text.splitlines() if line.startswith("Features")]
    return {name: bool(kinds) and all(name in kind for kind in kinds) for name in names}


def _sysctl(name: str) -> bool:
    try:
        told = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return told.stdout.strip() == "1"
