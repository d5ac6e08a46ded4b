"""Ragged steps of paged attention over a poisoned pool, and the reference's answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.paged_attention import (
    NO_WINDOW,
    AttentionBatch,
    AttentionShape,
    PagedAttention,
    PoolAttention,
    Rope,
    SplitPool,
)
from pallas_kernels.paged_attention.batches import ragged_batch
from pallas_kernels.paged_attention.reference import reference_paged_attention

from .trial import Call, Outcome, Trial, allowed_error, bucket, describe, is_finite, is_same, largest_error

NUM_LAYERS, LAYER = 3, 1
SCALE = 0.25
type Chunks = Sequence[tuple[int, int]]
"""Pairs of the length of a context and of the chunk at its end that a step computes; decodes first."""
STEPS: dict[str, Chunks] = {
    "decodes": [(1, 1), (16, 1), (17, 1), (64, 1), (65, 1), (1029, 1), (2500, 1)],
    "mixed": [(1, 1), (35, 1), (300, 1), (2, 2), (33, 33), (150, 47), (290, 3), (200, 140)],
}
_SHORT = 100
"""A window that is shorter than contexts here."""


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
    chunks: Chunks,
    shape: AttentionShape,
    *,
    query_tile: int,
    row_alignment: int = 1,
    padding: int | None = 3,
) -> Step:
    """Return a step of (context length, chunk length) sequences, decodes first; unused slots of the pool are NaN.

    `padding` sequences and at least as many rows are padding. None: as in an engine's step, which has powers of two of
    both.
    """
    o, k, h = shape.block_size, shape.num_kv_heads, shape.head_dim
    blocks, num_blocks = deal_blocks(rng, chunks, o)
    batch = pad_batch(chunks, blocks, padding, block_size=o, query_tile=query_tile, row_alignment=row_alignment)
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


def pad_batch(chunks: Chunks, blocks: Sequence[Sequence[int]], padding: int | None, **layout: int) -> AttentionBatch:
    """Return `ragged_batch` with padding, or with that of an engine's step if it is None."""
    if padding is not None:
        return ragged_batch(chunks, blocks, padding=padding, **layout)
    batch = ragged_batch(chunks, blocks, padding=bucket(len(chunks)) - len(chunks), **layout)
    num_rows = len(batch.slots_t)
    return batch._replace(slots_t=np.pad(batch.slots_t, (0, bucket(num_rows) - num_rows)))


def deal_blocks(rng: np.random.Generator, chunks: Chunks, block_size: int) -> tuple[list[list[int]], int]:
    """Return the blocks of each sequence, in a random order, and the number of blocks; one belongs to nobody."""
    counts = [-(-length // block_size) for length, _ in chunks]
    num_blocks = sum(counts) + 2
    ids = rng.permutation(np.arange(1, num_blocks)).tolist()
    return [[ids.pop() for _ in range(count)] for count in counts], num_blocks


def reference(step: Step, **settings: Any) -> tuple[np.ndarray, SplitPool]:
    """Run the reference; return the pool in float32."""
    out, pool = _reference(step, **settings)
    return out, SplitPool(*(x.astype(np.float32) for x in pool))


def _reference(step: Step, **settings: Any) -> tuple[np.ndarray, SplitPool]:
    q, k, v, *pool = (np.asarray(x) for x in (step.q, step.k, step.v, *step.pool))
    fixed = {"layer": LAYER, "num_layers": NUM_LAYERS, "scale": SCALE}
    settings = {"window": NO_WINDOW} | fixed | settings
    return reference_paged_attention(q, k, v, SplitPool(*pool), step.batch, **settings)


def paged_trials(
    op: PagedAttention, *, window: int | None = None, soft_cap: float | None = None, has_sinks: bool = False
) -> Iterator[Trial]:
    """Yield the trials of an op in a model's layers with these settings."""
    settings: dict[str, Any] = {"window": NO_WINDOW if window is None else min(window, _SHORT), "soft_cap": soft_cap}
    shape = describe(op.shape) + ("" if window is None else f", window {settings['window']}")
    for name, chunks in STEPS.items():
        make = partial(_make_call, op, chunks, settings, has_sinks=has_sinks)
        yield Trial("paged_attention", op.implementation, shape, name, make)


def _make_call(op: PagedAttention, chunks: Chunks, settings: dict[str, Any], *, has_sinks: bool) -> Call:
    rng = np.random.default_rng(len(chunks))
    step = make_step(rng, chunks, op.shape, query_tile=op.tiles.query, row_alignment=op.row_alignment, padding=None)
    step = step._replace(batch=as_engine(op, chunks, step.batch))
    sinks = rng.standard_normal(op.shape.num_heads).astype(np.float32) if has_sinks else None
    settings = settings | {"sinks_n": sinks}

    def function(q: Any, k: Any, v: Any, pool: Any, batch: Any, rope: Any, layer: Any) -> Any:
        return op(q, k, v, pool, batch, rope=rope, layer=layer, num_layers=NUM_LAYERS, scale=SCALE, **settings)

    def compare(result: Any) -> Outcome:
        exact, exact_pool = _reference(step, rope=step.rope, **settings)
        expected = held_pool(op, SplitPool(*map(jnp.asarray, exact_pool)))
        return compare_attention(result, exact, expected, step.rows, op.shape.dtype)

    arguments = step.q, step.k, step.v, held_pool(op, step.pool), step.batch, step.rope, jnp.int32(LAYER)
    return Call(function, arguments, compare)


def as_engine(op: PoolAttention, chunks: Chunks, batch: AttentionBatch) -> AttentionBatch:
    """Return the batch as the engine makes it: without room for tiles if there are decodes alone and the op asks so."""
    is_alone = op.takes_decodes_alone and all(chunk == 1 for _, chunk in chunks)
    return batch.without_tiles() if is_alone else batch


def held_pool(op: PagedAttention, pool: SplitPool) -> Any:
    """Return a pool in the form in which the op's implementation holds it."""
    spec = op.pool_spec(NUM_LAYERS, len(pool.k) // NUM_LAYERS)
    formed = pool if isinstance(spec, SplitPool) else type(spec).of(pool)
    return type(spec)(
        *(x if x.dtype == y.dtype else lax.bitcast_convert_type(x, y.dtype) for x, y in zip(formed, spec, strict=True))
    )


def compare_attention(result: Any, exact: np.ndarray, expected_pool: Any, rows: np.ndarray, dtype: Any) -> Outcome:
    """Compare an output's rows, which are not padding, and the pool with the reference's.

    The null block of the layer may hold anything.
    """
    out, pool = result
    missed = []
    for got, want in zip(map(np.asarray, pool), map(np.asarray, expected_pool), strict=True):
        null_block = LAYER * (len(want) // NUM_LAYERS)
        if not is_same(np.delete(got, null_block, axis=0), np.delete(want, null_block, axis=0)):
            missed.append("the pool differs")
    if not is_finite(out):
        missed.append("padding is not finite")
    error = largest_error(np.asarray(out, np.float32)[rows], exact[rows])
    return Outcome(error, allowed_error(dtype), tuple(dict.fromkeys(missed)))
