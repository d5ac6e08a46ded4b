"""Compile the TPU's kernels of the indexer of sparse attention, and count what they cost.

It checks, for each model's shape and each length of the longest context, that the pool is updated in place. From the
compiler's own listing it counts bundles (instructions of the VLIW core), beside the time that the bytes of a tile of
keys take at the memory's nominal bandwidth. With a clock above `GHz` the kernel waits for memory.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from compile.attention_tpu import BLOCK_SIZE, NUM_LAYERS, SCALAR, abstract_batch, abstract_pool
from compile.program import Row, compile_program, pool_misses, report, run, without
from compile.target import Target
from compile.tpu_listing import read_loops
from pallas_kernels.indexer import pick
from pallas_kernels.indexer.cases import CASES

TOKENS, SEQUENCES = 2048, 256
CONTEXTS = (8192, 131072)
TEMP_LIMIT = 2**20
LEGEND = """
tile: of keys, whose bytes take tile_ns at HBM's nominal bandwidth; decode_bundles and prefill_bundles score it for one
row, and for eight. left_out: loops whose number of trips is not known, which the bundles lack. pass: counts 1,024
scores of each of eight rows; a choice takes at most 32 passes, unless scores are equal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models = [name for name in CASES if name != "tiny"]
    parser.add_argument("--cases", nargs="+", default=models, choices=models, metavar="CASE")
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS, metavar="TOKENS", help="longest contexts")


def main(args: argparse.Namespace, target: Target) -> int:
    rows = run(jobs(args, target))
    return report(rows, without(rows, "seconds", "alias_MiB", "temp_MiB", "missed"), LEGEND, args.json, target)


def jobs(args: argparse.Namespace, target: Target) -> Iterator[tuple[Row, Callable[[], Row]]]:
    for case in args.cases:
        for context in args.contexts:
            dtypes = ["bfloat16", *["float8_e4m3fn"] * (context == args.contexts[0])]
            for kv_dtype in dtypes:
                names = {"case": case, "context": context, "kv": kv_dtype}
                yield names, partial(compile_one, case, context, kv_dtype, target)


def compile_one(case: str, context: int, kv_dtype: str, target: Target) -> Row:
    """Compile a step of decodes and chunks, and return its figures."""
    shape = CASES[case].shape(BLOCK_SIZE, kv_dtype=getattr(jnp, kv_dtype))
    indexer, _ = pick(shape, "tpu", architecture=target.architecture)

    def function(pool: Any, q: Any, k: Any, weights: Any, batch: Any, layer: Any) -> Any:
        return indexer(q, k, weights, pool, batch, layer=layer, num_layers=NUM_LAYERS)

    token_bytes = shape.head_dim * shape.kv_dtype.itemsize
    q, k = (jax.ShapeDtypeStruct((TOKENS, *heads, shape.head_dim), shape.dtype) for heads in ((shape.num_heads,), ()))
    weights = jax.ShapeDtypeStruct((TOKENS, shape.num_heads), jnp.float32)
    batch = abstract_batch(indexer, TOKENS, SEQUENCES, has_row_ends=False)
    tables = jax.ShapeDtypeStruct((SEQUENCES, context // BLOCK_SIZE), jnp.int32)
    pool = abstract_pool(indexer, token_bytes)
    arguments = pool, q, k, weights, batch._replace(block_tables_sm=tables), SCALAR
    program = compile_program(function, arguments, target, donated=0)
    # Queries in the kernels' layout, weights of whole lanes, and choices before those of padding are cleared.
    limit = TEMP_LIMIT + 2 * math.prod(q.shape) * shape.dtype.itemsize + TOKENS * (1024 + context // 8)
    missed = pool_misses(program, *pool) + ["scratch"] * (program.memory.temp_size_in_bytes > limit)
    tile_bytes = indexer.tiles.kv * token_bytes
    nanoseconds = 1e9 * tile_bytes / target.bandwidth
    decode, prefill = (read_loops(target.dump, f"indexer_{name}") for name in ("decode", "prefill"))
    decode_tile, prefill_tile = decode.busiest().busiest(), max(prefill, key=lambda loop: loop.own_matmuls)
    decoded = decode_tile.bundles_of_one_trip
    # A loop whose number of trips is not known, of passes, holds a loop over the scores and nothing else.
    [passes] = [x for x in decode if len(x.inside) == 1 and x.trips is None and not x.matmuls]
    return {
        "seconds": program.seconds,
        "alias_MiB": program.alias_mib,
        "temp_MiB": program.temp_mib,
        "score_MiB": round(indexer.tiles.query * context * 4 / 2**20, 1),
        "tile_KiB": tile_bytes // 1024,
        "tile_ns": round(nanoseconds),
        "decode_bundles": decoded,
        "decode_GHz": round(decoded / nanoseconds, 2),
        "prefill_bundles": prefill_tile.bundles_of_one_trip,
        "left_out": decode_tile.num_unknown + prefill_tile.num_unknown,
        "pass_bundles": passes.inside[0].own_bundles,
        "missed": missed,
    }
