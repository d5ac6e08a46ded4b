"""Compile the GPU's grouped matmul for an H100 that is not there, with the real ptxas, and check what it takes.

Needs what scripts/compile.py gpu_kernels needs, and no GPU. Checked, for each model's experts and each step's: no
register is spilled, shared memory suffices, and the weights of all layers are not copied. At the end the cost sheet:
what an iteration of the main loop brings and multiplies, at the limits of one SM. These are static figures; nothing
runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

from jaxllm.check.compilers import compiler_environment
from jaxllm.execution.hardware import HARDWARE

os.environ |= compiler_environment(HARDWARE["h100"], dict(os.environ))
os.environ |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_PTX": "1"}

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from lib.sheet import print_sheet, write_rows

from compile.gpu_compiler import (
    FIRST_PTXAS,
    SMEM_LIMIT,
    captured_output,
    find_device,
    noted_smem,
    ptxas_version,
    read_ptxas,
)
from compile.gpu_cost import CLOCK, H100, MMA_FLOPS, NUM_SMS, occupancy
from pallas_kernels.grouped_matmul import Groups, MatmulShape, capacity, pick
from pallas_kernels.grouped_matmul.cases import CASES
from pallas_kernels.grouped_matmul.gpu.sizes import DEPTH, Sizes, choose_sizes, quantized_sizes
from pallas_kernels.linear.cases import FORMATS
from pallas_kernels.linear.gpu.kernel import COLUMNS
from pallas_kernels.linear.gpu.sizes import CONSUMERS, piece
from pallas_kernels.paged_attention.gpu.common import MMA_ROWS, WARPGROUP_LANES
from pallas_kernels.weights import WeightFormat
from pallas_kernels.weights.held import Quantized

STEPS = {"decode": 64, "prefill": 2048}
"""How many tokens a step has."""
MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "gemma-4-26b-a4b")
QUANTIZED = {"gpt-oss-20b": "mxfp4", "qwen3-30b-a3b": "awq"}
"""What these models' experts are held in, besides bfloat16."""
MATMULS = ("up", "down")
NUM_LAYERS = 2
TEMP_LIMIT = 2**20
"""The list of tiles, in bytes."""
LEGEND = f"""
A piece is what an iteration of the main loop brings: rows, and two pieces of weights, {DEPTH} deep. HBM_ns and MMA_ns
are what it takes at one SM's share of {H100.bytes_per_second / 1e12:.2f} TB/s and \
{H100.flops_per_second / 1e12:.1f} TFLOP/s, with the rows that a matmul takes.
Where HBM_ns is more, the L2 cache has to serve `reuse` thread blocks from one read, or HBM is the bound: in decode it
is. Other instructions and latencies are not counted."""


