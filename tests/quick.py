"""XLA's options for tests that spend most of their time compiling."""

from __future__ import annotations

from collections.abc import Mapping

QUICK_COMPILE: Mapping[str, int | bool] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""They halve the time that a program takes to compile; its results differ in the last bits."""
QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK_COMPILE.items())
"""The same for `XLA_FLAGS`, which a process reads once."""
