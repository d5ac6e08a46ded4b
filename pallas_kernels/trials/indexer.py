"""Ragged steps of the indexer of sparse attention, over a poisoned pool, and the reference's answer.

Queries, keys and weights are whole numbers, so that sums are exact in any order, and many scores are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.indexer import Indexer, IndexerPool
from pallas_kernels.indexer.reference import reference_indexer
from pallas_kernels.paged_attention import AttentionBatch

from .attention import LAYER, NUM_LAYERS, STEPS, Chunks, as_engine, deal_blocks, pad_batch
from .trial import Call, Outcome, Trial, describe, is_same

_MOST_WEIGHT = 600
"""More than bfloat16 holds exactly."""


class Step(NamedTuple):
    """The arguments of one call."""

    q: Any
    k: Any
    weights: Any
    pool: IndexerPool
    batch: AttentionBatch


def make(
    seed: int,
    chunks: Chunks,
    op: Indexer,
    *,
    padding: int | None = 3,
    row_alignment: int = 1,
    is_whole: bool = True,
) -> Step:
    """Return a step of (context length, chunk length) sequences, decodes first; unused slots of the pool are NaN.

    `padding` is as for `attention.make_step`. Numbers are normally distributed if they are not whole.
    """
    rng, shape = np.random.default_rng(seed), op.shape
    o, h = shape.block_size, shape.head_dim
    blocks, num_blocks = deal_blocks(rng, chunks, o)
    layout = {"block_size": o, "query_tile": op.tiles.query, "row_alignment": row_alignment}
    batch = pad_batch(chunks, blocks, padding, **layout)

    def numbers(*dims: int) -> np.ndarray:
        drawn = rng.integers(-2, 3, dims) if is_whole else rng.standard_normal(dims)
        return drawn.astype(np.float32)

    pool = np.full((NUM_LAYERS * num_blocks, o, h), np.nan, np.float32)
    for (length, chunk), owned in zip(chunks, blocks, strict=True):
        for position in range(length - chunk):
            pool[LAYER * num_blocks + owned[position // o], position % o] = numbers(h)
    t, n = len(batch.slots_t), shape.num_heads
    weights = rng.integers(-_MOST_WEIGHT, _MOST_WEIGHT, (t, n)) if is_whole else rng.standard_normal((t, n))
    to = partial(jnp.asarray, dtype=shape.dtype)
    filled = IndexerPool(jnp.asarray(pool, shape.kv_dtype))
    batch = jax.tree.map(jnp.asarray, batch)
    return Step(to(numbers(t, n, h)), to(numbers(t, h)), jnp.asarray(weights, jnp.float32), filled, batch)


def reference(step: Step, op: Indexer) -> tuple[np.ndarray, IndexerPool]:
    """Run the reference; the pool is in the pool's dtype."""
    q, k, weights = (np.asarray(x) for x in step[:3])
    fixed = {"layer": LAYER, "num_layers": NUM_LAYERS, "top_k": op.shape.top_k}
    return reference_indexer(q, k, weights, IndexerPool(np.asarray(step.pool.keys)), step.batch, **fixed)


def indexer_trials(op: Indexer) -> Iterator[Trial]:
    """Yield the trials of an op."""
    for name, chunks in STEPS.items():
        yield Trial("indexer", op.implementation, describe(op.shape), name, partial(_make_call, op, chunks))


def _make_call(op: Indexer, chunks: Chunks) -> Call:
    step = make(len(chunks), chunks, op, row_alignment=op.row_alignment, padding=None)
    step = step._replace(batch=as_engine(op, chunks, step.batch))

    def function(q: Any, k: Any, weights: Any, pool: Any, batch: Any, layer: Any) -> Any:
        return op(q, k, weights, pool, batch, layer=layer, num_layers=NUM_LAYERS)

    def compare(result: Any) -> Outcome:
        chosen, pool = result
        expected, expected_pool = reference(step, op)
        null_block = LAYER * (len(expected_pool.keys) // NUM_LAYERS)
        held = held_pool(op, IndexerPool(jnp.asarray(expected_pool.keys)))
        kept = (np.delete(np.asarray(x.keys), null_block, axis=0) for x in (pool, held))
        missed = () if is_same(*kept) else ("the pool differs",)
        return Outcome(float((np.asarray(chosen) != expected).sum()), 0.0, missed)

    return Call(function, (*step[:3], held_pool(op, step.pool), step.batch, jnp.int32(LAYER)), compare)


def held_pool(op: Indexer, pool: IndexerPool) -> IndexerPool:
    """Return a pool in the form in which the op's implementation holds it."""
    [spec] = op.pool_spec(NUM_LAYERS, len(pool.keys) // NUM_LAYERS)
    same = pool.keys.dtype == spec.dtype
    return pool if same else IndexerPool(lax.bitcast_convert_type(pool.keys, spec.dtype))
