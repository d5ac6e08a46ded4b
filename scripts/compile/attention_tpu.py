"""Compile the TPU's attention kernels, over keys and values or over latents, and count what they cost.

It checks, for each model's shape and each step's, that the pool is updated in place and the scratch beside it is small.
It counts, from the compiler's own listing, the bundles (instructions of the VLIW core) that a full KV tile takes,
beside the time that its bytes take at the memory's nominal bandwidth. With a clock above `GHz` the kernel waits for
memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from compile.program import Row, compile_program, pool_misses, report, run, without
from compile.target import Target
from compile.tpu_listing import read_loops
from pallas_kernels import latent_attention, paged_attention
from pallas_kernels.chosen import num_words
from pallas_kernels.latent_attention.cases import CASES as CASES_OF_LATENTS
from pallas_kernels.latent_attention.layout import row_columns
from pallas_kernels.paged_attention import AttentionBatch, PoolAttention
from pallas_kernels.paged_attention.cases import CASES as CASES_OF_KEYS
from pallas_kernels.paged_attention.tpu.options import SHORT
from pallas_kernels.paged_attention.tpu.prefill import Cut

STEPS = {"decode": (64, 64), "prefill": (2048, 256), "mixed": (512, 256), "row-ends": (2048, 256)}
"""Steps by name: their numbers of tokens and sequences."""
WITH_ROW_ENDS, ROW_ENDS_CASE = "row-ends", "llama-3-8b"
"""The step with rows that may see past their own positions, and the case that it is compiled for."""
CHOSEN_CASES = {
    "deepseek-v3.2": ("deepseek-v3", 2048, 8192),
    "deepseek-v3.2-128k": ("deepseek-v3", 2048, 131072),
    "glm-5": ("kimi-k2", 2048, 8192),
    "glm-5-128k": ("kimi-k2", 2048, 131072),
}
"""Cases of latents with chosen positions, by name: their heads and sizes, `top_k`, and the longest context."""
CASES: dict[str, dict[str, Any]] = {
    "attention": CASES_OF_KEYS,
    "latents": {name: case for name, case in CASES_OF_LATENTS.items() if name != "tiny"}
    | {"kimi-k2-over-8": CASES_OF_LATENTS["kimi-k2"]._replace(num_heads=8)}
    | {"glm-4.7-flash-over-4": CASES_OF_LATENTS["glm-4.7-flash"]._replace(num_heads=5)}
    | {name: CASES_OF_LATENTS[case] for name, (case, *_) in CHOSEN_CASES.items()},
}
"""The cases of each op; two of latents are the part of one of several devices that share out the heads."""
NUM_LAYERS, POOL_BYTES, BLOCK_SIZE, TABLE = 4, 2**30, 64, 256
TEMP_LIMIT = 128 * 2**20
"""Queries, new keys and values and the output in the kernels' layouts, of 2,048 tokens at most 32 MiB each."""
LEGEND = """
tile: of one sequence's KV in decode. Its bytes take tile_ns at HBM's nominal bandwidth; its bundles, one a cycle, take
less at a clock above GHz. left_out: loops of it whose number of trips is not known, which the bundles lack. A sequence
takes sequence_bundles besides those of its tiles; one of up to 128 or 256 tokens takes 128_bundles or 256_bundles in
all. block: of query rows in prefill, with a KV tile of which nothing is masked; edge: where some is; half: where all
of the tile's second half is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases", nargs="+", metavar="CASE", help="of the models' shapes (default: all, without chosen positions)"
    )
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=STEPS, metavar="STEP")
    by_default = "bfloat16; in mixed steps float8 too, once float32"
    parser.add_argument("--kv", nargs="+", metavar="DTYPE", help=f"of the pool (default: {by_default})")


def main(args: argparse.Namespace, target: Target) -> int:
    rows = run(jobs(args, target))
    sheet = without(rows, "tiles", "seconds", "alias_MiB", "temp_MiB", "missed")
    return report(rows, sheet, LEGEND, args.json, target)


def jobs(args: argparse.Namespace, target: Target) -> Iterator[tuple[Row, Callable[[], Row]]]:
    for case, step, dtype, kv_dtype in selection(args.op, args.cases, args.steps, args.kv):
        compile_one = partial(compile_step, args.op, case, step, dtype, kv_dtype, target)
        yield {"case": case, "step": step, "kv": kv_dtype}, compile_one


def selection(
    op: str, cases: Sequence[str] | None, steps: Sequence[str], kv_dtypes: Sequence[str] | None
) -> Iterator[tuple[str, str, str, str]]:
    """Yield case, step, dtype and dtype of the pool."""
    for case in cases or [name for name in CASES[op] if name not in CHOSEN_CASES]:
        for step in steps:
            if step == WITH_ROW_ENDS and case != ROW_ENDS_CASE:
                continue
            # Every step holds all kernels: the rarer pools are compiled once.
            rare = ["float8_e4m3fn", *["float32"] * (case == "llama-3.2-1b")] * (step == "mixed")
            for kv_dtype in kv_dtypes or ("bfloat16", *rare):
                yield case, step, "float32" if kv_dtype == "float32" else "bfloat16", kv_dtype


class Step(NamedTuple):
    """A step's attention as a function of arrays, and the sizes of what its kernels read and compute."""

    name: str
    """The beginning of its kernels' names."""
    attention: PoolAttention
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """The arrays' shapes, the pool's first."""
    token_bytes: int
    """Bytes of a token in the pool."""
    block_rows: int
    """The rows of queries that prefill attends together."""
    pair_flops: int
    """The FLOPs of a row for a token."""
    temp_limit: int = TEMP_LIMIT


