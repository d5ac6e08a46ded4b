"""The slots that rows of sparse attention attend to, and the work items of a step."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.chosen import to_positions
from pallas_kernels.paged_attention import AttentionBatch
from pallas_kernels.paged_attention.gpu.common import WORKERS
from pallas_kernels.paged_attention.gpu.splits import DecodeWork

from .attend import Work
from .sizes import TILE

# The least tiles of a split, whose sums are written and read: 256 KiB for 64 heads, where a tile has 72.
_LEAST_TILES = 2


class Slots(NamedTuple):
    """The tokens that each row attends to; int32."""

    slots_tk: Array
    """Their slots in the pool of all layers. Behind the last one comes the first again; k is a multiple of 64."""
    counts_t: Array
    """Their numbers."""


def chosen_slots(
    chosen_tw: Array, batch: AttentionBatch, top_k: int, block_size: int, first_block: Array | int
) -> Slots:
    """Return the slots of chosen positions, by operations that are not loops."""
    rows_t1 = jnp.arange(len(chosen_tw), dtype=jnp.int32)[:, None]
    is_in_ts = (rows_t1 >= batch.query_starts_s) & (rows_t1 < batch.query_ends_s)
    seqs_s = jnp.arange(len(batch.context_lens_s), dtype=jnp.int32)
    seqs_t1 = jnp.sum(jnp.where(is_in_ts, seqs_s, 0), axis=1, dtype=jnp.int32, keepdims=True)
    positions_tk = to_positions(chosen_tw, -(-top_k // TILE) * TILE)
    is_chosen_tk = positions_tk >= 0
    # Latents past the last one weigh nothing, but must be numbers.
    positions_tk = jnp.where(is_chosen_tk, positions_tk, jnp.maximum(positions_tk[:, :1], 0))
    blocks_tk = batch.block_tables_sm[seqs_t1, positions_tk // block_size]
    slots_tk = (first_block + blocks_tk) * block_size + positions_tk % block_size
    return Slots(slots_tk.astype(jnp.int32), jnp.sum(is_chosen_tk, axis=1, dtype=jnp.int32))


def chosen_work(slots: Slots, batch: AttentionBatch, groups: int, block_size: int) -> tuple[Work, DecodeWork | None]:
    """Return the work items of all rows, and how they are combined, if rows are split.

    Rows of padding behind the last token have no items.
    """
    t, k = slots.slots_tk.shape
    most = max(1, min(WORKERS // (t * groups), k // (_LEAST_TILES * TILE)))
    rows_t = jnp.arange(t, dtype=jnp.int32)
    is_token_t = batch.slots_t >= block_size
    tiles_t = (slots.counts_t + (TILE - 1)) // TILE
    lengths_t = jnp.maximum((tiles_t + (most - 1)) // most, _LEAST_TILES) * TILE
    rows_i = jnp.repeat(rows_t, most)
    starts_i = jnp.tile(jnp.arange(most, dtype=jnp.int32), t) * lengths_t[rows_i]
    ends_i = jnp.minimum(starts_i + lengths_t[rows_i], slots.counts_t[rows_i])
    starts_i = jnp.minimum(starts_i, ends_i)
    total = jnp.max(jnp.where(is_token_t, rows_t + 1, 0)) * most
    work = Work(rows_i, rows_i, starts_i, ends_i, ends_i, total.reshape(1))
    if most == 1:
        return work, None
    firsts_t = rows_t * most
    lasts_t = firsts_t + jnp.where(is_token_t, most, 0)
    return work, DecodeWork(rows_i, starts_i, ends_i, jnp.zeros_like(rows_t), firsts_t, lasts_t)
