"""Compile matmuls by quantized weights for a TPU or an H100 that is not there, with its real compiler, and check them.

Needs what scripts/compile.py tpu_kernels or scripts/compile.py gpu_kernels needs, and no device. Checked, for each
format and number of rows: nothing of the size of the weights, in the dtype of what they are multiplied by, is held in
memory, and neither are the codes of all layers copied; on an H100 no register is spilled and shared memory suffices.
At the end the cost sheet. These are static figures; nothing runs.
"""

# ruff: noqa: E402  the compilers read the environment when they are loaded

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxllm.check.compilers import compiler_environment
from jaxllm.execution.hardware import HARDWARE

DUMP = Path(tempfile.mkdtemp(prefix="linear-"))
IS_GPU = "h100" in sys.argv
os.environ |= compiler_environment(HARDWARE["h100" if IS_GPU else "v6e"], dict(os.environ))
os.environ |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_PTX": "1"}
os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={DUMP} --xla_jf_dump_llo_text=true"

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from lib.sheet import print_sheet, write_rows

from compile.gpu_compiler import FIRST_PTXAS, SMEM_LIMIT, captured_output, noted_smem, ptxas_version, read_ptxas
from compile.gpu_compiler import find_device as find_gpu
from compile.gpu_cost import CLOCK, H100, MMA_FLOPS, NUM_SMS, occupancy
from compile.tpu_compiler import BANDWIDTH
from compile.tpu_compiler import find_device as find_tpu
from compile.tpu_listing import clear, read_loops
from pallas_kernels.linear import Linear, LinearShape, pick
from pallas_kernels.linear.cases import FORMATS, RARE
from pallas_kernels.linear.gpu.sizes import CONSUMERS, DEPTH, WORD_BYTES, choose_sizes, piece
from pallas_kernels.linear.tpu.sizes import CHUNKS_AT_ONCE, FEW_ROWS, LANES, few_outputs
from pallas_kernels.paged_attention.gpu.common import MMA_ROWS, WARPGROUP_LANES
from pallas_kernels.weights import WeightFormat
from pallas_kernels.weights.held import Quantized

ROWS = (1, 64, 2000)
MATRICES = ("4096x4096", "5120x25600")
"""Outputs by inputs; the second is the down projection of Qwen3-32B."""
NUM_LAYERS = 2
NOTHING_MADE = (
    "parameter", "bitcast", "get-tuple-element", "custom-call", "copy-start", "copy-done", "slice-start", "slice-done",
)  # fmt: skip
"""XLA brings arguments into a TPU's VMEM ahead, with copies and slices."""
KERNEL = "quantized_linear"
ISSUES = 4
"""How many instructions, each for 32 threads, an SM starts in a cycle."""
TERABYTES, TERAFLOPS = H100.bytes_per_second / 1e12, H100.flops_per_second / 1e12
GPU_LEGEND = f"""
A piece is what an iteration of the main loop brings, of codes and of rows. HBM_ns is what its codes and their scales
take at one SM's share of {TERABYTES:.2f} TB/s; MMA_ns its matmul at {TERAFLOPS:.1f} TFLOP/s; ops_ns the instructions
of the consumers' loop as PTX has them, at {ISSUES} a cycle: ptxas makes fewer, of two logical operations one. Sums are
cut into `parts`; latencies are not counted."""
TPU_LEGEND = """
A chunk is 128 inputs of a block of outputs. Few rows: its codes take chunk_ns at HBM's nominal bandwidth, and its
bundles, one a cycle, take less at a clock above GHz: then the step waits for memory alone. Many rows: bundles are those
of widening a chunk, once for all rows."""


