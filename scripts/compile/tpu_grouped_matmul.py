"""Compile the TPU's grouped matmul for TPUs that are not there, with libtpu, and count what it costs.

It checks, for each model's experts and each step's, that the weights of all layers are not copied. It counts, from the
compiler's own listing, the bundles (instructions of the VLIW core) that a tile of weights takes with the rows of one
slab, beside the time that its bytes take at the memory's nominal bandwidth, and with as many rows as a matmul takes.
These are static figures; nothing runs.
"""

# ruff: noqa: E402  libtpu reads the environment when it is loaded

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxllm.check.compilers import compiler_environment
from jaxllm.execution.hardware import HARDWARE

DUMP = Path(tempfile.mkdtemp(prefix="tpu-grouped-matmul-"))
os.environ |= compiler_environment(HARDWARE["v6e"], dict(os.environ))
os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={DUMP} --xla_jf_dump_llo_text=true"

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from lib.sheet import print_sheet, write_rows

from compile.tpu_compiler import BANDWIDTH, find_device
from compile.tpu_listing import Loop, clear, read_loops
from pallas_kernels.grouped_matmul import Groups, MatmulShape, capacity, pick
from pallas_kernels.grouped_matmul.cases import CASES
from pallas_kernels.grouped_matmul.tpu.kernel import CHUNKS_AT_ONCE, column_block
from pallas_kernels.grouped_matmul.tpu.sizes import LANES, MATMUL_ROWS, Sizes, choose_sizes
from pallas_kernels.linear.cases import FORMATS
from pallas_kernels.weights.held import Quantized

STEPS = {"decode": 64, "prefill": 2048}
"""How many tokens a step has."""
MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "gemma-4-26b-a4b")
FLOAT8_MODELS = ("deepseek-v3", "deepseek-v3-of-8")
"""Their own checkpoints are float8 in blocks; the second is the share of one of eight devices."""
MATMULS = ("up", "down")
NUM_LAYERS = 2
TEMP_LIMIT = 128 * 2**20
"""Rows in another layout, of 2,048 tokens at most so many bytes; any model's weights of a layer are more."""
SHEET = (
    "case", "step", "matmul", "weights", "tile", "buffers", "tile_KiB", "tile_ns", "tile_bundles", "GHz",
    "rows", "rows_bundles", "flops_per_bundle", "temp_MiB",
)  # fmt: skip
LEGEND = """
tile: columns of the result (of gate and up each, in up) by inputs. Its bytes take tile_ns at HBM's nominal bandwidth;
its bundles, one a cycle, with 16 rows or fewer, take less at a clock above GHz: then the step waits for memory alone.
rows: as many as a matmul takes at most; rows_bundles and flops_per_bundle are of their matmul with the tile."""


