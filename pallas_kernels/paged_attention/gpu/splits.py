"""The work of a decode step: every row's context divided into splits, and the list of the live splits."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ..layout import AttentionBatch

# The least tiles of a split, in steps of up to this many rows and in larger ones. For each split a part of the result
# is written and read, a few percent of two tiles' bytes, and a thread block has to change over.
_FEW_ROWS, _FEW_ROWS_TILES, _MANY_ROWS_TILES = 32, 2, 4


class SplitRule(NamedTuple):
    """The rule by which a row's context is divided, by its own length alone: into equal splits of whole tiles."""

    most: int
    """The most splits of a row."""
    least_tiles: int
    """The least tiles of a split."""


def split_rule(num_rows: int, num_kv_heads: int, workers: int) -> SplitRule:
    """Return the rule for steps of up to `num_rows` rows on `workers` thread blocks.

    A row has at most as many items as there are thread blocks, and a long one about as many, of the same length. So
    thread blocks that take them in turn get equal shares of each row, whatever the rows' lengths.
    """
    return SplitRule(
        most=max(1, workers // num_kv_heads),
        least_tiles=_FEW_ROWS_TILES if num_rows <= _FEW_ROWS else _MANY_ROWS_TILES,
    )


class DecodeWork(NamedTuple):
    """The live splits of all decode rows, one entry per row and split; int32."""

    seqs_i: Array
    """The sequence of each split."""
    starts_i: Array
    """The first position of each split's first KV tile."""
    ends_i: Array
    """One past each split's last position."""
    lows_s: Array
    """The first position in a row's window."""
    firsts_s: Array
    """The index of each row's first entry."""
    lasts_s: Array
    """One past the index of each row's last entry."""


def decode_work(batch: AttentionBatch, rule: SplitRule, tile: int, window: Array | int, max_context: int) -> DecodeWork:
    """Return the work of a step. It depends on the batch and the window only: layers with the same window share it."""
    s = batch.context_lens_s.shape[0]
    rows_s = jnp.arange(s, dtype=jnp.int32)
    lens_s = jnp.where(rows_s < batch.num_decodes, batch.context_lens_s, 0)
    lows_s = jnp.maximum(lens_s - window, 0).astype(jnp.int32)
    first_tiles_s = lows_s // tile
    tiles_s = (lens_s + (tile - 1)) // tile - first_tiles_s
    lengths_s = jnp.maximum((tiles_s + (rule.most - 1)) // rule.most, rule.least_tiles)
    counts_s = (tiles_s + lengths_s - 1) // lengths_s
    # Instead of cumsum: this is one fusion.
    lasts_s = jnp.sum(jnp.where(rows_s[None] <= rows_s[:, None], counts_s[None], 0), axis=1, dtype=jnp.int32)
    firsts_s = lasts_s - counts_s

    items_i = jnp.arange(s * min(rule.most, -(-max_context // (rule.least_tiles * tile))), dtype=jnp.int32)
    seqs_i = jnp.minimum(jnp.sum(items_i[:, None] >= lasts_s[None], axis=1, dtype=jnp.int32), s - 1)
    starts_i = (first_tiles_s[seqs_i] + (items_i - firsts_s[seqs_i]) * lengths_s[seqs_i]) * tile
    ends_i = jnp.minimum(starts_i + lengths_s[seqs_i] * tile, lens_s[seqs_i])
    return DecodeWork(seqs_i, starts_i, ends_i, lows_s, firsts_s, lasts_s)
