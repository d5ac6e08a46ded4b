"""Ragged steps for all implementations of attention over latents, and the reference's answer."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.latent_attention import LatentAttention, LatentPool
from pallas_kernels.latent_attention.reference import reference_latent_attention
from pallas_kernels.paged_attention import AttentionBatch
from pallas_kernels.paged_attention.batches import ragged_batch

NUM_LAYERS, LAYER = 3, 1
SCALE = 0.25


class Step(NamedTuple):
    """The arguments of one call, and the rows that count."""

    q: Any
    latents: Any
    pool: LatentPool
    batch: AttentionBatch
    rows: np.ndarray
    """The rows of t that are not padding."""


def make(
    seed: int,
    chunks: list[tuple[int, int]],
    op: LatentAttention,
    *,
    padding: int = 3,
    row_alignment: int = 1,
    query_tile: int | None = None,
) -> Step:
    """Return a step of (context length, chunk length) sequences, decodes first; unused slots of the pool are NaN."""
    rng, shape = np.random.default_rng(seed), op.shape
    o = shape.block_size
    blocks_each = [-(-length // o) for length, _ in chunks]
    num_blocks = sum(blocks_each) + 2
    ids = rng.permutation(np.arange(1, num_blocks)).tolist()
    blocks = [[ids.pop() for _ in range(count)] for count in blocks_each]
    query_tile = op.tiles.query if query_tile is None else query_tile
    batch = ragged_batch(
        chunks, blocks, block_size=o, query_tile=query_tile, row_alignment=row_alignment, padding=padding
    )
    pool = np.full((NUM_LAYERS * num_blocks, o, shape.key_dim), np.nan, np.float32)
    for (length, chunk), owned in zip(chunks, blocks, strict=True):
        for position in range(length - chunk):
            block = LAYER * num_blocks + owned[position // o]
            pool[block, position % o] = rng.standard_normal(shape.key_dim)
    t = len(batch.slots_t)
    q = rng.standard_normal((t, shape.num_heads, shape.key_dim)).astype(np.float32)
    latents = rng.standard_normal((t, shape.key_dim)).astype(np.float32)
    to = partial(jnp.asarray, dtype=shape.dtype)
    filled = LatentPool(jnp.asarray(pool, shape.kv_dtype))
    return Step(to(q), to(latents), filled, jax.tree.map(jnp.asarray, batch), np.flatnonzero(batch.slots_t))


def reference(step: Step, op: LatentAttention) -> tuple[np.ndarray, LatentPool]:
    """Run the reference; return the pool in float32."""
    q, latents, pool = (np.asarray(x) for x in (step.q, step.latents, step.pool.latents))
    fixed = {"layer": LAYER, "num_layers": NUM_LAYERS, "scale": SCALE, "latent_dim": op.shape.latent_dim}
    out, pool = reference_latent_attention(q, latents, LatentPool(pool), step.batch, **fixed)
    return out, LatentPool(pool.latents.astype(np.float32))


def float32(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32)


def assert_pools_equal(pool: LatentPool, expected: LatentPool) -> None:
    """Check that pools are equal except for the null block, where padding goes."""
    first = LAYER * (len(expected.latents) // NUM_LAYERS)
    got, want = (np.delete(float32(x.latents), first, axis=0) for x in (pool, expected))
    np.testing.assert_array_equal(got, want)
