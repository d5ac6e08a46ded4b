"""Compile programs of GPU kernels for an H100 that is not there; a row of figures says what each takes and misses.

Who imports this has set the environment: Mosaic GPU reads it when it is loaded.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from lib.sheet import print_sheet, write_rows

from compile import ptx
from compile.gpu_compiler import FIRST_PTXAS, SMEM_LIMIT, captured_output, noted_smem, ptxas_version, read_ptxas
from compile.gpu_cost import LEGEND, cost, cost_sheet, occupancy
from jaxllm.execution.options import compiler_options

GRAPHS_JAX = (0, 12)
"""Older versions of jax put no Mosaic GPU kernel into a CUDA graph."""


def compile_row(
    jitted: Any, arguments: Any, sharding: NamedSharding, *, pool: Any = None, is_graph: bool = False
) -> dict[str, Any]:
    """Return what the compilers say of a jitted function, and what it misses of what is wanted.

    `pool` is what it updates in place, if it does; `is_graph` says whether it is to be one command buffer.
    """
    started = time.monotonic()
    with noted_smem() as smem, captured_output() as output, tempfile.TemporaryDirectory() as dump:
        try:
            with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
                lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
            options = compiler_options("gpu", jnp.bfloat16, batch_invariant=False)
            compiled = lowered.compile(options | {"xla_dump_to": dump})
            # A program of a single launch has no such file.
            listings = [x.read_text() for x in Path(dump).glob("*.thunk_sequence_after_thunk_passes.txt")]
            thunks = "".join(listings).splitlines()
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            return {"missed": [f"{type(error).__name__}: {str(error)[:300]}"]}
    figures = read_ptxas(output[0])
    most_smem, memory = max(smem.values()), compiled.memory_analysis()
    missed = [f"{name} spills {spilled} bytes" for name, (_, spilled) in figures.items() if spilled]
    if most_smem > SMEM_LIMIT:
        missed.append("shared memory")
    if is_graph:
        missed += _missing_graph(thunks)
    if pool is not None:
        missed += _copies(compiled, memory, pool)
    return {
        # Not the kernels that an earlier row had: each is compiled once.
        "kernels": {
            name: occupancy(figures[name][0], code.threads, smem[name]) | cost(name, code)
            for name, code in ptx.read_kernels(output[0]).items()
        },
        "smem_KiB": round(most_smem / 1024, 1),
        "launches": max(1, sum("kCommandBuffer" not in line for line in thunks)),
        "temp_MiB": round(memory.temp_size_in_bytes / 2**20, 2),
        "seconds": round(time.monotonic() - started, 1),
        "missed": missed,
    }


def _missing_graph(thunks: list[str]) -> list[str]:
    top = [line for line in thunks if not line.startswith(" ")]
    if (len(top) == 1 and "kCommandBuffer" in top[0]) or jax.__version_info__ < GRAPHS_JAX:
        return []
    return [f"not one command buffer but {len(top)} thunks"]


def _copies(compiled: Any, memory: Any, pool: Any) -> list[str]:
    """Say where a pool is not updated in place."""
    missed = []
    if memory.alias_size_in_bytes < pool.size * pool.dtype.itemsize:
        missed.append("the pool is copied")
    dims = ",".join(map(str, pool.shape))
    if re.search(rf"= \w+\[{dims}\]\S* (copy|fusion|dynamic-)", compiled.as_text() or ""):
        missed.append("an operation makes a pool")
    return missed


def report(rows: Sequence[dict[str, Any]], names: set[str], path: Path | None) -> int:
    """Write rows to a file, if one is given, print the cost sheet and what is missed, and return the exit status.

    `names` are the kernels that ptxas must have compiled.
    """
    version = ptxas_version()
    if path:
        write_rows(path, {"jax": jax.__version__, "ptxas": ".".join(map(str, version)), "target": "h100"}, rows)
    print("\nCost sheet")
    print_sheet(cost_sheet(rows))
    print(LEGEND)
    missed = [row for row in rows if row["missed"]]
    print(f"{len(rows)} compiled by ptxas {version[0]}.{version[1]}, {len(missed)} missed")
    unseen = names - {name for row in rows for name in row.get("kernels", ())}
    if unseen:
        print(f"ptxas said nothing of {', '.join(sorted(unseen))}")
    return int(bool(missed or unseen) or version < FIRST_PTXAS)
