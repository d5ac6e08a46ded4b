"""Link kernels with `driver.c` into programs for AArch64, and run these under QEMU in place of XLA's calls."""

from __future__ import annotations

import hashlib
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.native import processor
from pallas_kernels.native.compiling import Kernel, compile_for

CACHE = Path(__file__).resolve().parents[3] / ".cache" / "aarch64"
DRIVER = Path(__file__).with_name("driver.c")
QEMU = "qemu-aarch64-static"


class Tools:
    """A linker for AArch64 and an emulator, installed by pip and apt if they are missing."""

    def __init__(self) -> None:
        CACHE.mkdir(parents=True, exist_ok=True)
        self._qemu = shutil.which(QEMU) or str(CACHE / "qemu/usr/bin" / QEMU)
        if not Path(self._qemu).exists():
            subprocess.run(["apt-get", "download", "qemu-user-static"], cwd=CACHE, check=True)
            [package] = CACHE.glob("qemu-user-static_*.deb")
            subprocess.run(["dpkg", "-x", str(package), str(CACHE / "qemu")], check=True)
        self._zig = CACHE / "zig/ziglang/zig"
        if not self._zig.exists():
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(CACHE / "zig"), "ziglang"]
            subprocess.run(pip, check=True)
        digest = hashlib.sha256(DRIVER.read_bytes() + jax.__version__.encode()).hexdigest()[:12]
        self._driver = CACHE / f"driver-{digest}.o"
        if not self._driver.exists():
            include = f"-I{jax.ffi.include_dir()}"
            self._cc("-O1", "-Wall", "-Werror", include, "-c", str(DRIVER), "-o", str(self._driver))

    def link(self, code: bytes) -> Path:
        """Return a program that runs a kernel: an object file with the function `kernel`."""
        program = CACHE / "programs" / hashlib.sha256(code + self._driver.name.encode()).hexdigest()[:16]
        if not program.exists():
            program.parent.mkdir(exist_ok=True)
            program.with_suffix(".o").write_bytes(code)
            self._cc(str(self._driver), str(program.with_suffix(".o")), "-o", str(program))
        return program

    def run(self, program: Path, cpu: str, *arguments: str) -> None:
        """Run a program on a processor, by QEMU's name."""
        subprocess.run([self._qemu, "-cpu", cpu, str(program), *arguments], check=True, timeout=300)

    def _cc(self, *arguments: str) -> None:
        environment = {
            "ZIG_GLOBAL_CACHE_DIR": str(CACHE / "zig-cache"),
            "ZIG_LOCAL_CACHE_DIR": str(CACHE / "zig-cache"),
        }
        command = [str(self._zig), "cc", "-target", "aarch64-linux-musl", *arguments]
        subprocess.run(command, check=True, env=environment)


class Emulator:
    """Replaces the registry of kernels, and XLA's calls of them."""

    def __init__(self, emulated: processor.Processor, cpu: str) -> None:
        self.processor, self._cpu, self._tools = emulated, cpu, Tools()
        self._programs: dict[str, Path] = {}
        self.num_calls = 0

    def register(self, name: str, kernel: Kernel, folder: Path | None) -> None:
        """Compile a kernel for the processor; nothing is kept in the folder.

        A test that has put a processor of another kind in its place is skipped: the kernel would have its instructions.
        """
        del folder
        if not processor.current().is_aarch64:
            pytest.skip("the test is about another kind of processor")
        if name not in self._programs:
            self._programs[name] = self._tools.link(compile_for(self.processor, kernel.build("kernel")))

    def ffi_call(
        self, name: str, specs: Any, *, input_output_aliases: Mapping[int, int] | None = None
    ) -> Callable[..., Any]:
        """Return a function of arrays, as `jax.ffi.ffi_call` does."""
        aliases = {result: argument for argument, result in (input_output_aliases or {}).items()}
        leaves, tree = jax.tree.flatten(specs)

        def run(*operands: Any) -> Any:
            outputs = self._run(self._programs[name], [np.asarray(operand) for operand in operands], leaves, aliases)
            return jax.tree.unflatten(tree, outputs)

        return lambda *operands: jax.pure_callback(run, specs, *operands)

    def _run(
        self,
        program: Path,
        operands: Sequence[np.ndarray],
        results: Sequence[jax.ShapeDtypeStruct],
        aliases: Mapping[int, int],
    ) -> list[np.ndarray]:
        self.num_calls += 1
        with tempfile.TemporaryDirectory() as folder:
            inputs, outputs = Path(folder, "inputs"), Path(folder, "outputs")
            with inputs.open("wb") as file:
                file.write(_numbers(len(operands), len(results)))
                for operand in operands:
                    file.write(_numbers(operand.ndim, *operand.shape, operand.nbytes) + operand.tobytes())
                for index, result in enumerate(results):
                    file.write(_numbers(aliases.get(index, -1), len(result.shape), *result.shape, _num_bytes(result)))
            self._tools.run(program, self._cpu, str(inputs), str(outputs))
            content = outputs.read_bytes()
        arrays, start = [], 0
        for result in results:
            stop = start + _num_bytes(result)
            arrays.append(np.frombuffer(content[start:stop], result.dtype).reshape(result.shape))
            start = stop
        return arrays


def _numbers(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _num_bytes(spec: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(spec.shape, dtype=np.int64)) * spec.dtype.itemsize
