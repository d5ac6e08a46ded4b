"""Compile the GPU's indexer of sparse attention, and check what it takes.

Checked, for each model's shape, block size and longest context: no register is spilled, shared memory suffices, the
pool is updated in place through two layers, without a copy, and those are one command buffer, with longer chunks and of
decodes alone. `temp_MiB` is the scratch.
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
from pallas_kernels.implementations import INDEXER
from pallas_kernels.indexer import Indexer
from pallas_kernels.indexer.cases import CASES
from pallas_kernels.paged_attention import AttentionBatch

NUM_LAYERS, NUM_BLOCKS, SEQUENCES = 2, 4096, 64
CONTEXTS = {"": 8192, "-128k": 131072}
"""The longest contexts, by the ends of rows' names."""
STEPS = {"decodes": (64, False), "mixed": (2048, True)}
"""The tokens of each step, and whether there are longer chunks."""
NAMES = {"latent_write", "indexer_score_decodes", "indexer_score_chunks", "indexer_select"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--block-sizes", nargs="+", type=int, default=[16, 64])


def main(args: argparse.Namespace, target: Target) -> int:
    rows = run(jobs(args, target))
    unseen = NAMES - {name for row in rows for name in row.get("kernels", ())}
    return report(rows, cost_sheet(rows), LEGEND, args.json, target, *unseen)


def jobs(args: argparse.Namespace, target: Target) -> Iterator[tuple[Row, Callable[[], Row]]]:
    for name in args.cases:
        if reason := INDEXER["gpu"].refusal(CASES[name].shape()):
            print(f"{name}: {reason}", flush=True)
            continue
        ops = [Indexer(CASES[name].shape(block), "gpu") for block in args.block_sizes]
        for suffix, op, step in itertools.product(CONTEXTS, ops, STEPS):
            names = {"case": name + suffix, "kernel": step, "kv": "bfloat16", "block": op.shape.block_size}
            yield names, partial(compile_step, op, step, CONTEXTS[suffix], target)


def compile_step(op: Indexer, step: str, context: int, target: Target) -> Row:
    """Compile two layers of a step, each on the choice of the one before, and return the row."""
    arguments = abstract_arguments(op, *STEPS[step], context)

    def function(pool: Any, q_tnh: Any, k_th: Any, weights_tn: Any, batch: AttentionBatch) -> Any:
        chosen_tw = jnp.zeros((1, 1), jnp.int32)
        for layer in range(NUM_LAYERS):
            weights_tn = weights_tn + chosen_tw[..., :1]
            chosen_tw, pool = op(q_tnh, k_th, weights_tn, pool, batch, layer=layer, num_layers=NUM_LAYERS)
        return chosen_tw, pool

    program = compile_program(function, arguments, target, donated=0, as_engine=True)
    return step_figures(program, arguments[0].keys, is_graph=True)


def abstract_arguments(op: Indexer, t: int, has_tiles: bool, context: int) -> tuple[Any, ...]:
    """Return shapes of the arguments."""
    shape, s = op.shape, SEQUENCES
    tables_sm, tiles_i = (s, context // shape.block_size), (has_tiles * (s + t // op.tiles.query),)
    shapes = [(t,), tables_sm, (s,), (s,), (s,), (), tiles_i, tiles_i, ()]
    batch = AttentionBatch(*(jax.ShapeDtypeStruct(x, jnp.int32) for x in shapes))  # pyright: ignore[reportArgumentType]
    q, k = (jax.ShapeDtypeStruct((t, *x), shape.dtype) for x in ((shape.num_heads, shape.head_dim), (shape.head_dim,)))
    weights = jax.ShapeDtypeStruct((t, shape.num_heads), jnp.float32)
    return op.pool_spec(NUM_LAYERS, NUM_BLOCKS), q, k, weights, batch
