"""Compile the GPU attention kernels for an H100 that is not there, with the real ptxas, and check what they take.

Needs jax-cuda13-plugin, jax-cuda13-pjrt and nvidia-cuda-nvcc (ptxas 13.3 or later) in the environment, and no GPU.
Checked, for each model's shape, kernel, dtype of the pool and block size: no register is spilled, shared memory
suffices, the pool is updated in place through two layers, without a copy, and those are one command buffer.

At the end the cost sheet: of each kernel, from its PTX, the bytes, matmuls and special functions of an iteration of its
main loop, and the time that each takes at the limits of the chip. These are static figures; nothing runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.check.compilers import compiler_environment
from jaxllm.execution.hardware import HARDWARE

os.environ |= compiler_environment(HARDWARE["h100"], dict(os.environ))
os.environ |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_PTX": "1"}

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from compile.gpu_compiler import find_device
from compile.gpu_row import compile_row, report
from pallas_kernels.implementations import PAGED_ATTENTION
from pallas_kernels.paged_attention import AttentionBatch, PagedAttention, Rope
from pallas_kernels.paged_attention.cases import CASES, Case
from pallas_kernels.paged_attention.gpu.decode import decode_attention
from pallas_kernels.paged_attention.gpu.prefill import prefill_attention
from pallas_kernels.paged_attention.gpu.write import rotate_and_write

NUM_LAYERS, NUM_BLOCKS, MAX_CONTEXT = 2, 4096, 8192


class Arguments(NamedTuple):
    """The op's arguments, without the static ones."""

    pool: Any
    q: Any
    k: Any
    v: Any
    batch: Any
    rope: Any
    window: Any
    sinks_n: Any


class Kernel(NamedTuple):
    """A kernel to compile: the tokens and sequences of its step, and its call for one layer."""

    tokens: int
    sequences: int
    call: Callable[[PagedAttention, Arguments, dict[str, Any]], Any]
    """A function of the op, its arguments, and the settings: layer, number of layers, and attention's own."""
    names: tuple[str, ...]
    """The kernels that ptxas must have compiled."""
    has_row_ends: bool = False
    """True for a step whose rows may see past their own positions."""


def write(_: PagedAttention, x: Arguments, settings: dict[str, Any]) -> Any:
    """Rotate q and k, and write k and v."""
    place = {name: settings[name] for name in ("layer", "num_layers")}
    num_rows = x.batch.context_lens_s.shape[0]
    return rotate_and_write(x.q, x.k, x.v, x.pool, x.batch.slots_t, x.rope, num_rows=num_rows, **place)


def decode(op: PagedAttention, x: Arguments, settings: dict[str, Any]) -> Any:
    """Attend the decode rows."""
    shape = op.shape
    q_rkgh = x.q.reshape(len(x.q), shape.num_kv_heads, shape.group, shape.head_dim)
    padded_rkgh = jnp.pad(q_rkgh, ((0, 0), (0, 0), (0, -shape.group % 8), (0, 0)))
    out_tc = jax.new_ref(x.q.reshape(len(x.q), -1))
    decode_attention(padded_rkgh, x.pool, x.batch, out_tc, **settings)
    return jax.freeze(out_tc)


def prefill(op: PagedAttention, x: Arguments, settings: dict[str, Any]) -> Any:
    """Attend the longer chunks."""
    qo_tc = jax.new_ref(x.q.reshape(len(x.q), -1))
    prefill_attention(qo_tc, x.pool, x.batch, tiles=op.tiles, **settings)
    return jax.freeze(qo_tc)


def whole(op: PagedAttention, x: Arguments, settings: dict[str, Any]) -> Any:
    """Run the op in every layer, each on the output of the one before."""
    q, pool = x.q, x.pool
    for layer in range(NUM_LAYERS):
        own: dict[str, Any] = settings | {"layer": layer}
        q, pool = op(q, x.k, x.v, pool, x.batch, rope=x.rope, **own)
    return q, pool