def main() -> int:
    """Compile, check, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v6e:1x1", help="v5e:1x1, v6e:1x1 or tpu7x:1x1x1 (default: %(default)s)")
    parser.add_argument("--cases", nargs="+", default=[*MODELS, *FLOAT8_MODELS], choices=CASES, metavar="CASE")
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=STEPS, metavar="STEP")
    parser.add_argument(
        "--weights",
        nargs="+",
        choices=["bfloat16", *FORMATS],
        metavar="FORMAT",
        help="(default: bfloat16, in decode int8 too; of models in float8 that)",
    )
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    sharding = find_device(args.topology)
    bandwidth = BANDWIDTH[args.topology.partition(":")[0]]
    rows = []
    try:
        for case, step, matmul, weights in selection(args.cases, args.steps, args.weights):
            row = {"case": case, "step": step, "matmul": matmul, "weights": weights}
            row |= compile_matmul(case, STEPS[step], matmul, weights, sharding, bandwidth)
            rows.append(row)
            print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    finally:
        shutil.rmtree(DUMP)
    if args.json:
        write_rows(args.json, {"jax": jax.__version__, "topology": args.topology}, rows)
    print("\nCost sheet")
    print_sheet([{name: row[name] for name in SHEET if name in row} for row in rows])
    print(LEGEND)
    return int(any(row["missed"] for row in rows))


def selection(
    cases: Sequence[str], steps: Sequence[str], weights: Sequence[str] | None
) -> Iterator[tuple[str, str, str, str]]:
    """Yield case, step, matmul and format of the weights."""
    for case in cases:
        for step in steps:
            usual = ["fp8-block"] if case in FLOAT8_MODELS else ["bfloat16", *["int8"] * (step == "decode")]
            for form in weights or usual:
                for matmul in MATMULS:
                    yield case, step, matmul, form


def compile_matmul(
    name: str, num_tokens: int, matmul: str, weights: str, sharding: NamedSharding, bandwidth: float
) -> dict[str, Any]:
    """Return what the compiler says, and what it misses of what is wanted."""
    case = CASES[name]
    shapes = case.shapes(form=FORMATS.get(weights))
    op, reason = pick(shapes, "tpu")
    if reason is not None:
        return {"missed": [reason]}
    shape = shapes[MATMULS.index(matmul)]
    num_choices = num_tokens * case.num_choices
    num_rows = capacity(num_choices, case.num_experts, op.row_alignment)

    def function(x: Any, w: Any, layer: Any, groups: Any) -> Any:
        return op(x, w, layer, groups, activation=shape.activation, out_dtype=shape.out_dtype)

    clear(DUMP)
    started = time.monotonic()
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        jitted = jax.jit(function, in_shardings=sharding, out_shardings=sharding)
        try:
            compiled = jitted.lower(*abstract_arguments(shape, num_rows)).compile()
        except jax.errors.JaxRuntimeError as error:
            return {"missed": [str(error)[:300]]}
    seconds = time.monotonic() - started
    memory: Any = compiled.memory_analysis()
    parts = shape.num_outputs // shape.num_columns
    counts = (num_rows, shape.num_inputs, shape.num_columns, parts)
    sizes = choose_sizes(*counts, shape.dtype, shape.weight_dtype, has_groups=has_groups(shape))
    return {
        "tile": f"{sizes.columns}x{shape.num_inputs}",
        "buffers": sizes.num_buffers,
        "span": sizes.span,
        "transposed": sizes.is_transposed,
        "seconds": round(seconds, 1),
        "temp_MiB": round(memory.temp_size_in_bytes / 2**20, 2),
        **cost(shape, sizes, bandwidth),
        "missed": ["the weights are copied"] if memory.temp_size_in_bytes > TEMP_LIMIT else [],
    }


def abstract_arguments(shape: MatmulShape, num_rows: int) -> tuple[Any, ...]:
    """Return shapes of the arguments."""
    e, o, i = shape.num_experts, shape.num_outputs, shape.num_inputs
    per_expert: Any = jax.ShapeDtypeStruct((e,), jnp.int32)
    weight = jax.ShapeDtypeStruct((NUM_LAYERS, e, o, i), shape.weight_dtype)
    num_scales = 1 if shape.format is None else shape.format.width("scales", i)
    scales = jax.ShapeDtypeStruct((NUM_LAYERS, e, o, num_scales), jnp.float32)
    return (
        jax.ShapeDtypeStruct((num_rows, i), shape.dtype),
        weight if shape.format is None else Quantized({"codes": weight, "scales": scales}, shape.format),
        jax.ShapeDtypeStruct((), jnp.int32),
        Groups(per_expert, per_expert),
    )


def cost(shape: MatmulShape, sizes: Sizes, bandwidth: float) -> dict[str, Any]:
    """Return bundles and bytes of a tile of weights with the fewest rows, and with the most that a matmul takes."""
    items = max(read_loops(DUMP, "grouped_matmul").inside, key=len)
    bundles, rows_bundles = count_groups(items, shape, sizes) if has_groups(shape) else count_straight(items)
    weights = sizes.parts * sizes.columns * shape.num_inputs
    tile_bytes = weights * jnp.dtype(shape.weight_dtype).itemsize
    if shape.format is not None and shape.format.group is not None:
        tile_bytes += weights // shape.format.group * 4
    nanoseconds = 1e9 * tile_bytes / bandwidth
    rows = min(MATMUL_ROWS[-1], sizes.span)
    return {
        "tile_KiB": tile_bytes // 1024,
        "tile_ns": round(nanoseconds),
        "tile_bundles": bundles,
        "GHz": round(bundles / nanoseconds, 2),
        "rows": rows,
        "rows_bundles": rows_bundles,
        "flops_per_bundle": round(2 * rows * weights / rows_bundles),
    }


def has_groups(shape: MatmulShape) -> bool:
    """Say whether the weights have scales of groups, whose sums are scaled one by one."""
    return shape.format is not None and shape.format.group is not None


def count_straight(items: Loop) -> tuple[int, int]:
    """Return a tile's bundles with the fewest rows, and those of a matmul of the most.

    Matmuls of all inputs are straight code. In the order of the source: a loop over those of the most rows, and the
    others.
    """
    whole, *rests = items.stretches
    return len(items) - len(whole) - sum(map(len, rests[1:])), len(whole)


def count_groups(items: Loop, shape: MatmulShape, sizes: Sizes) -> tuple[int, int]:
    """Return the same where each matmul is a loop over columns and, if not unrolled, one over inputs, in that order."""
    whole, fewest, *others = sorted(items.inside, key=lambda loop: loop.first)
    blocks = sizes.columns // column_block(sizes.columns)
    iterations = shape.num_inputs // LANES // CHUNKS_AT_ONCE

    def spent(loop: Loop) -> int:
        trips = blocks if loop.inside or iterations == 1 else iterations
        return trips * (loop.own_bundles + sum(map(spent, loop.inside)))

    outside = len(items) - len(whole) - len(fewest) - (others[-1].last - others[0].first + 1)
    return outside + spent(fewest), whole.own_bundles + sum(map(spent, whole.inside))


if __name__ == "__main__":
    sys.exit(main())