def main() -> int:
    """Compile, check, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(MODELS), choices=CASES, metavar="CASE")
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=STEPS, metavar="STEP")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    version, sharding = ptxas_version(), find_device()
    rows = []
    for name in args.cases:
        for step in args.steps:
            for matmul, weights in product(MATMULS, ("bfloat16", *filter(None, [QUANTIZED.get(name)]))):
                row = {"case": name, "step": step, "matmul": matmul, "weights": weights}
                row |= compile_matmul(name, STEPS[step], matmul, FORMATS.get(weights), sharding)
                rows.append(row)
                print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if args.json:
        write_rows(args.json, {"jax": jax.__version__, "ptxas": ".".join(map(str, version)), "target": "h100"}, rows)
    print("\nCost sheet")
    print_sheet([{name: value for name, value in row.items() if name not in ("seconds", "missed")} for row in rows])
    print(LEGEND)
    missed = [row for row in rows if row["missed"]]
    print(f"{len(rows)} compiled by ptxas {version[0]}.{version[1]}, {len(missed)} missed")
    return int(bool(missed) or version < FIRST_PTXAS)


def compile_matmul(
    name: str, num_tokens: int, matmul: str, form: WeightFormat | None, sharding: NamedSharding
) -> dict[str, Any]:
    """Return what the compilers say of a matmul, and what it misses of what is wanted."""
    case = CASES[name]
    shapes = [shape._replace(format=form) for shape in case.shapes()]
    op, _ = pick(shapes, "gpu", architecture="9.0")
    shape = shapes[MATMULS.index(matmul)]
    num_choices = num_tokens * case.num_choices
    num_rows = capacity(num_choices, case.num_experts, op.row_alignment)

    def function(x: Any, w: Any, layer: Any, groups: Any) -> Any:
        return op(x, w, layer, groups, activation=shape.activation, out_dtype=shape.out_dtype)

    jitted = jax.jit(function, in_shardings=sharding, out_shardings=sharding)
    started = time.monotonic()
    with noted_smem() as smem, captured_output() as output:
        try:
            with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
                lowered = jitted.trace(*abstract_arguments(shape, num_rows)).lower(lowering_platforms=("cuda",))
            memory: Any = lowered.compile().memory_analysis()
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            return {"missed": [f"{type(error).__name__}: {str(error)[:300]}"]}
    kernel = "grouped_matmul" if form is None else "quantized_linear"
    registers, spilled = read_ptxas(output[0])[kernel]
    wrong = {
        f"spills {spilled} bytes": spilled,
        "shared memory": smem[kernel] > SMEM_LIMIT,
        "something is copied": memory.temp_size_in_bytes > TEMP_LIMIT + rows_bytes(shape, num_rows),
    }
    if form is None:
        sizes = choose_sizes(num_rows, shape.num_experts, shape.num_columns, shape.out_dtype)
        columns, consumers, figures = 2 * sizes.columns, sizes.consumers, cost(sizes)
    else:
        sizes = quantized_sizes(num_rows, shape.num_experts, shape.num_outputs, shape.num_inputs, form)
        columns, consumers, figures = COLUMNS, CONSUMERS, {}
    return {
        "rows": sizes.rows,
        "columns": columns,
        "stages": sizes.stages,
        **occupancy(registers, WARPGROUP_LANES * (consumers + 1), smem[kernel]),
        **figures,
        "temp_MiB": round(memory.temp_size_in_bytes / 2**20, 2),
        "seconds": round(time.monotonic() - started, 1),
        "missed": [what for what, is_wrong in wrong.items() if is_wrong],
    }


def rows_bytes(shape: MatmulShape, num_rows: int) -> int:
    """Return the bytes of what there is of rows besides arguments and result, where weights are quantized."""
    if shape.format is None:
        return 0
    padded = -(-shape.num_inputs // piece(shape.format)) * piece(shape.format)
    return 2 * num_rows * (padded + (shape.num_outputs if shape.activation else 0))


def cost(sizes: Sizes) -> dict[str, Any]:
    """Return what a piece of a tile takes at the limits of an SM."""
    piece = (sizes.rows + 2 * sizes.columns) * DEPTH * 2
    flops = 2 * MMA_ROWS * sizes.consumers * 2 * sizes.columns * DEPTH
    hbm, mma = 1e9 * piece / (H100.bytes_per_second / NUM_SMS), 1e9 * flops / (MMA_FLOPS * CLOCK)
    return {"piece_KiB": piece // 1024, "HBM_ns": round(hbm), "MMA_ns": round(mma), "reuse": round(hbm / mma, 1)}


def abstract_arguments(shape: MatmulShape, num_rows: int) -> tuple[Any, ...]:
    """Return shapes of the arguments."""
    e, o, i = shape.num_experts, shape.num_outputs, shape.num_inputs
    per_expert: Any = jax.ShapeDtypeStruct((e,), jnp.int32)
    weight: Any = jax.ShapeDtypeStruct((NUM_LAYERS, e, o, i), shape.dtype)
    if (form := shape.format) is not None:
        parts = {
            name: jax.ShapeDtypeStruct((NUM_LAYERS, e, o, form.width(name, i)), form.device_dtype(name, packed=False))
            for name in form.parts
        }
        weight = Quantized(parts, form)
    return (
        jax.ShapeDtypeStruct((num_rows, i), shape.dtype),
        weight,
        jax.ShapeDtypeStruct((), jnp.int32),
        Groups(per_expert, per_expert),
    )


if __name__ == "__main__":
    sys.exit(main())
