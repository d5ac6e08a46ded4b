"""Ragged steps over a poisoned pool, for all implementations of paged attention, and the reference's answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import NO_WINDOW, AttentionBatch, AttentionShape, FusedPool, Rope, SplitPool
from pallas_kernels.paged_attention.batches import ragged_batch
from pallas_kernels.paged_attention.reference import reference_paged_attention

NUM_LAYERS, LAYER = 3, 1
SCALE = 0.25


class Step(NamedTuple):
    """The arguments of one call, and the rows that count."""

    q: Any
    k: Any
    v: Any
    pool: SplitPool
    batch: AttentionBatch
    rope: Rope
    """Tables of few bits: products are exact, and a sum has the same bits with and without fused multiply-add."""
    rows: np.ndarray
    """The rows of t that are not padding."""


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
    blocks = [[ids.pop() for _ in range(count)] for count in blocks_each]
    batch = ragged_batch(
        chunks, blocks, block_size=o, query_tile=query_tile, row_alignment=row_alignment, padding=padding
    )
    keys, values = (np.full((NUM_LAYERS * num_blocks, k, *block), np.nan, np.float32) for block in ((h, o), (o, h)))
    for (length, chunk), owned in zip(chunks, blocks, strict=True):
        for position in range(length - chunk):
            block, offset = LAYER * num_blocks + owned[position // o], position % o
            keys[block, :, :, offset], values[block, :, offset] = rng.standard_normal((2, k, h))
    t = len(batch.slots_t)
    q, key, value = (rng.standard_normal((t, heads, h)).astype(np.float32) for heads in (shape.num_heads, k, k))
    angles = rng.uniform(0, 2 * np.pi, (t, h // 2))
    cos_and_sin = (jnp.asarray(x, jnp.bfloat16).astype(jnp.float32) for x in (np.cos(angles), np.sin(angles)))
    to, to_kv = partial(jnp.asarray, dtype=shape.dtype), partial(jnp.asarray, dtype=shape.kv_dtype)
    return Step(
        q=to(q),
        k=to(key),
        v=to(value),
        pool=SplitPool(to_kv(keys), to_kv(values)),
        batch=jax.tree.map(jnp.asarray, batch),
        rope=Rope(*cos_and_sin),
        rows=np.flatnonzero(batch.slots_t),
    )


ROW_ENDS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "causal": lambda position, _: position + 1,
    "bidirectional": lambda position, length: np.repeat(length, len(position)),
    "prefix": lambda position, length: np.maximum(position + 1, 2 * length // 3),
    # Each row sees less than the one before it, up to the diagonal.
    "falling": lambda position, length: np.maximum(position + 1, length - position // 2),
    # Two images with text before, between and behind.
    "images": lambda position, length: np.select(
        [(position >= length // 4) & (position < length // 2), (position > length // 2) & (position < length - 2)],
        [length // 2, length - 2],
        position + 1,
    ),
}
"""Functions of positions and a sequence's length that return how far rows see, by the kind of attention."""


def with_row_ends(step: Step, kind: str) -> Step:
    """Return the step with row ends; rows of padding have ends beyond everything."""
    batch = step.batch
    row_ends_t = np.full(len(batch.slots_t), 10**6, np.int32)
    sequences = zip(*map(np.asarray, (batch.query_starts_s, batch.query_ends_s, batch.context_lens_s)), strict=True)
    for start, end, length in sequences:
        row_ends_t[start:end] = ROW_ENDS[kind](np.arange(length - (end - start), length), length)
    return step._replace(batch=batch._replace(row_ends_t=jnp.asarray(row_ends_t)))


fused = FusedPool.of
"""Return the pool in the kernels' layout."""


def reference(step: Step, **settings: Any) -> tuple[np.ndarray, SplitPool]:
    """Run the reference; return the pool in float32."""
    q, k, v, *pool = (np.asarray(x) for x in (step.q, step.k, step.v, *step.pool))
    fixed = {"layer": LAYER, "num_layers": NUM_LAYERS, "scale": SCALE}
    settings = {"window": NO_WINDOW} | fixed | settings
    out, pool = reference_paged_attention(q, k, v, SplitPool(*pool), step.batch, **settings)
    return out, SplitPool(*(x.astype(np.float32) for x in pool))
