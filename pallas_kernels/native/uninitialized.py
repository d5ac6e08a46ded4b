"""Make arrays whose memory is not initialized: unused parts take no time and no memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
from llvmlite import ir

from .compiling import register
from .emitter import I64, POINTER, VOID, add_function
from .handler import add_handler


class Kernel:
    """Writes a kernel that does nothing."""

    def build(self, name: str) -> ir.Module:
        """Return the module, with a function of this name that XLA calls."""
        module = ir.Module()
        prepare, _ = add_function(module, "prepare", I64, POINTER, POINTER)
        prepare.ir.ret(I64(0))
        run, _ = add_function(module, "run", VOID, POINTER, POINTER, I64)
        run.ir.ret_void()
        add_handler(module, name, prepare.function, run.function)
        return module


def uninitialized(specs: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Return arrays of these shapes and dtypes with arbitrary contents, on a CPU."""
    return list(jax.ffi.ffi_call(prepare(), [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in specs])())


def prepare(folder: Path | None = None) -> str:
    """Compile the kernel, kept in a folder, and return its name.

    A program that another process compiled needs it when it is loaded.
    """
    return register("uninitialized", Kernel(), folder)
