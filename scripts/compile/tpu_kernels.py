"""Compile the TPU attention kernels for TPUs that are not there, with libtpu, and count what they cost.

Attention is over keys and values, or over latents.

It checks, for each model's shape and each step's, that the pool is updated in place and the scratch beside it is small.
It counts, from the compiler's own listing, the bundles (instructions of the VLIW core) that a full KV tile takes,
beside the time that its bytes take at the memory's nominal bandwidth. A clock above `GHz` makes the kernel wait for
memory. These are static figures; nothing runs.
"""

# ruff: noqa: E402  libtpu reads the environment when it is loaded

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.check.compilers import compiler_environment
from jaxllm.execution.hardware import HARDWARE, find_topology

DUMP = Path(tempfile.mkdtemp(prefix="tpu-kernels-"))
os.environ |= compiler_environment(HARDWARE["v6e"], dict(os.environ))
os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={DUMP} --xla_jf_dump_llo_text=true"

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from lib.sheet import print_sheet, write_rows

from compile.tpu_compiler import BANDWIDTH, find_device
from compile.tpu_listing import clear, read_loops
from pallas_kernels import latent_attention, paged_attention
from pallas_kernels.latent_attention.cases import CASES as CASES_OF_LATENTS
from pallas_kernels.latent_attention.layout import row_columns
from pallas_kernels.paged_attention import AttentionBatch, PoolAttention
from pallas_kernels.paged_attention.cases import CASES as CASES_OF_KEYS
from pallas_kernels.paged_attention.tpu.prefill import Cut

STEPS = {"decode": (64, 64), "prefill": (2048, 256), "mixed": (512, 256), "row-ends": (2048, 256)}
"""Steps by name: how many tokens and sequences they have."""
WITH_ROW_ENDS, ROW_ENDS_CASE = "row-ends", "llama-3-8b"
"""The step whose rows may see past their own positions, and the case that it is compiled for."""
CASES: dict[str, dict[str, Any]] = {
    "keys": CASES_OF_KEYS,
    "latents": {name: case for name, case in CASES_OF_LATENTS.items() if name != "tiny"}
    | {"kimi-k2-over-8": CASES_OF_LATENTS["kimi-k2"]._replace(num_heads=8)}
    | {"glm-4.7-flash-over-4": CASES_OF_LATENTS["glm-4.7-flash"]._replace(num_heads=5)},
}
"""The cases by what is attended over; of latents two as well of which several devices have a part of the heads each."""
NUM_LAYERS, POOL_BYTES, BLOCK_SIZE, TABLE = 4, 2**30, 64, 256
TEMP_LIMIT = 128 * 2**20
"""Queries, new keys and values and the output in the kernels' layouts, of 2,048 tokens at most 32 MiB each."""
SHEET = (
    "case", "step", "kv", "tile_KiB", "tile_ns", "tile_bundles", "GHz",
    "block_rows", "block_bundles", "edge_bundles", "half_bundles", "flops_per_bundle",
)  # fmt: skip
LEGEND = """
tile: of one sequence's KV in decode. Its bytes take tile_ns at HBM's nominal bandwidth; its bundles, one a cycle, take
less at a clock above GHz. block: of query rows in prefill, with a KV tile of which nothing is masked; edge: where some
is; half: where all of the tile's second half is."""


def main() -> int:
    """Compile, check, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v6e:1x1", help="v5e:1x1, v6e:1x1 or tpu7x:1x1x1 (default: %(default)s)")
    parser.add_argument("--over", default="keys", choices=CASES, help="what is attended over (default: %(default)s)")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="of the models' shapes (default: all)")
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=STEPS, metavar="STEP")
    parser.add_argument(
        "--kv",
        nargs="+",
        metavar="DTYPE",
        help="of the pool (default: bfloat16; in mixed steps float8 too, once float32)",
    )
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    sharding = find_device(args.topology)
    rows = []
    try:
        for case, step, dtype, kv_dtype in selection(args.over, args.cases, args.steps, args.kv):
            row = compile_step(args.over, case, step, dtype, kv_dtype, sharding, args.topology)
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
    over: str, cases: Sequence[str] | None, steps: Sequence[str], kv_dtypes: Sequence[str] | None
) -> Iterator[tuple[str, str, str, str]]:
    """Yield case, step, dtype and dtype of the pool."""
    for case in cases or CASES[over]:
        for step in steps:
            if step == WITH_ROW_ENDS and case != ROW_ENDS_CASE:
                continue
            # Every step holds all kernels: the rarer pools are compiled once.
            rare = ["float8_e4m3fn", *["float32"] * (case == "llama-3.2-1b")] * (step == "mixed")
            for kv_dtype in kv_dtypes or ("bfloat16", *rare):
                yield case, step, "float32" if kv_dtype == "float32" else "bfloat16", kv_dtype


class Program(NamedTuple):
    """A step's attention, as a function of arrays, and what a kernel reads and computes of it."""

    name: str
    """What the names of its kernels begin with."""
    attention: PoolAttention
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """The arrays' shapes, the pool's first."""
    token_bytes: int
    """Bytes of a token in the pool."""
    block_rows: int
    """The rows of queries that prefill attends together."""
    pair_flops: int
    """What a row computes for a token."""
    temp_limit: int = TEMP_LIMIT