KERNELS = {
    "write": Kernel(512, 64, write, ("kv_write",)),
    "decode": Kernel(64, 64, decode, ("paged_decode", "combine_splits")),
    "prefill": Kernel(2048, 64, prefill, ("paged_prefill",)),
    "prefill-row-ends": Kernel(2048, 64, prefill, ("paged_prefill",), has_row_ends=True),
    "whole": Kernel(512, 64, whole, ()),
}


def main() -> int:
    """Compile, check, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS, metavar="KERNEL")
    parser.add_argument("--kv", nargs="+", default=["bfloat16", "float8_e4m3fn"], metavar="DTYPE", help="of the pool")
    parser.add_argument("--block-sizes", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    sharding = find_device()
    rows = []
    for name in args.cases:
        if reason := PAGED_ATTENTION["gpu"].refusal(CASES[name].shape()):
            print(f"{name} runs in plain XLA: {reason}", flush=True)
            continue
        for kernel in args.kernels:
            for kv_dtype in args.kv:
                for block_size in args.block_sizes:
                    row = {"case": name, "kernel": kernel, "kv": kv_dtype, "block": block_size}
                    row |= compile_kernel(CASES[name], KERNELS[kernel], kv_dtype, block_size, sharding)
                    rows.append(row)
                    print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    return report(rows, {name for kernel in args.kernels for name in KERNELS[kernel].names}, args.json)


def compile_kernel(
    case: Case, kernel: Kernel, kv_dtype: str, block_size: int, sharding: NamedSharding
) -> dict[str, Any]:
    """Return what the compilers say of a kernel, and what it misses of what is wanted."""
    op = PagedAttention(case.shape(block_size, kv_dtype=getattr(jnp, kv_dtype)), "gpu")
    arguments = abstract_arguments(op, case, kernel)
    settings: dict[str, Any] = {
        "layer": 1,
        "num_layers": NUM_LAYERS,
        "scale": op.shape.head_dim**-0.5,
        "soft_cap": case.soft_cap,
    }

    def function(*flat: Any) -> Any:
        x = Arguments(*flat)
        own = settings | {"window": x.window, "sinks_n": x.sinks_n}
        return kernel.call(op, x, settings if kernel.call is write else own)

    updates_pool = kernel.call in (write, whole)
    jitted = jax.jit(function, donate_argnums=0 if updates_pool else (), in_shardings=sharding, out_shardings=sharding)
    pool = arguments.pool.kv if updates_pool else None
    return compile_row(jitted, arguments, sharding, pool=pool, is_graph=kernel.call is whole)


def abstract_arguments(op: PagedAttention, case: Case, kernel: Kernel) -> Arguments:
    """Return shapes of the arguments."""
    shape, t, s = op.shape, kernel.tokens, kernel.sequences
    q, kv = (jax.ShapeDtypeStruct((t, n, shape.head_dim), shape.dtype) for n in (shape.num_heads, shape.num_kv_heads))
    num_tiles = s + t // op.tiles.query
    tables_sm, tiles_i = (s, MAX_CONTEXT // shape.block_size), (num_tiles,)
    shapes = [(t,), tables_sm, (s,), (s,), (s,), (), tiles_i, tiles_i, (), *[(t,)] * kernel.has_row_ends]
    batch = AttentionBatch(*(jax.ShapeDtypeStruct(x, jnp.int32) for x in shapes))  # pyright: ignore[reportArgumentType]
    sinks = jax.ShapeDtypeStruct((shape.num_heads,), jnp.float32) if case.has_sinks else None
    window = jax.ShapeDtypeStruct((), jnp.int32)
    table: Any = jax.ShapeDtypeStruct((t, shape.head_dim // 2), jnp.float32)
    return Arguments(op.pool_spec(NUM_LAYERS, NUM_BLOCKS), q, kv, kv, batch, Rope(table, table), window, sinks)


if __name__ == "__main__":
    sys.exit(main())