def main() -> int:
    """Compile, check, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h100", help="h100, v5e:1x1, v6e:1x1 or tpu7x:1x1x1 (default: %(default)s)")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=[*FORMATS, *RARE], metavar="FORMAT")
    parser.add_argument("--rare", action="store_true", help="the formats of cases.RARE instead")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), metavar="N")
    parser.add_argument("--matrices", nargs="+", default=list(MATRICES), metavar="OUTxIN")
    parser.add_argument("--xla", action="store_true", help="compile plain XLA, and only say what it holds in memory")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    head: dict[str, Any] = {"jax": jax.__version__, "target": args.target}
    if IS_GPU:
        head["ptxas"] = ".".join(map(str, ptxas_version()))
    sharding = find_gpu() if IS_GPU else find_tpu(args.target)
    rows = []
    try:
        for matrix in args.matrices:
            for name in RARE if args.rare else args.formats:
                for num_rows in args.rows:
                    row = {"matrix": matrix, "format": name, "rows": num_rows}
                    row |= compile_matmul(
                        matrix, (FORMATS | RARE)[name], num_rows, args.target, sharding, is_plain=args.xla
                    )
                    rows.append(row)
                    print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    finally:
        shutil.rmtree(DUMP)
    if args.json:
        write_rows(args.json, head, rows)
    print("\nCost sheet")
    print_sheet([{key: value for key, value in row.items() if key not in ("seconds", "missed")} for row in rows])
    print(GPU_LEGEND if IS_GPU else TPU_LEGEND)
    missed = [row for row in rows if row["missed"]]
    print(f"{len(rows)} compiled, {len(missed)} missed")
    return int(bool(missed) or (IS_GPU and ptxas_version() < FIRST_PTXAS))


def compile_matmul(
    matrix: str, form: WeightFormat, num_rows: int, target: str, sharding: NamedSharding, *, is_plain: bool
) -> dict[str, Any]:
    """Return what the compilers say of a matmul, and what it misses of what is wanted."""
    num_outputs, num_inputs = map(int, matrix.split("x"))
    op, _ = pick("gpu", architecture="9.0") if IS_GPU else pick("tpu")
    op = Linear() if is_plain else op
    shape = LinearShape(num_outputs, num_inputs, jnp.bfloat16, jnp.bfloat16, form)
    runs = "xla" if op.refusal(shape) else op.implementation
    clear(DUMP)
    started = time.monotonic()
    with noted_smem() as smem, captured_output() as output:
        try:
            jitted = jax.jit(op.__call__, in_shardings=sharding, out_shardings=sharding)
            with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
                traced = jitted.trace(*abstract_arguments(shape, num_rows))
                compiled = traced.lower(lowering_platforms=("cuda" if IS_GPU else "tpu",)).compile()
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            return {"missed": [f"{type(error).__name__}: {str(error)[:300]}"]}
    seconds = round(time.monotonic() - started, 1)
    memory: Any = compiled.memory_analysis()
    wide = held_wide(compiled.as_text() or "", num_outputs * num_inputs)
    may_widen = is_plain or (runs == "xla" and form in RARE.values())
    missed = [] if may_widen else [f"held in memory: {array}" for array in wide]
    figures: dict[str, Any] = {"holds": ", ".join(wide)} if may_widen else {}
    if runs == "gpu":
        figures, wrong = gpu_figures(shape, num_rows, smem, output[0])
        missed += wrong
    elif runs == "tpu":
        figures = tpu_figures(shape, num_rows, BANDWIDTH[target.partition(":")[0]])
    return {
        "runs": runs,
        **figures,
        "temp_MiB": round(memory.temp_size_in_bytes / 2**20, 2),
        "seconds": seconds,
        "missed": missed,
    }


def held_wide(text: str, num_weights: int) -> list[str]:
    """Return the arrays of a compiled program, but for those inside of fusions, that are widened weights or copies.

    These have as many numbers as a layer's weights, and are not the program's arguments.
    """
    entry = text[text.index("\nENTRY ") :]
    found = []
    for line in entry.splitlines():
        made = re.match(r"\s+(?:ROOT )?%\S+ = (.*?) ([a-z-]+)\(", line)
        if made is None or made[2] in NOTHING_MADE:
            continue
        for dtype, dims in re.findall(r"([a-z]+\d+\w*)\[([\d,]+)\]", made[1]):
            if math.prod(map(int, dims.split(","))) >= num_weights:
                found.append(f"{made[2]} {dtype}[{dims}]")
    return found


def held_bytes(form: WeightFormat, num_inputs: int) -> float:
    """Return the bytes of a number on a device, with its share of scales."""
    return form.num_bytes(1, num_inputs, packed=False) / num_inputs


def abstract_arguments(shape: LinearShape, num_rows: int) -> tuple[Any, ...]:
    """Return shapes of the arguments: rows, weights and the layer."""
    form = shape.format
    assert form is not None

    def part(name: str) -> Any:
        dtype = form.device_dtype(name, packed=False)
        return jax.ShapeDtypeStruct((NUM_LAYERS, shape.num_outputs, form.width(name, shape.num_inputs)), dtype)

    weight = Quantized({name: part(name) for name in form.parts}, form)
    rows = jax.ShapeDtypeStruct((num_rows, shape.num_inputs), shape.dtype)
    return rows, weight, jax.ShapeDtypeStruct((), jnp.int32)


def gpu_figures(
    shape: LinearShape, num_rows: int, smem: dict[str, int], output: str
) -> tuple[dict[str, Any], list[str]]:
    """Return what an iteration of the kernel's main loop takes at the limits of an SM, and what is wrong."""
    form = shape.format
    assert form is not None
    registers, spilled = read_ptxas(output)[KERNEL]
    sizes = choose_sizes(num_rows, shape.num_outputs, shape.num_inputs, form)
    outputs, depth = CONSUMERS * MMA_ROWS, piece(form)
    codes, rows = outputs * DEPTH * WORD_BYTES, sizes.rows * depth * 2
    weight_bytes = outputs * depth * held_bytes(form, shape.num_inputs)
    wrong = {f"spills {spilled} bytes": spilled, "shared memory": smem[KERNEL] > SMEM_LIMIT}
    figures = {
        "tile_rows": sizes.rows,
        "parts": sizes.parts,
        "stages": sizes.stages,
        **occupancy(registers, WARPGROUP_LANES * (CONSUMERS + 1), smem[KERNEL]),
        "piece_KiB": (codes + rows) // 1024,
        "HBM_ns": round(1e9 * weight_bytes / (H100.bytes_per_second / NUM_SMS)),
        "MMA_ns": round(1e9 * 2 * outputs * depth * sizes.rows / (MMA_FLOPS * CLOCK)),
        "ops_ns": round(1e9 * CONSUMERS * WARPGROUP_LANES / 32 * loop_length(output) / (ISSUES * CLOCK)),
    }
    return figures, [what for what, is_wrong in wrong.items() if is_wrong]


