"""Compile LLVM IR and register the result with XLA."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import sys
import threading
from pathlib import Path
from typing import Protocol

import jax
import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from . import processor
from .cores import num_cores
from .interface import refuse_interface
from .objects import load, save
from .processor import Processor


class Kernel(Protocol):
    """A writer of kernels."""

    def build(self, name: str) -> ir.Module:
        """Return a module, with a function of this name for XLA to call."""
        ...


def refuse() -> str | None:
    """Return why no kernel can run in this process, or None if they can."""
    if processor.current().name == "plain":
        return "the processor has neither AVX2 and FMA nor NEON, or JAXLLM_CPU says so"
    return refuse_interface()


def register(name: str, kernel: Kernel, folder: Path | None) -> str:
    """Register a kernel with XLA and return XLA's name for it, which ends with the instruction set.

    `name` must identify everything that the kernel depends on besides its code and the processor. Its machine code is
    kept in `folder`, if that is not None. A name that is already registered keeps its kernel.
    """
    name = f"{name}_{processor.current().name}"
    with _lock:  # or two threads would each make a registry
        registry = _registry()
    registry.register(name, kernel, folder)
    return name


class _Registry:
    """The kernels that XLA knows in this process, and their machine code, which XLA's programs may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: set[str] = set()
        reason = refuse()
        if reason is not None:
            raise RuntimeError(f"a CPU's kernels cannot run: {reason}")
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), make_machine(processor.current()))

    def register(self, name: str, kernel: Kernel, folder: Path | None) -> None:
        with self._lock:
            if name in self._names:
                return
            path = folder / _digest(name, kernel) if folder else None
            code = load(path) if path else None
            if code is None:
                code = compile_for(processor.current(), kernel.build(name))
                if path:
                    save(path, code)
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            self._engine.finalize_object()
            handler = jax.ffi.pycapsule(ctypes.c_void_p(self._engine.get_function_address(name)))
            jax.ffi.register_ffi_target(name, handler, platform="cpu", api_version=1)
            self._names.add(name)


_lock = threading.Lock()
_registry = functools.cache(_Registry)


def num_registers() -> int:
    """Return the number of 512-bit vectors that the processor's registers hold; shorter registers hold parts of one."""
    present = processor.current()
    return present.num_registers * present.register_bytes // 64


def compile_for(target: Processor, module: ir.Module) -> bytes:
    """Compile a module for a processor and return an object file."""
    machine = make_machine(target)
    parsed = llvm.parse_assembly(str(module))
    parsed.triple, parsed.data_layout = machine.triple, str(machine.target_data)
    parsed.verify()
    passes = llvm.create_new_module_pass_manager()
    # Kernels are written vectorized and unrolled. These passes take a fifth of the usual passes' time.
    for add in (
        passes.add_always_inliner_pass,  # a kernel becomes one function
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


def make_machine(target: Processor) -> llvm.TargetMachine:
    """Return LLVM's code generator for a processor."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=3, jit=True
    )


def _digest(name: str, kernel: Kernel) -> str:
    """Return the name of a kernel's file on disk, which changes with its code, LLVM and the processor."""
    facts = [name, llvmlite.__version__, str(processor.current()), str(num_cores())]
    written_in = [sys.modules[each.__module__].__file__ for each in type(kernel).__mro__ if each is not object]
    folders = {Path(__file__).parent, *(Path(file).parent for file in written_in if file)}
    return hashlib.sha256("\n".join([*facts, *map(source_digest, sorted(folders))]).encode()).hexdigest()


@functools.lru_cache(maxsize=64)
def source_digest(folder: Path) -> str:
    """Return a digest of a folder's Python files; code that is imported does not change with its file."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
