"""Compile matmuls by quantized weights, and check them.

Checked, for each format and number of rows: nothing of the size of the weights, in the dtype of what they are
multiplied by, is held in memory, and neither are the codes of all layers copied; on a GPU no register is spilled and
shared memory suffices, and from 512 rows on one widened matrix is held. At the end the cost sheet.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from compile.gpu_compiler import read_ptxas
from compile.gpu_cost import CLOCK, H100, MMA_FLOPS, NUM_SMS, occupancy
from compile.program import Program, Row, compile_program, ptxas_misses, report, run, without
from compile.target import Target
from compile.tpu_listing import read_loops
from pallas_kernels.linear import Linear, LinearShape, pick
from pallas_kernels.linear.cases import FORMATS, RARE
from pallas_kernels.linear.gpu.sizes import CONSUMERS, DEPTH, WIDENED_ROWS, WORD_BYTES, choose_sizes, piece
from pallas_kernels.linear.gpu_mma import choose_sizes as choose_mma_sizes
from pallas_kernels.linear.tpu.sizes import CHUNKS_AT_ONCE, FEW_ROWS, LANES, few_outputs
from pallas_kernels.linear.xla import SUMMED_ROWS
from pallas_kernels.paged_attention.gpu.common import MMA_ROWS, WARPGROUP_LANES
from pallas_kernels.weights import WeightFormat
from pallas_kernels.weights.held import Quantized

ROWS = (1, 64, 2000)
MATRICES = ("4096x4096", "5120x25600")
"""Outputs by inputs; the second is the down projection of Qwen3-32B."""
NUM_LAYERS = 2
NOTHING_MADE = (
    "parameter", "bitcast", "tuple", "get-tuple-element", "custom-call", "copy-start", "copy-done", "slice-start",
    "slice-done",
)  # fmt: skip
"""XLA brings arguments into a TPU's VMEM ahead, with copies and slices."""
KERNEL = "quantized_linear"
FLOAT8_CALL = "__cublas$lt$matmul$f8"
ISSUES = 4
"""The number of instructions, each for 32 threads, that an SM starts in a cycle."""
TERABYTES, TERAFLOPS = H100.bytes_per_second / 1e12, H100.flops_per_second / 1e12
GPU_LEGEND = f"""
A piece is what an iteration of the main loop brings, of codes and of rows. HBM_ns is what its codes and their scales
take at one SM's share of {TERABYTES:.2f} TB/s; MMA_ns its matmul at {TERAFLOPS:.1f} TFLOP/s; ops_ns the instructions
of the consumers' loop as PTX has them, at {ISSUES} a cycle: ptxas makes fewer, of two logical operations one. Sums are
cut into `parts`; latencies are not counted."""
MMA_LEGEND = """
loop_ops are the instructions of a thread in an iteration of the main loop, as PTX has them, copies to shared memory
apart; ops_per_code is their share in a weight, and ops_per_byte in a byte of its codes, scales and the like. Sums are
cut into `parts`."""
TPU_LEGEND = """
A chunk is 128 inputs of a block of outputs. Few rows: its codes take chunk_ns at HBM's nominal bandwidth, and its
bundles, one a cycle, take less at a clock above GHz: then the step waits for memory alone. Many rows: bundles are those
of widening a chunk, once for all rows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=[*FORMATS, *RARE], metavar="FORMAT")
    parser.add_argument("--rare", action="store_true", help="the formats of cases.RARE instead")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), metavar="N")
    parser.add_argument("--matrices", nargs="+", default=list(MATRICES), metavar="OUTxIN")
    parser.add_argument("--float8", action="store_true", help='compile Linear("gpu_fp8"), and check that cuBLASLt runs')
    parser.add_argument("--xla", action="store_true", help="compile plain XLA, and only show what it holds in memory")


def main(args: argparse.Namespace, target: Target) -> int:
    rows = run(jobs(args, target))
    is_mma = any(row.get("runs") == "gpu_mma" for row in rows)
    legend = MMA_LEGEND if is_mma else GPU_LEGEND if target.is_gpu else TPU_LEGEND
    return report(rows, without(rows, "seconds", "missed"), legend, args.json, target)


def jobs(args: argparse.Namespace, target: Target) -> Iterator[tuple[Row, Callable[[], Row]]]:
    if args.float8:
        for matrix, num_rows in itertools.product(args.matrices, args.rows):
            yield {"matrix": matrix, "rows": num_rows}, partial(compile_float8, matrix, num_rows, target)
        return
    for matrix, name, num_rows in itertools.product(args.matrices, RARE if args.rare else args.formats, args.rows):
        compile_one = partial(compile_matmul, matrix, (FORMATS | RARE)[name], num_rows, target, is_plain=args.xla)
        yield {"matrix": matrix, "format": name, "rows": num_rows}, compile_one


def compile_matmul(matrix: str, form: WeightFormat, num_rows: int, target: Target, *, is_plain: bool) -> Row:
    """Compile a matmul and return its row."""
    num_outputs, num_inputs = map(int, matrix.split("x"))
    op, _ = pick(target.hardware.platform, architecture=target.architecture)
    op = Linear() if is_plain else op
    shape = LinearShape(num_outputs, num_inputs, jnp.bfloat16, jnp.bfloat16, form)
    runs = "xla" if op.refusal(shape) else op.implementation
    is_widened = runs in ("gpu", "gpu_mma") and num_rows >= WIDENED_ROWS
    program = compile_program(op.__call__, abstract_arguments(shape, num_rows), target)
    wide = held_wide(program.hlo, num_outputs * num_inputs)
    may_widen = is_plain or is_widened or (runs == "xla" and may_xla_widen(form, num_rows, target))
    missed = [] if may_widen else [f"held in memory: {array}" for array in wide]
    figures: Row = {"holds": ", ".join(wide)} if may_widen else {}
    if is_widened:
        runs, missed = "widened", missed_by_widening(wide, program.temp_mib, shape)
    elif runs in ("gpu", "gpu_mma"):
        figures = (gpu_figures if runs == "gpu" else mma_figures)(shape, num_rows, program)
        missed += ptxas_misses(program)
    elif runs == "tpu":
        figures = tpu_figures(shape, num_rows, target)
    last = {"temp_MiB": program.temp_mib, "seconds": program.seconds, "missed": missed}
    return {"runs": runs} | figures | last


def compile_float8(matrix: str, num_rows: int, target: Target) -> Row:
    """Compile a matmul of rows that are rounded to float8, with the engine's options, and return its row."""
    num_outputs, num_inputs = map(int, matrix.split("x"))
    shape = LinearShape(num_outputs, num_inputs, jnp.bfloat16, jnp.bfloat16, FORMATS["fp8"])
    rows, weight, _ = abstract_arguments(shape, num_rows)
    alone = weight.map(
        lambda part: jax.ShapeDtypeStruct((1, *part.shape[1:]), part.dtype)
    )  # as each layer's arrays are
    program = compile_program(partial(Linear("gpu_fp8"), layer=0), (rows, alone), target, as_engine=True)
    missed = [f"held in memory: {array}" for array in held_wide(program.hlo, num_outputs * num_inputs)]
    missed += [] if FLOAT8_CALL in program.hlo else ["no call of cuBLASLt"]
    return {"runs": "gpu_fp8", "temp_MiB": program.temp_mib, "seconds": program.seconds, "missed": missed}