def loop_length(text: str) -> int:
    """Return how many instructions the loop with matmuls has in a kernel's PTX."""
    lines = [line.strip() for line in text[text.index(".visible .entry ") :].splitlines()]
    matmuls = [i for i, line in enumerate(lines) if "wgmma.mma_async" in line]
    is_label = re.compile(r"\$L__BB\w+:")
    first = max(i for i in range(matmuls[0]) if is_label.match(lines[i]))
    last = next(i for i in range(matmuls[-1], len(lines)) if re.match(r"(@\S+ )?bra", lines[i]))
    return sum(bool(re.match(r"(@\S+ )?[a-z]", line)) for line in lines[first:last])


def tpu_figures(shape: LinearShape, num_rows: int, bandwidth: float) -> dict[str, Any]:
    """Return bundles and bytes of 128 inputs of a block of outputs."""
    form = shape.format
    assert form is not None
    if num_rows > FEW_ROWS:
        loop = innermost(read_loops(DUMP, KERNEL), lambda loop: not loop.uses.get("MATMUL"))
        return {"bundles": len(loop)}
    loop = innermost(read_loops(DUMP, f"{KERNEL}_few"), lambda loop: bool(loop.uses.get("MATMUL")))
    chunk = few_outputs(shape.num_outputs, shape.num_inputs) * LANES * held_bytes(form, shape.num_inputs)
    nanoseconds = 1e9 * chunk / bandwidth
    bundles = len(loop) / CHUNKS_AT_ONCE
    return {"bundles": bundles, "chunk_ns": round(nanoseconds, 1), "GHz": round(bundles / nanoseconds, 2)}


def innermost(loop: Any, is_wanted: Callable[[Any], bool]) -> Any:
    """Return the longest loop without others inside that is wanted."""
    if not loop.inside:
        return loop
    found = [innermost(each, is_wanted) for each in loop.inside]
    return max(filter(is_wanted, found), key=len, default=loop)


if __name__ == "__main__":
    sys.exit(main())
