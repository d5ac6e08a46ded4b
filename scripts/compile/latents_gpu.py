"""Compile the GPU's attention over latents, and check what it takes.

Checked, for each model's shape, dtype of the pool and block size: no register is spilled, shared memory suffices, the
pool is updated in place through two layers, without a copy, and those are one command buffer, with longer chunks and of
decodes alone. At the end the cost sheet, as for attention. In sparse attention the scratch, `temp_MiB`, has the slots
of chosen positions.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from compile.attention_gpu import step_figures
from compile.gpu_cost import LEGEND, cost_sheet
from compile.program import Row, compile_program, report, run
from compile.target import Target
from pallas_kernels.implementations import LATENT_ATTENTION
from pallas_kernels.latent_attention import LatentAttention
from pallas_kernels.latent_attention.cases import CASES
from pallas_kernels.paged_attention import AttentionBatch

NUM_LAYERS, NUM_BLOCKS, MAX_CONTEXT, SEQUENCES = 2, 4096, 8192, 64
CHOSEN_CASES = {
    "deepseek-v3.2": ("deepseek-v3", 2048, MAX_CONTEXT),
    "deepseek-v3.2-128k": ("deepseek-v3", 2048, 131072),
    "glm-5": ("kimi-k2", 2048, MAX_CONTEXT),
    "glm-5-128k": ("kimi-k2", 2048, 131072),
}
"""Cases with chosen positions, by name: their heads and sizes, `top_k`, and the longest context."""
STEPS = {"decodes": (64, False), "mixed": (2048, True)}
"""The tokens of each step, and whether there are longer chunks."""
NAMES = {"latent_write", "latent_decode", "latent_prefill", "combine_splits"}
CHOSEN_NAMES = {"latent_write", "latent_chosen", "latent_chosen_split", "combine_splits"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = {*CASES, *CHOSEN_CASES}
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=names, metavar="CASE")
    parser.add_argument("--shares", nargs="+", type=int, default=[1, 8], help="devices that share out the heads")
    parser.add_argument("--kv", nargs="+", default=["bfloat16", "float8_e4m3fn"], metavar="DTYPE", help="of the pool")
    parser.add_argument("--block-sizes", nargs="+", type=int, default=[16, 64])


def main(args: argparse.Namespace, target: Target) -> int:
    rows = run(jobs(args, target))
    wanted = set[str]().union(*(CHOSEN_NAMES if name in CHOSEN_CASES else NAMES for name in args.cases))
    unseen = wanted - {name for row in rows for name in row.get("kernels", ())}
    return report(rows, cost_sheet(rows), LEGEND, args.json, target, *unseen)


def jobs(args: argparse.Namespace, target: Target) -> Iterator[tuple[Row, Callable[[], Row]]]:
    for name, share in itertools.product(args.cases, args.shares):
        base, top_k, context = CHOSEN_CASES.get(name, (name, None, MAX_CONTEXT))
        num_heads, rest = divmod(CASES[base].num_heads, share)
        case = CASES[base]._replace(num_heads=num_heads)
        refusal = LATENT_ATTENTION["gpu"].refusal(case.shape(top_k=top_k))
        reason = f"{share} devices cannot share out its heads" if rest else refusal
        if reason:
            print(f"{name} on {share} devices: {reason}", flush=True)
            continue
        # How a pool is read does not depend on the number of heads.
        kv_dtypes = args.kv if share == args.shares[0] else args.kv[:1]
        for kv, block, step in itertools.product(kv_dtypes, args.block_sizes, STEPS):
            op = LatentAttention(case.shape(block, kv_dtype=getattr(jnp, kv), top_k=top_k), "gpu")
            names = {"case": f"{name}/{share}", "kernel": step, "kv": kv, "block": block}
            yield names, partial(compile_step, op, step, context, target)


def compile_step(op: LatentAttention, step: str, context: int, target: Target) -> Row:
    """Compile two layers of a step, each on the output of the one before, and return the row."""
    arguments = abstract_arguments(op, *STEPS[step], context)

    def function(pool: Any, q_tnh: Any, latents_th: Any, batch: AttentionBatch, chosen_ltw: Any) -> Any:
        for layer in range(NUM_LAYERS):
            settings: dict[str, Any] = {"layer": layer, "num_layers": NUM_LAYERS, "scale": op.shape.key_dim**-0.5}
            settings["chosen_tw"] = None if chosen_ltw is None else chosen_ltw[layer]
            out_tnl, pool = op(q_tnh, latents_th, pool, batch, **settings)
            q_tnh = jnp.concatenate([out_tnl, q_tnh[..., op.shape.latent_dim :]], axis=-1)
        return q_tnh, pool

    program = compile_program(function, arguments, target, donated=0, as_engine=True)
    return step_figures(program, arguments[0].latents, is_graph=True)


def abstract_arguments(op: LatentAttention, t: int, has_tiles: bool, context: int) -> tuple[Any, ...]:
    """Return shapes of the arguments."""
    shape, s = op.shape, SEQUENCES
    tables_sm, tiles_i = (s, context // shape.block_size), (has_tiles * (s + t // op.tiles.query),)
    shapes = [(t,), tables_sm, (s,), (s,), (s,), (), tiles_i, tiles_i, ()]
    batch = AttentionBatch(*(jax.ShapeDtypeStruct(x, jnp.int32) for x in shapes))  # pyright: ignore[reportArgumentType]
    q, latents = (
        jax.ShapeDtypeStruct((t, *x), shape.dtype) for x in ((shape.num_heads, shape.key_dim), (shape.key_dim,))
    )
    chosen = (
        None
        if shape.top_k is None
        else tuple(jax.ShapeDtypeStruct((t, context // 32), jnp.int32) for _ in range(NUM_LAYERS))
    )
    return op.pool_spec(NUM_LAYERS, NUM_BLOCKS), q, latents, batch, chosen