def compile_step(op: str, name: str, step: str, dtype: str, kv_dtype: str, target: Target) -> Row:
    """Compile a step and return its row."""
    make = {"attention": over_keys, "latents": over_latents}[op]
    shape = CASES[op][name].shape(BLOCK_SIZE, getattr(jnp, dtype), getattr(jnp, kv_dtype))
    built = make(name, shape, step, target.architecture)
    program = compile_program(built.function, built.arguments, target, donated=0)
    missed = pool_misses(program, *built.arguments[0])
    if program.memory.temp_size_in_bytes > built.temp_limit:
        missed.append("scratch")
    return {
        "tiles": "/".join(map(str, built.attention.tiles)),
        "seconds": program.seconds,
        "alias_MiB": program.alias_mib,
        "temp_MiB": program.temp_mib,
        **decode_cost(built, target),
        **prefill_cost(built, target.dump),
        "missed": missed,
    }


def over_keys(name: str, shape: paged_attention.AttentionShape, step: str, kind: str) -> Step:
    """Return the attention over keys and values."""
    attention, _ = paged_attention.pick(shape, "tpu", architecture=kind)
    case = CASES_OF_KEYS[name]

    def function(pool: Any, q: Any, k: Any, v: Any, batch: Any, layer: Any, window: Any, sinks_n: Any) -> Any:
        settings: dict[str, Any] = {"layer": layer, "num_layers": NUM_LAYERS, "window": window, "sinks_n": sinks_n}
        scale, cap = shape.head_dim**-0.5, case.soft_cap
        return attention(q, k, v, pool, batch, scale=scale, soft_cap=cap, **settings)

    t, token_bytes = STEPS[step][0], 2 * shape.num_kv_heads * shape.head_dim * shape.kv_dtype.itemsize
    q, kv = (jax.ShapeDtypeStruct((t, n, shape.head_dim), shape.dtype) for n in (shape.num_heads, shape.num_kv_heads))
    batch = abstract_batch(attention, *STEPS[step], has_row_ends=step == WITH_ROW_ENDS)
    sinks = jax.ShapeDtypeStruct((shape.num_heads,), jnp.float32) if case.has_sinks else None
    cut = Cut.of(attention.tiles.query, shape.group, shape.num_kv_heads)
    return Step(
        "paged",
        attention,
        function,
        (abstract_pool(attention, token_bytes), q, kv, kv, batch, SCALAR, SCALAR, sinks),
        token_bytes,
        block_rows=cut.block_heads * cut.block_tokens * shape.group,
        pair_flops=4 * shape.head_dim,
    )


