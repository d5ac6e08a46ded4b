"""Compile the grouped matmul of experts, and count what it costs.

Checked, for each model's experts and each step's: the weights of all layers are not copied, and on an H100 no register
is spilled and shared memory suffices. At the end the cost sheet: on a TPU, from the compiler's own listing, the bundles
(instructions of the VLIW core) of a tile of weights; on an H100 what an iteration of the main loop brings and
multiplies, at the limits of one SM.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from compile.gpu_compiler import read_ptxas
from compile.gpu_cost import CLOCK, H100, MMA_FLOPS, NUM_SMS, occupancy
from compile.program import Program, Row, compile_program, ptxas_misses, report, run, without
from compile.target import Target
from compile.tpu_listing import Loop, read_loops
from pallas_kernels.grouped_matmul import Groups, MatmulShape, capacity, pick
from pallas_kernels.grouped_matmul.cases import CASES
from pallas_kernels.grouped_matmul.gpu import sizes as gpu_sizes
from pallas_kernels.grouped_matmul.tpu import sizes as tpu_sizes
from pallas_kernels.grouped_matmul.tpu.kernel import CHUNKS_AT_ONCE, column_block
from pallas_kernels.grouped_matmul.tpu.sizes import LANES, MATMUL_ROWS
from pallas_kernels.linear.cases import FORMATS
from pallas_kernels.linear.gpu.kernel import COLUMNS
from pallas_kernels.linear.gpu.sizes import CONSUMERS, piece
from pallas_kernels.paged_attention.gpu.common import MMA_ROWS, WARPGROUP_LANES
from pallas_kernels.weights.held import Quantized

STEPS = {"decode": 64, "prefill": 2048}
"""The number of tokens of a step."""
MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "gemma-4-26b-a4b")
FLOAT8_MODELS = ("deepseek-v3", "deepseek-v3-of-8")
"""Their own checkpoints are float8 in blocks; the second is the share of one of eight devices."""
GPU_FORMATS = {"gpt-oss-20b": "mxfp4", "qwen3-30b-a3b": "awq"}
"""The formats of these models' experts on a GPU, besides bfloat16."""
MATMULS = ("up", "down")
NUM_LAYERS = 2
TEMP_LIMIT = 128 * 2**20
"""The bytes of 2,048 tokens' rows in another layout; any model's weights of a layer are more."""
GPU_TEMP_LIMIT = 2**20
"""The list of tiles, in bytes."""
TPU_LEGEND = """
tile: columns of the result (of gate and up each, in up) by inputs. Its bytes take tile_ns at HBM's nominal bandwidth;
its bundles, one a cycle, with 16 rows or fewer, take less at a clock above GHz: then the step waits for memory alone.
rows: as many as a matmul takes at most; rows_bundles and flops_per_bundle are of their matmul with the tile."""
GPU_LEGEND = f"""
A piece is what an iteration of the main loop brings: rows, and two pieces of weights, {gpu_sizes.DEPTH} deep. HBM_ns
and MMA_ns are what it takes at one SM's share of {H100.bytes_per_second / 1e12:.2f} TB/s and \
{H100.flops_per_second / 1e12:.1f} TFLOP/s, with the rows that a matmul takes.
Where HBM_ns is more, the L2 cache has to serve `reuse` thread blocks from one read, or HBM is the bound: in decode it
is. Other instructions and latencies are not counted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models = [*MODELS, *FLOAT8_MODELS]
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", help=f"(default: {' '.join(models)})")
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=STEPS, metavar="STEP")
    by_default = "bfloat16, in decode on a TPU int8 too, on a GPU some models' own; of models in float8 that"
    choices = ["bfloat16", *FORMATS]
    parser.add_argument("--weights", nargs="+", choices=choices, metavar="FORMAT", help=f"(default: {by_default})")


def main(args: argparse.Namespace, target: Target) -> int:
    rows = run(jobs(args, target))
    hidden = ("seconds", "missed") if target.is_gpu else ("span", "transposed", "seconds", "missed")
    legend = GPU_LEGEND if target.is_gpu else TPU_LEGEND
    return report(rows, without(rows, *hidden), legend, args.json, target)


def jobs(args: argparse.Namespace, target: Target) -> Iterator[tuple[Row, Callable[[], Row]]]:
    models = MODELS if target.is_gpu else (*MODELS, *FLOAT8_MODELS)
    for case, step in itertools.product(args.cases or models, args.steps):
        for weights, matmul in itertools.product(args.weights or usual_formats(case, step, target), MATMULS):
            names = {"case": case, "step": step, "matmul": matmul, "weights": weights}
            yield names, partial(compile_matmul, case, STEPS[step], matmul, weights, target)


def usual_formats(case: str, step: str, target: Target) -> list[str]:
    if case in FLOAT8_MODELS:
        return ["fp8-block"]
    if target.is_gpu:
        return ["bfloat16", *filter(None, [GPU_FORMATS.get(case)])]
    return ["bfloat16", *["int8"] * (step == "decode")]


def compile_matmul(name: str, num_tokens: int, matmul: str, weights: str, target: Target) -> Row:
    """Compile a matmul and return its row."""
    case = CASES[name]
    shapes = case.shapes(form=FORMATS.get(weights))
    op, reason = pick(shapes, target.hardware.platform, architecture=target.architecture)
    if reason is not None:
        return {"missed": [reason]}
    shape = shapes[MATMULS.index(matmul)]
    num_rows = capacity(num_tokens * case.num_choices, case.num_experts, op.row_alignment)

    def function(x: Any, w: Any, layer: Any, groups: Any) -> Any:
        return op(x, w, layer, groups, activation=shape.activation, out_dtype=shape.out_dtype)

    program = compile_program(function, abstract_arguments(shape, num_rows), target)
    figures = gpu_figures(shape, num_rows, program) if target.is_gpu else tpu_figures(shape, num_rows, target)
    limit = GPU_TEMP_LIMIT + rows_bytes(shape, num_rows) if target.is_gpu else TEMP_LIMIT
    copied = ["the weights are copied"] if program.memory.temp_size_in_bytes > limit else []
    missed = ptxas_misses(program) + copied
    return figures | {"temp_MiB": program.temp_mib, "seconds": program.seconds, "missed": missed}


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


def gpu_figures(shape: MatmulShape, num_rows: int, program: Program) -> Row:
    """Return the sizes of a tile, its thread blocks' resources, and the time of a piece at the limits of an SM."""
    sizes: Any
    if shape.format is None:
        sizes = gpu_sizes.choose_sizes(num_rows, shape.num_experts, shape.num_columns, shape.out_dtype)
        kernel, columns, consumers, limits = "grouped_matmul", 2 * sizes.columns, sizes.consumers, gpu_limits(sizes)
    else:
        counts = (num_rows, shape.num_experts, shape.num_outputs, shape.num_inputs)
        sizes = gpu_sizes.quantized_sizes(*counts, shape.format)
        kernel, columns, consumers, limits = "quantized_linear", COLUMNS, CONSUMERS, {}
    registers, _ = read_ptxas(program.messages)[kernel]
    held = occupancy(registers, WARPGROUP_LANES * (consumers + 1), program.smem[kernel])
    return {"rows": sizes.rows, "columns": columns, "stages": sizes.stages, **held, **limits}


