"""Ragged steps of attention over latents, over a poisoned pool, and the reference's answer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.chosen import num_words, to_array
from pallas_kernels.latent_attention import LatentAttention, LatentPool
from pallas_kernels.latent_attention.reference import reference_latent_attention
from pallas_kernels.paged_attention import AttentionBatch

from .attention import LAYER, NUM_LAYERS, STEPS, Chunks, as_engine, compare_attention, deal_blocks, pad_batch
from .trial import Call, Outcome, Trial, describe

SCALE = 0.25


class Step(NamedTuple):
    """The arguments of one call, and the rows that count."""

    q: Any
    latents: Any
    pool: LatentPool
    batch: AttentionBatch
    rows: np.ndarray
    """The rows of t that are not padding."""
    chosen: Any = None
    """The positions that each row attends to, as bits, for a shape with `top_k`."""


def make(
    seed: int,
    chunks: Chunks,
    op: LatentAttention,
    *,
    padding: int | None = 3,
    row_alignment: int = 1,
    query_tile: int | None = None,
) -> Step:
    """Return a step of (context length, chunk length) sequences, decodes first; unused slots of the pool are NaN.

    `padding` is as for `attention.make_step`.
    """
    rng, shape = np.random.default_rng(seed), op.shape
    o = shape.block_size
    blocks, num_blocks = deal_blocks(rng, chunks, o)
    query_tile = op.tiles.query if query_tile is None else query_tile
    batch = pad_batch(chunks, blocks, padding, block_size=o, query_tile=query_tile, row_alignment=row_alignment)
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
    chosen = None if shape.top_k is None else jnp.asarray(choose_positions(rng, batch, shape.top_k, o))
    return Step(to(q), to(latents), filled, jax.tree.map(jnp.asarray, batch), np.flatnonzero(batch.slots_t), chosen)


def choose_positions(rng: np.random.Generator, batch: AttentionBatch, top_k: int, block_size: int) -> np.ndarray:
    """Return random positions of each row, as an indexer would choose them."""
    positions = [np.arange(0)] * len(batch.slots_t)
    for start, end, length in zip(batch.query_starts_s, batch.query_ends_s, batch.context_lens_s, strict=True):
        for row in range(start, end):
            seen = length - end + row + 1
            positions[row] = rng.choice(seen, min(seen, top_k), replace=False)
    return to_array(positions, num_words(batch, block_size))


def reference(step: Step, op: LatentAttention, *, scale: float = SCALE) -> tuple[np.ndarray, LatentPool]:
    """Run the reference; return the pool in float32."""
    out, pool = _reference(step, op, scale)
    return out, LatentPool(pool.latents.astype(np.float32))


def _reference(step: Step, op: LatentAttention, scale: float) -> tuple[np.ndarray, LatentPool]:
    q, latents, pool = (np.asarray(x) for x in (step.q, step.latents, step.pool.latents))
    fixed = {"layer": LAYER, "num_layers": NUM_LAYERS, "scale": scale, "latent_dim": op.shape.latent_dim}
    chosen = None if step.chosen is None else np.asarray(step.chosen)
    return reference_latent_attention(q, latents, LatentPool(pool), step.batch, **fixed, chosen_tw=chosen)


def latent_trials(op: LatentAttention) -> Iterator[Trial]:
    """Yield the trials of an op."""
    for name, chunks in STEPS.items():
        yield Trial("latent_attention", op.implementation, describe(op.shape), name, partial(_make_call, op, chunks))


def _make_call(op: LatentAttention, chunks: Chunks) -> Call:
    step = make(len(chunks), chunks, op, row_alignment=op.row_alignment, padding=None)
    step = step._replace(batch=as_engine(op, chunks, step.batch))
    scale = op.shape.key_dim**-0.5

    def function(q: Any, latents: Any, pool: Any, batch: Any, layer: Any, chosen: Any) -> Any:
        settings: dict[str, Any] = {"layer": layer, "num_layers": NUM_LAYERS, "scale": scale}
        return op(q, latents, pool, batch, **settings, chosen_tw=chosen)

    def compare(result: Any) -> Outcome:
        exact, exact_pool = _reference(step, op, scale)
        expected = _held_pool(op, LatentPool(jnp.asarray(exact_pool.latents)))
        return compare_attention(result, exact, expected, step.rows, op.shape.dtype)

    arguments = step.q, step.latents, _held_pool(op, step.pool), step.batch, jnp.int32(LAYER), step.chosen
    return Call(function, arguments, compare)


def _held_pool(op: LatentAttention, pool: LatentPool) -> LatentPool:
    """Return a pool in the form in which the op's implementation holds it: rows of whole lanes have zeros behind."""
    latents = pool.latents
    [spec] = op.pool_spec(NUM_LAYERS, len(latents) // NUM_LAYERS)
    if latents.dtype != spec.dtype:
        latents = lax.bitcast_convert_type(latents, spec.dtype)
    return LatentPool(jnp.pad(latents, ((0, 0), (0, 0), (0, spec.shape[-1] - latents.shape[-1]))))
