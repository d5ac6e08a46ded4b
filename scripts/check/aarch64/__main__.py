"""Run the tests of a CPU's kernels as compiled for AArch64, under QEMU: numerics, not speed, and not on hardware.

    scripts/check.py aarch64 [--without-bf16] [PYTEST ARGUMENT...]

Every call of a kernel runs a program for AArch64 with threads of its own; the rest of a test runs natively. QEMU and a
linker are installed into .cache if they are missing. With --without-bf16 the processor is a Cortex-A72, which has NEON
and little else; by default it has bf16 and i8mm.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests/pallas_kernels"
FILES = (
    "test_linear",
    "test_quantized_linear",
    "test_rounded_linear",
    "test_grouped_matmul",
    "test_paged_attention",
    "test_rms_norm",
    "test_layer_norm",
    "test_segment_attention",
)
TRIPLE = "aarch64-linux-gnu"
OLD = "cortex-a72"
"""A processor with NEON and little else, by its name in LLVM and QEMU."""
NOT_HERE = ("avx", "disk", "kept", "register", "at_once", "memory_nobody", "strangers", "xla")
"""Words in the names of tests that check no kernel's numbers, or plain XLA's."""


class Emulation:
    """Makes pytest's tests call AArch64's kernels."""

    def __init__(self, *, has_bf16: bool) -> None:
        from check.aarch64.emulation import Emulator
        from pallas_kernels.native.processor import aarch64

        features = {"bf16": has_bf16, "i8mm": has_bf16}
        processor = aarch64(TRIPLE, "" if has_bf16 else OLD, features)
        self.emulator = Emulator(processor, "max" if has_bf16 else OLD)

    @pytest.fixture(autouse=True)
    def emulated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the emulator in place of the processor, the registry and XLA's calls."""
        monkeypatch.setattr("pallas_kernels.native.processor.current", lambda: self.emulator.processor)
        monkeypatch.setattr("pallas_kernels.native.compiling._registry", lambda: self.emulator)
        monkeypatch.setattr("jax.ffi.ffi_call", self.emulator.ffi_call)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect tests that do not check AArch64's numbers."""
        left_out = [item for item in items if any(word in item.name for word in NOT_HERE)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print how many kernels ran, and on which processor."""
        processor = self.emulator.processor
        terminalreporter.write_line(f"{self.emulator.num_calls} calls of kernels under QEMU, for {processor.features}")


def main() -> int:
    """Run the tests; the exit status is pytest's."""
    arguments = sys.argv[1:]
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return 0
    has_bf16 = "--without-bf16" not in arguments
    arguments = [each for each in arguments if each != "--without-bf16"]
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if not any(Path(each.partition("::")[0]).exists() for each in arguments):
        arguments += [str(TESTS / f"{name}.py") for name in FILES]
    return pytest.main(["-q", *arguments], plugins=[Emulation(has_bf16=has_bf16)])


if __name__ == "__main__":
    sys.exit(main())