def missed_by_widening(wide: list[str], temp_mib: float, shape: LinearShape) -> list[str]:
    """Return what is wrong with a matmul that widens its matrix first: it holds that matrix once."""
    missed = [f"held in memory: {array}" for array in wide[1:]]
    is_large = temp_mib * 2**20 >= 2 * (2 * shape.num_outputs * shape.num_inputs)
    return missed + ([f"scratch of {temp_mib} MiB"] if is_large else [])


def may_xla_widen(form: WeightFormat, num_rows: int, target: Target) -> bool:
    """Return whether plain XLA may write widened weights to memory."""
    return num_rows > SUMMED_ROWS if target.is_gpu else form in RARE.values()


def held_wide(text: str, num_weights: int) -> list[str]:
    """Return the arrays of a compiled program, outside of fusions, that are widened weights or copies.

    They have as many numbers as a layer's weights, and are not the program's arguments.
    """
    arrays = [made for made in made_arrays(text) if math.prod(made[2]) >= num_weights]
    return [f"{kind} {dtype}[{','.join(map(str, dims))}]" for kind, dtype, dims in arrays]


def made_arrays(text: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield the arrays that a compiled program makes outside of fusions: the operation's kind, the dtype and sizes."""
    for line in text[text.index("\nENTRY ") :].splitlines():
        made = re.match(r"\s+(?:ROOT )?%\S+ = (.*?) ([a-z-]+)\(", line)
        if made is None or made[2] in NOTHING_MADE:
            continue
        for dtype, dims in re.findall(r"([a-z]+\d+\w*)\[([\d,]+)\]", made[1]):
            yield made[2], dtype, tuple(map(int, dims.split(",")))


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


def gpu_figures(shape: LinearShape, num_rows: int, program: Program) -> Row:
    """Return the time of an iteration of the kernel's main loop at the limits of an SM."""
    form = shape.format
    assert form is not None
    registers, _ = read_ptxas(program.messages)[KERNEL]
    sizes = choose_sizes(num_rows, shape.num_outputs, shape.num_inputs, form)
    outputs, depth = CONSUMERS * MMA_ROWS, piece(form)
    codes, rows = outputs * DEPTH * WORD_BYTES, sizes.rows * depth * 2
    weight_bytes = outputs * depth * held_bytes(form, shape.num_inputs)
    return {
        "tile_rows": sizes.rows,
        "parts": sizes.parts,
        "stages": sizes.stages,
        **occupancy(registers, WARPGROUP_LANES * (CONSUMERS + 1), program.smem[KERNEL]),
        "piece_KiB": (codes + rows) // 1024,
        "HBM_ns": round(1e9 * weight_bytes / (H100.bytes_per_second / NUM_SMS)),
        "MMA_ns": round(1e9 * 2 * outputs * depth * sizes.rows / (MMA_FLOPS * CLOCK)),
        "ops_ns": round(1e9 * CONSUMERS * WARPGROUP_LANES / 32 * loop_length(program.messages) / (ISSUES * CLOCK)),
    }


def mma_figures(shape: LinearShape, num_rows: int, program: Program) -> Row:
    """Return what the kernel of `gpu_mma` takes, and the instructions of its main loop for each code of a weight."""
    form = shape.format
    assert form is not None
    registers, _ = read_ptxas(program.messages)[KERNEL]
    sizes = choose_mma_sizes(num_rows, shape.num_outputs, shape.num_inputs, form)
    length, codes = loop_length(program.messages), sizes.outputs * piece(form) / WARPGROUP_LANES
    return {
        "tile_rows": sizes.rows,
        "tile_outputs": sizes.outputs,
        "parts": 1 if sizes.is_whole else sizes.parts,
        "stages": sizes.stages,
        "registers": registers,
        "smem_KiB": program.smem[KERNEL] / 1024,
        "loop_ops": length,
        "ops_per_code": round(length / codes, 2),
        "ops_per_byte": round(length / codes / held_bytes(form, shape.num_inputs), 2),
    }


def loop_length(text: str) -> int:
    """Return the number of instructions of the loop with matmuls in a kernel's PTX."""
    lines = [line.strip() for line in text[text.index(".visible .entry ") :].splitlines()]
    matmuls = [i for i, line in enumerate(lines) if re.search(r"wgmma\.mma_async|mma\.sync", line)]
    is_label = re.compile(r"\$L__BB\w+:")
    first = max(i for i in range(matmuls[0]) if is_label.match(lines[i]))
    last = next(i for i in range(matmuls[-1], len(lines)) if re.match(r"(@\S+ )?bra", lines[i]))
    return sum(bool(re.match(r"(@\S+ )?[a-z]", line)) for line in lines[first:last])


def tpu_figures(shape: LinearShape, num_rows: int, target: Target) -> Row:
    """Return bundles and bytes of 128 inputs of a block of outputs."""
    form = shape.format
    assert form is not None
    if num_rows > FEW_ROWS:
        loop = innermost(read_loops(target.dump, KERNEL), lambda loop: not loop.uses.get("MATMUL"))
        return {"bundles": len(loop)}
    loop = innermost(read_loops(target.dump, f"{KERNEL}_few"), lambda loop: bool(loop.uses.get("MATMUL")))
    chunk = few_outputs(shape.num_outputs, shape.num_inputs) * LANES * held_bytes(form, shape.num_inputs)
    nanoseconds = 1e9 * chunk / target.bandwidth
    bundles = len(loop) / CHUNKS_AT_ONCE
    return {"bundles": bundles, "chunk_ns": round(nanoseconds, 1), "GHz": round(bundles / nanoseconds, 2)}


def innermost(loop: Any, is_wanted: Callable[[Any], bool]) -> Any:
    """Return the longest of the innermost loops for which `is_wanted` is true."""
    if not loop.inside:
        return loop
    loops = [innermost(inner, is_wanted) for inner in loop.inside]
    return max(filter(is_wanted, loops), key=len, default=loop)
