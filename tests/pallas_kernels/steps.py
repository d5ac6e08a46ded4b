"""Ragged steps over a poisoned pool, for every implementation of paged attention, and the reference's answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import AttentionBatch, AttentionShape, FusedPool, SplitPool
from pallas_kernels.paged_attention.reference import reference_paged_attention

NUM_LAYERS, LAYER = 3, 1
NO_WINDOW = 2**30
SCALE = 0.25


class Step(NamedTuple):
    """The arguments of one call, and the rows that count."""

    q: Any
    k: Any
    v: Any
    pool: SplitPool
    batch: AttentionBatch
    rows: np.ndarray
    """Rows of t that are no padding."""


def make_step(
    rng: np.random.Generator,
    chunks: Sequence[tuple[int, int]],
    shape: AttentionShape,
    *,
    query_tile: int,
    row_alignment: int = 1,
    padding: int = 3,
) -> Step:
    """Return a step of (context length, chunk length) sequences, decodes first; unused slots of the pool are NaN.

    `padding` sequences and at least as many rows are padding.
    """
    o, k, h = shape.block_size, shape.num_kv_heads, shape.head_dim
    blocks_each = [-(-length // o) for length, _ in chunks]
    num_blocks = sum(blocks_each) + 2
    ids = rng.permutation(np.arange(1, num_blocks)).tolist()
    tables = np.zeros((len(chunks) + padding, max(blocks_each) + 1), np.int32)
    keys, values = (np.full((NUM_LAYERS * num_blocks, k, *block), np.nan, np.float32) for block in ((h, o), (o, h)))
    starts, slots, row = [], {}, 0
    for i, (length, chunk) in enumerate(chunks):
        tables[i, : blocks_each[i]] = [ids.pop() for _ in range(blocks_each[i])]
        slot = [int(tables[i, p // o]) * o + p % o for p in range(length)]
        for p in slot[: length - chunk]:
            block = LAYER * num_blocks + p // o
            keys[block, :, :, p % o], values[block, :, p % o] = rng.standard_normal((2, k, h))
        starts.append(row if chunk == 1 else -(-row // row_alignment) * row_alignment)
        slots |= dict(enumerate(slot[length - chunk :], starts[-1]))
        row = starts[-1] + chunk
    t = -(-(row + padding) // row_alignment) * row_alignment
    tiles = [
        (i, first)
        for i, (start, (_, chunk)) in enumerate(zip(starts, chunks, strict=True))
        for first in range(start, start + chunk, query_tile)
        if chunk > 1
    ]
    ints = partial(np.array, dtype=np.int32)
    batch = AttentionBatch(
        slots_t=ints([slots.get(row, 0) for row in range(t)]),
        block_tables_sm=tables,
        context_lens_s=ints([length for length, _ in chunks] + [0] * padding),
        query_starts_s=ints(starts + [row] * padding),
        query_ends_s=ints([start + chunk for start, (_, chunk) in zip(starts, chunks, strict=True)] + [row] * padding),
        num_decodes=ints(sum(chunk == 1 for _, chunk in chunks)),
        tile_seqs_i=ints([seq for seq, _ in tiles] + [0]),
        tile_rows_i=ints([first for _, first in tiles] + [0]),
        num_tiles=ints(len(tiles)),
    )
    q, key, value = (rng.standard_normal((t, heads, h)).astype(np.float32) for heads in (shape.num_heads, k, k))
    to, to_kv = partial(jnp.asarray, dtype=shape.dtype), partial(jnp.asarray, dtype=shape.kv_dtype)
    return Step(
        to(q), to(key), to(value), SplitPool(to_kv(keys), to_kv(values)), AttentionBatch(*map(jnp.asarray, batch)),
        np.array(sorted(slots)),
    )  # fmt: skip


def fused(pool: SplitPool) -> FusedPool:
    """Return the pool in the kernels' layout."""
    return FusedPool(jnp.concatenate([pool.k.swapaxes(-1, -2), pool.v], axis=-1))


def reference(step: Step, **settings: Any) -> tuple[np.ndarray, SplitPool]:
    """Run the reference in float32 on the values as the pool holds them."""
    kv_dtype = step.pool.k.dtype
    arrays = (step.q, step.k.astype(kv_dtype), step.v.astype(kv_dtype), *step.pool)
    q, k, v, *pool = (np.asarray(x, np.float32) for x in arrays)
    fixed = {"layer": LAYER, "num_layers": NUM_LAYERS, "scale": SCALE}
    settings = {"window": NO_WINDOW} | fixed | settings
    return reference_paged_attention(q, k, v, SplitPool(*pool), step.batch, **settings)