def compile_step(
    over: str, name: str, step: str, dtype: str, kv_dtype: str, sharding: NamedSharding, topology: str
) -> dict[str, Any]:
    """Return a row: what the compiler says, and what it misses of what is wanted."""
    make = {"keys": over_keys, "latents": over_latents}[over]
    shape = CASES[over][name].shape(BLOCK_SIZE, getattr(jnp, dtype), getattr(jnp, kv_dtype))
    program = make(name, shape, step, find_topology(topology)[0].device_kind)
    clear(DUMP)
    started = time.monotonic()
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        jitted = jax.jit(program.function, donate_argnums=0, in_shardings=sharding, out_shardings=sharding)
        try:
            compiled = jitted.lower(*program.arguments).compile()
        except jax.errors.JaxRuntimeError as error:
            return {"case": name, "step": step, "kv": kv_dtype, "missed": str(error)[:300]}
    seconds = time.monotonic() - started
    memory: Any = compiled.memory_analysis()
    pool_bytes = sum(x.size * x.dtype.itemsize for x in program.arguments[0])
    missed = []
    if memory.alias_size_in_bytes < pool_bytes:
        missed.append("the pool is copied")
    if memory.temp_size_in_bytes > program.temp_limit:
        missed.append("scratch")
    row = {
        "case": name,
        "step": step,
        "kv": kv_dtype,
        "tiles": "/".join(map(str, program.attention.tiles)),
        "seconds": round(seconds, 1),
        "alias_MiB": round(memory.alias_size_in_bytes / 2**20, 1),
        "temp_MiB": round(memory.temp_size_in_bytes / 2**20, 2),
    }
    row |= decode_cost(program, BANDWIDTH[topology.partition(":")[0]])
    row |= prefill_cost(program)
    return row | {"missed": missed}


def over_keys(name: str, shape: paged_attention.AttentionShape, step: str, kind: str) -> Program:
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
    return Program(
        "paged",
        attention,
        function,
        (abstract_pool(attention, token_bytes), q, kv, kv, batch, SCALAR, SCALAR, sinks),
        token_bytes,
        block_rows=cut.block_heads * cut.block_tokens * shape.group,
        pair_flops=4 * shape.head_dim,
    )


def over_latents(_name: str, shape: latent_attention.LatentShape, step: str, kind: str) -> Program:
    """Return the attention over latents."""
    attention, _ = latent_attention.pick(shape, "tpu", architecture=kind)

    def function(pool: Any, q: Any, latents: Any, batch: Any, layer: Any) -> Any:
        return attention(q, latents, pool, batch, layer=layer, num_layers=NUM_LAYERS, scale=shape.key_dim**-0.5)

    t, columns = STEPS[step][0], row_columns(shape)
    token_bytes = columns * shape.kv_dtype.itemsize
    q, latents = (jax.ShapeDtypeStruct((t, *heads, shape.key_dim), shape.dtype) for heads in ((shape.num_heads,), ()))
    batch = abstract_batch(attention, *STEPS[step], has_row_ends=False)
    cut = Cut.of(attention.tiles.query, shape.num_heads, 1)
    return Program(
        "latent",
        attention,
        function,
        (abstract_pool(attention, token_bytes), q, latents, batch, SCALAR),
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
    """Return the shapes of a batch of so many tokens and sequences."""
    num_tiles = s + t // attention.tiles.query
    shapes = [(t,), (s, TABLE), (s,), (s,), (s,), (), (num_tiles,), (num_tiles,), (), *[(t,)] * has_row_ends]
    specs: list[Any] = [jax.ShapeDtypeStruct(x, jnp.int32) for x in shapes]
    return AttentionBatch(*specs)


def decode_cost(program: Program, bandwidth: float) -> dict[str, Any]:
    """Return bundles and bytes of a full KV tile of one sequence.

    Straight code counts whole, so the once-a-sequence parts are in it; of the inner loops those of a fixed number of
    trips, over heads for instance, run for a full tile.
    """
    kernel = read_loops(DUMP, f"{program.name}_decode")
    tile_loop = kernel.busiest().busiest()  # of the loop over sequences that over tiles
    bundles = tile_loop.bundles_of_one_trip
    tile_bytes = program.attention.tiles.kv * program.token_bytes
    nanoseconds = 1e9 * tile_bytes / bandwidth
    return {
        "tile_KiB": tile_bytes // 1024,
        "tile_bundles": bundles,
        "tile_ns": round(nanoseconds),
        "GHz": round(bundles / nanoseconds, 2),
    }


def prefill_cost(program: Program) -> dict[str, Any]:
    """Return the bundles that a block of rows takes for a KV tile, and its flops per bundle where nothing is masked."""
    loop = max(read_loops(DUMP, f"{program.name}_prefill"), key=lambda loop: loop.own_matmuls)
    flops = program.pair_flops * program.block_rows * program.attention.tiles.kv
    rest = loop.own_bundles - sum(map(len, loop.stretches))
    whole, edge, half = (rest + len(stretch) for stretch in loop.stretches)  # in the order of the source
    return {
        "block_rows": program.block_rows,
        "block_bundles": whole,
        "edge_bundles": edge,
        "half_bundles": half,
        "flops_per_bundle": round(flops / whole),
    }


if __name__ == "__main__":
    sys.exit(main())
