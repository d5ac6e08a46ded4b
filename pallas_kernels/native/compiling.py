"""LLVM IR becomes a function that XLA can call."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import sys
import threading
from pathlib import Path
from typing import Protocol

import jax
import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from .objects import load, save


class Kernel(Protocol):
    """A writer of kernels."""

    def build(self, name: str) -> ir.Module:
        """Return a module, with a function of this name for XLA to call."""
        ...


def register(name: str, kernel: Kernel, folder: Path | None) -> None:
    """Make a kernel known to XLA by a name, which must say all that it depends on besides its code and the processor.

    Its machine code is kept in `folder`, if there is one. A name that is known stays what it is.
    """
    with _lock:  # or two threads would each make a registry
        registry = _registry()
    registry.register(name, kernel, folder)


class _Registry:
    """The kernels that XLA knows in this process, and their code, which stays as long as XLA's programs may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _make_machine())

    def register(self, name: str, kernel: Kernel, folder: Path | None) -> None:
        with self._lock:
            if name in self._names:
                return
            path = folder / _digest(name, kernel) if folder else None
            code = load(path) if path else None
            if code is None:
                code = _compile(kernel.build(name))
                if path:
                    save(path, code)
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            self._engine.finalize_object()
            handler = jax.ffi.pycapsule(ctypes.c_void_p(self._engine.get_function_address(name)))
            jax.ffi.register_ffi_target(name, handler, platform="cpu", api_version=1)
            self._names.add(name)


_lock = threading.Lock()
_registry = functools.cache(_Registry)


@functools.lru_cache(maxsize=16)  # asked for while kernels are written
def has_feature(name: str) -> bool:
    """Say whether the processor has instructions, by LLVM's name for them."""
    return llvm.get_host_cpu_features().get(name, False)


def num_registers() -> int:
    """Return how many vectors of 512 bits the processor's registers hold: without AVX-512 in two parts each."""
    return 32 if has_feature("avx512f") else 8


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compile(module: ir.Module) -> bytes:
    """Return machine code, as an object file."""
    machine = _make_machine()
    parsed = llvm.parse_assembly(str(module))
    parsed.triple, parsed.data_layout = machine.triple, str(machine.target_data)
    parsed.verify()
    passes = llvm.create_new_module_pass_manager()
    # Kernels are vectorized and unrolled as they are written. What is left takes a fifth of the usual passes' time.
    for add in (
        passes.add_sroa_pass,  # variables become registers
        passes.add_instruction_combine_pass,
        passes.add_simplify_cfg_pass,
        passes.add_new_gvn_pass,
        passes.add_loop_strength_reduce_pass,
        passes.add_instruction_combine_pass,
        passes.add_simplify_cfg_pass,
    ):
        add()
    passes.run(parsed, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3)))
    return machine.emit_object(parsed)


def _make_machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=_features(), opt=3, jit=True
    )


def _features() -> str:
    # Else LLVM halves 512-bit vectors on those of Intel's processors that once clocked lower for them.
    return f"{llvm.get_host_cpu_features().flatten()},-prefer-256-bit"


def _digest(name: str, kernel: Kernel) -> str:
    """Return what a kernel's code is found by on disk."""
    facts = [name, llvmlite.__version__, llvm.get_host_cpu_name(), _features(), str(num_cores())]
    written_in = [sys.modules[each.__module__].__file__ for each in type(kernel).__mro__ if each is not object]
    folders = {Path(__file__).parent, *(Path(file).parent for file in written_in if file)}
    digest = hashlib.sha256("\n".join(facts).encode())
    for path in sorted(path for folder in folders for path in folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
