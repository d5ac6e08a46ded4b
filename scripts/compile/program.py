"""Compile programs for a target, check what the compilers made of them, and report rows of figures."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from lib.results import save
from lib.sheet import print_sheet

from compile import ptx
from compile.gpu_compiler import FIRST_PTXAS, captured_output, noted_smem, ptxas_version, read_ptxas
from compile.gpu_cost import cost, occupancy
from compile.target import Target
from compile.tpu_listing import clear
from jaxllm.execution.options import compiler_options, compiling_for

COMPILER_ERRORS = (ValueError, NotImplementedError, jax.errors.JaxRuntimeError)

type Row = dict[str, Any]


class Program(NamedTuple):
    """A compiled function, and what its compilers printed."""

    hlo: str
    memory: Any
    seconds: float
    smem: dict[str, int]
    """The dynamic shared memory of each GPU kernel, in bytes."""
    smem_limit: int
    """The shared memory that a thread block may have, in bytes."""
    messages: str
    """What ptxas printed, and the PTX."""
    thunks: list[str]
    """The launches of a GPU; none without the engine's options."""

    @property
    def temp_mib(self) -> float:
        return round(self.memory.temp_size_in_bytes / 2**20, 2)

    @property
    def alias_mib(self) -> float:
        return round(self.memory.alias_size_in_bytes / 2**20, 1)


def compile_program(
    function: Callable[..., Any],
    arguments: Iterable[Any],
    target: Target,
    *,
    donated: int | tuple[()] = (),
    as_engine: bool = False,
) -> Program:
    """Compile a function of abstract arguments; `as_engine` takes the engine's options for GPUs."""
    clear(target.dump)
    started = time.monotonic()
    with noted_smem() as smem, captured_output() as output, tempfile.TemporaryDirectory() as folder:
        jitted = jax.jit(function, donate_argnums=donated, in_shardings=target.sharding, out_shardings=target.sharding)
        mesh, (device,) = target.sharding.mesh, target.sharding.device_set
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), compiling_for(device):
            lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda" if target.is_gpu else "tpu",))
        options: dict[str, Any] | None = None
        if as_engine and target.is_gpu:
            options = compiler_options("gpu", jnp.bfloat16, batch_invariant=False) | {"xla_dump_to": folder}
        compiled = lowered.compile(options)
        # A program of a single launch has no such file.
        thunks = [path.read_text() for path in Path(folder).glob("*.thunk_sequence_after_thunk_passes.txt")]
    seconds = round(time.monotonic() - started, 1)
    memory = compiled.memory_analysis()
    return Program(
        compiled.as_text() or "", memory, seconds, smem, target.smem_limit, output[0], "".join(thunks).splitlines()
    )


def kernel_figures(program: Program, *, with_costs: bool = True) -> Row:
    """Return what each GPU kernel takes, but for kernels of an earlier program: each is compiled once.

    Costs are an H100's.
    """
    figures = read_ptxas(program.messages)
    if not with_costs:
        return {
            name: {"registers": registers, "smem_KiB": round(program.smem.get(name, 0) / 1024, 1)}
            for name, (registers, _) in figures.items()
        }
    return {
        name: occupancy(figures[name][0], code.threads, program.smem.get(name, 0)) | cost(name, code)
        for name, code in ptx.read_kernels(program.messages).items()
    }


def ptxas_misses(program: Program) -> list[str]:
    """Return what is wrong with the registers and the shared memory of GPU kernels."""
    figures = read_ptxas(program.messages)
    missed = [f"{name} spills {spilled} bytes" for name, (_, spilled) in figures.items() if spilled]
    return [*missed, *["shared memory"] * (max(program.smem.values(), default=0) > program.smem_limit)]


def pool_misses(program: Program, *pools: Any, makers: str | None = None) -> list[str]:
    """Return how pools are not updated in place: they are copied, or an operation that `makers` matches makes one."""
    missed = []
    if program.memory.alias_size_in_bytes < sum(pool.size * pool.dtype.itemsize for pool in pools):
        missed.append("the pool is copied")
    for dims in {",".join(map(str, pool.shape)) for pool in pools if makers}:
        if made := re.findall(rf"= \w+\[{dims}\]\S* (?:{makers})\(", program.hlo):
            missed.append(f"an operation makes a pool: {made[:2]}")
    return missed


def graph_misses(program: Program) -> list[str]:
    """Return what a GPU launches instead of one command buffer (CUDA graph)."""
    top = [line for line in program.thunks if line and not line.startswith(" ")]
    if len(top) == 1 and "kCommandBuffer" in top[0]:
        return []
    return [f"not one command buffer but {len(top)} thunks"]


def run(jobs: Iterable[tuple[Row, Callable[[], Row]]]) -> list[Row]:
    """Print and return a row for each job: what names it, and its figures or the compiler's error."""
    rows = []
    for names, compile_one in jobs:
        try:
            figures = compile_one()
        except COMPILER_ERRORS as error:
            figures = {"missed": [f"{type(error).__name__}: {str(error)[:300]}"]}
        rows.append(names | figures)
        print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    return rows


def report(
    rows: Sequence[Row], sheet: Sequence[Row], legend: str, path: Path | None, target: Target, *unseen: str
) -> int:
    """Write the rows, print the cost sheet and what is missed, and return the exit status.

    `unseen` are the kernels that ptxas should have compiled, but did not.
    """
    head, is_old = {"jax": jax.__version__, "target": target.name}, False
    if target.is_gpu:
        version = ptxas_version()
        head["ptxas"], is_old = ".".join(map(str, version)), version < FIRST_PTXAS
    save(path, {**head, "rows": rows})
    print("\nCost sheet")
    print_sheet(sheet)
    print(legend)
    missed = [row for row in rows if row["missed"]]
    versions = " and ".join(f"{name} {value}" for name, value in head.items() if name != "target")
    print(f"{len(rows)} compiled by {versions}, {len(missed)} missed")
    if unseen:
        print(f"ptxas said nothing of {', '.join(sorted(unseen))}")
    return int(bool(missed or unseen) or is_old)


def without(rows: Iterable[Row], *names: str) -> list[Row]:
    """Return rows without some of their columns."""
    return [{name: value for name, value in row.items() if name not in names} for row in rows]