def rows_bytes(shape: MatmulShape, num_rows: int) -> int:
    """Return the bytes of rows besides arguments and result, where weights are quantized."""
    if shape.format is None:
        return 0
    padded = -(-shape.num_inputs // piece(shape.format)) * piece(shape.format)
    return 2 * num_rows * (padded + (shape.num_outputs if shape.activation else 0))


def gpu_limits(sizes: gpu_sizes.Sizes) -> Row:
    """Return the time of a piece of a tile at the limits of an SM."""
    num_bytes = (sizes.rows + 2 * sizes.columns) * gpu_sizes.DEPTH * 2
    flops = 2 * MMA_ROWS * sizes.consumers * 2 * sizes.columns * gpu_sizes.DEPTH
    hbm, mma = 1e9 * num_bytes / (H100.bytes_per_second / NUM_SMS), 1e9 * flops / (MMA_FLOPS * CLOCK)
    return {"piece_KiB": num_bytes // 1024, "HBM_ns": round(hbm), "MMA_ns": round(mma), "reuse": round(hbm / mma, 1)}


def tpu_figures(shape: MatmulShape, num_rows: int, target: Target) -> Row:
    """Return bundles and bytes of a tile of weights with the fewest rows, and with the most that a matmul takes."""
    counts = (num_rows, shape.num_inputs, shape.num_columns, shape.num_outputs // shape.num_columns)
    sizes = tpu_sizes.choose_sizes(*counts, shape.dtype, shape.weight_dtype, has_groups=has_groups(shape))
    items = max(read_loops(target.dump, "grouped_matmul").inside, key=len)
    bundles, rows_bundles = count_groups(items, shape, sizes) if has_groups(shape) else count_straight(items)
    weights = sizes.parts * sizes.columns * shape.num_inputs
    tile_bytes = weights * jnp.dtype(shape.weight_dtype).itemsize
    if shape.format is not None and shape.format.group is not None:
        tile_bytes += weights // shape.format.group * 4
    nanoseconds = 1e9 * tile_bytes / target.bandwidth
    rows = min(MATMUL_ROWS[-1], sizes.span)
    return {
        "tile": f"{sizes.columns}x{shape.num_inputs}",
        "buffers": sizes.num_buffers,
        "span": sizes.span,
        "transposed": sizes.is_transposed,
        "tile_KiB": tile_bytes // 1024,
        "tile_ns": round(nanoseconds),
        "tile_bundles": bundles,
        "GHz": round(bundles / nanoseconds, 2),
        "rows": rows,
        "rows_bundles": rows_bundles,
        "flops_per_bundle": round(2 * rows * weights / rows_bundles),
    }


def has_groups(shape: MatmulShape) -> bool:
    """Return whether the weights have scales of groups, whose sums are scaled one by one."""
    return shape.format is not None and shape.format.group is not None


def count_straight(items: Loop) -> tuple[int, int]:
    """Return a tile's bundles with the fewest rows, and those of a matmul of the most.

    Matmuls of all inputs are straight code. In the order of the source: a loop over those of the most rows, and the
    others.
    """
    whole, *rests = items.stretches
    return len(items) - len(whole) - sum(map(len, rests[1:])), len(whole)


def count_groups(items: Loop, shape: MatmulShape, sizes: tpu_sizes.Sizes) -> tuple[int, int]:
    """Return the same where each matmul is a loop over columns and, if not unrolled, one over inputs, in that order."""
    whole, fewest, *others = sorted(items.inside, key=lambda loop: loop.first)
    blocks = sizes.columns // column_block(sizes.columns)
    iterations = shape.num_inputs // LANES // CHUNKS_AT_ONCE

    def spent(loop: Loop) -> int:
        trips = blocks if loop.inside or iterations == 1 else iterations
        return trips * (loop.own_bundles + sum(map(spent, loop.inside)))

    outside = len(items) - len(whole) - len(fewest) - (others[-1].last - others[0].first + 1)
    return outside + spent(fewest), whole.own_bundles + sum(map(spent, whole.inside))