def over_latents(name: str, shape: latent_attention.LatentShape, step: str, kind: str) -> Step:
    """Return the attention over latents."""
    _, top_k, context = CHOSEN_CASES.get(name, ("", None, TABLE * BLOCK_SIZE))
    shape = shape._replace(top_k=top_k)
    attention, _ = latent_attention.pick(shape, "tpu", architecture=kind)

    def function(pool: Any, q: Any, latents: Any, batch: Any, layer: Any, chosen: Any) -> Any:
        settings: dict[str, Any] = {"layer": layer, "num_layers": NUM_LAYERS, "scale": shape.key_dim**-0.5}
        return attention(q, latents, pool, batch, **settings, chosen_tw=chosen)

    t, columns = STEPS[step][0], row_columns(shape)
    token_bytes = columns * shape.kv_dtype.itemsize
    q, latents = (jax.ShapeDtypeStruct((t, *heads, shape.key_dim), shape.dtype) for heads in ((shape.num_heads,), ()))
    batch = abstract_batch(attention, *STEPS[step], has_row_ends=False)
    tables = jax.ShapeDtypeStruct((STEPS[step][1], context // BLOCK_SIZE), jnp.int32)
    batch = batch._replace(block_tables_sm=tables)
    chosen = None if top_k is None else jax.ShapeDtypeStruct((t, num_words(batch, BLOCK_SIZE)), jnp.int32)
    cut = Cut.of(attention.tiles.query, shape.num_heads, 1)
    return Step(
        "latent",
        attention,
        function,
        (abstract_pool(attention, token_bytes), q, latents, batch, SCALAR, chosen),
        token_bytes,
        block_rows=cut.block_tokens * shape.num_heads,
        pair_flops=2 * (shape.key_dim + shape.latent_dim),
        # Queries of whole lanes and the output, in the kernels' layouts and in their own.
        temp_limit=TEMP_LIMIT + 2 * t * shape.num_heads * (columns + shape.latent_dim) * shape.dtype.itemsize,
    )


SCALAR = jax.ShapeDtypeStruct((), jnp.int32)


def abstract_pool(attention: PoolAttention, token_bytes: int) -> Any:
    """Return the shape of a pool of 1 GiB."""
    return attention.pool_spec(NUM_LAYERS, POOL_BYTES // NUM_LAYERS // (token_bytes * BLOCK_SIZE))


def abstract_batch(attention: PoolAttention, t: int, s: int, *, has_row_ends: bool) -> AttentionBatch:
    """Return the shapes of a batch of `t` tokens and `s` sequences."""
    num_tiles = s + t // attention.tiles.query
    shapes = [(t,), (s, TABLE), (s,), (s,), (s,), (), (num_tiles,), (num_tiles,), (), *[(t,)] * has_row_ends]
    specs: list[Any] = [jax.ShapeDtypeStruct(x, jnp.int32) for x in shapes]
    return AttentionBatch(*specs)


def decode_cost(step: Step, target: Target) -> dict[str, Any]:
    """Return bundles and bytes of a full KV tile of one sequence, and the bundles of a sequence of short context.

    Straight code counts whole, with the parts that run once a sequence; inner loops with a fixed number of trips, over
    heads for instance, run for a full tile.
    """
    kernel = read_loops(target.dump, f"{step.name}_decode")
    # In the order of the source: those over groups of short sequences, and the one over the other sequences.
    *groups, sequences = sorted((loop for loop in kernel.inside if loop.matmuls), key=lambda loop: loop.first)
    tile_loop = sequences.busiest()
    short = {
        f"{size}_bundles": round(loop.bundles_of_one_trip * size / step.attention.tiles.kv)
        for size, loop in zip(SHORT, groups, strict=False)
    }
    bundles = tile_loop.bundles_of_one_trip
    tile_bytes = step.attention.tiles.kv * step.token_bytes
    nanoseconds = 1e9 * tile_bytes / target.bandwidth
    return {
        "tile_KiB": tile_bytes // 1024,
        "tile_bundles": bundles,
        "left_out": tile_loop.num_unknown,
        "sequence_bundles": sequences.own_bundles,
        **short,
        "tile_ns": round(nanoseconds),
        "GHz": round(bundles / nanoseconds, 2),
    }


def prefill_cost(step: Step, dump: Path) -> dict[str, Any]:
    """Return the bundles that a block of rows takes for a KV tile, and its flops per bundle where nothing is masked."""
    loop = max(read_loops(dump, f"{step.name}_prefill"), key=lambda loop: loop.own_matmuls)
    flops = step.pair_flops * step.block_rows * step.attention.tiles.kv
    rest = loop.own_bundles - sum(map(len, loop.stretches))
    # In the order of the source; where positions are chosen, all rows are masked.
    *whole, edge, half = (rest + len(stretch) for stretch in loop.stretches)
    [whole] = whole or [edge]
    return {
        "block_rows": step.block_rows,
        "block_bundles": whole,
        "edge_bundles": edge,
        "half_bundles": half,
        "flops_per_bundle": round(flops / whole),
    }
