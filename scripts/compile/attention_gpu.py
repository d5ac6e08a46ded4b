"""Compile the GPU's attention kernels, Hopper's or those for all from Ampere on, and check what they take.

Checked, for each model's shape, kernel, dtype of the pool and block size: no register is spilled, matmuls run without
waits between them, shared memory suffices, the pool is updated in place through two layers, without a copy, and those
are one command buffer.

At the end, for Hopper, the cost sheet: of each kernel, from its PTX, the bytes, matmuls and special functions of an
iteration of its main loop, and the time that each takes at the limits of the chip.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from compile.gpu_cost import LEGEND, cost_sheet
from compile.program import (
    Program,
    Row,
    compile_program,
    graph_misses,
    kernel_figures,
    pool_misses,
    ptxas_misses,
    report,
    run,
)
from compile.target import Target
from pallas_kernels.paged_attention import AttentionBatch, PagedAttention, Rope, gpu, gpu_mma, pick, to_pool_dtype
from pallas_kernels.paged_attention.cases import CASES, Case
from pallas_kernels.paged_attention.gpu import handover
from pallas_kernels.paged_attention.gpu.common import decode_queries

NUM_LAYERS, NUM_BLOCKS, MAX_CONTEXT = 2, 4096, 8192
MODULES = {"gpu": gpu, "gpu_mma": gpu_mma}


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


def write(op: PagedAttention, x: Arguments, settings: dict[str, Any]) -> Any:
    """Rotate q and k, and write k and v."""
    layer = {name: settings[name] for name in ("layer", "num_layers")}
    layer["num_rows"] = x.batch.context_lens_s.shape[0]
    if op.implementation == "gpu_mma" and op.shape.kv_dtype != op.shape.dtype:
        k, v = (to_pool_dtype(new, op.shape.kv_dtype) for new in (x.k, x.v))
        x = x._replace(k=k, v=v, rope=None)
    return MODULES[op.implementation].rotate_and_write(x.q, x.k, x.v, x.pool, x.batch.slots_t, x.rope, **layer)


def decode(op: PagedAttention, x: Arguments, settings: dict[str, Any]) -> Any:
    """Attend the decode rows."""
    shape = op.shape
    q_rkgh = x.q.reshape(len(x.q), shape.num_kv_heads, shape.group, shape.head_dim)
    multiple = gpu_mma.MMA_ROWS if op.implementation == "gpu_mma" else 8
    padded_rkgh = jnp.pad(q_rkgh, ((0, 0), (0, 0), (0, -shape.group % multiple), (0, 0)))
    out_tc = jax.new_ref(x.q.reshape(len(x.q), -1))
    if op.implementation == "gpu":
        padded_rkgh = decode_queries(padded_rkgh, x.pool.kv.dtype)
    MODULES[op.implementation].decode_attention(padded_rkgh, x.pool, x.batch, out_tc, **settings)
    return jax.freeze(out_tc)


def prefill(op: PagedAttention, x: Arguments, settings: dict[str, Any]) -> Any:
    """Attend the longer chunks."""
    qo_tc = jax.new_ref(x.q.reshape(len(x.q), -1))
    MODULES[op.implementation].prefill_attention(qo_tc, x.pool, x.batch, tiles=op.tiles, **settings)
    return jax.freeze(qo_tc)


def whole(op: PagedAttention, x: Arguments, settings: dict[str, Any]) -> Any:
    """Run the op in every layer, each on the output of the one before."""
    q, pool = x.q, x.pool
    for layer in range(NUM_LAYERS):
        settings = settings | {"layer": layer}
        q, pool = op(q, x.k, x.v, pool, x.batch, rope=x.rope, **settings)
    return q, pool


KERNELS = {
    "write": Kernel(512, 64, write, ("kv_write",)),
    "decode": Kernel(64, 64, decode, ("paged_decode", "combine_splits")),
    "prefill": Kernel(2048, 64, prefill, ("paged_prefill",)),
    "prefill-row-ends": Kernel(2048, 64, prefill, ("paged_prefill",), has_row_ends=True),
    "whole": Kernel(512, 64, whole, ()),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS, metavar="KERNEL")
    parser.add_argument("--dtype", default="bfloat16", help="of queries, new keys and values, and the output")
    parser.add_argument("--kv", nargs="+", metavar="DTYPE", help="of the pool; by default --dtype and float8_e4m3fn")
    parser.add_argument("--block-sizes", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--next", action="store_true", help="compile the successors that handover.py describes")


def main(args: argparse.Namespace, target: Target) -> int:
    handover.CHOSEN = handover.NEXT if args.next else handover.PROVEN
    rows = run(jobs(args, target))
    names = {name for kernel in args.kernels for name in KERNELS[kernel].names}
    unseen = names - {name for row in rows for name in row.get("kernels", ())}
    sheet = cost_sheet(rows)
    legend = LEGEND if any("bound" in line for line in sheet) else ""
    return report(rows, sheet, legend, args.json, target, *unseen)


def jobs(args: argparse.Namespace, target: Target) -> Iterator[tuple[Row, Callable[[], Row]]]:
    pools = args.kv or [args.dtype, "float8_e4m3fn"]
    for name in args.cases:
        for kernel, kv, block in itertools.product(args.kernels, pools, args.block_sizes):
            shape = CASES[name].shape(block, dtype=getattr(jnp, args.dtype), kv_dtype=getattr(jnp, kv))
            op, reason = pick(shape, "gpu", architecture=target.architecture)
            if reason:
                print(f"{name}, {kernel}, {kv}, blocks of {block}, runs in plain XLA: {reason}", flush=True)
                continue
            names = {"case": name, "kernel": kernel, "kv": kv, "block": block}
            yield names, partial(compile_kernel, CASES[name], KERNELS[kernel], op, target)


def compile_kernel(case: Case, kernel: Kernel, op: PagedAttention, target: Target) -> Row:
    """Compile a kernel and return its row."""
    arguments = abstract_arguments(op, case, kernel)
    settings: dict[str, Any] = {
        "layer": 1,
        "num_layers": NUM_LAYERS,
        "scale": op.shape.head_dim**-0.5,
        "soft_cap": case.soft_cap,
    }

    def function(*flat: Any) -> Any:
        x = Arguments(*flat)
        masks = {"window": x.window, "sinks_n": x.sinks_n}
        return kernel.call(op, x, settings if kernel.call is write else settings | masks)

    pools = [arguments.pool.kv] if kernel.call in (write, whole) else []
    program = compile_program(function, arguments, target, donated=0 if pools else (), as_engine=True)
    with_costs = op.implementation == "gpu"
    return step_figures(program, *pools, is_graph=kernel.call is whole, with_costs=with_costs)


def step_figures(program: Program, *pools: Any, is_graph: bool, with_costs: bool = True) -> Row:
    """Return a row: the program's figures, and failed checks; `is_graph` if it should be one command buffer."""
    missed = ptxas_misses(program) + (graph_misses(program) if is_graph else [])
    if "wgmma.mma_async instructions are serialized" in program.messages:
        missed.append("ptxas waits after each matmul")
    missed += pool_misses(program, *pools, makers=r"copy|fusion|dynamic-\S*")
    return {
        "kernels": kernel_figures(program, with_costs=with_costs),
        "smem_KiB": round(max(program.smem.values()) / 1024, 1),
        "launches": max(1, sum("kCommandBuffer" not in line for line in program.thunks)),
        "temp_MiB": program.temp_mib,
        "seconds": program.seconds,
        "missed": missed,
    }


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
