"""A decode step's work is every row's context cut into splits, and the list of those that are live."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ..layout import AttentionBatch

# Splits of a context double in length every so many: enough for one short context, not too many for a long one.
SPLITS_PER_LENGTH = 8


def split_bounds(max_context: int, first_split: int) -> tuple[int, ...]:
    """Return where splits begin and the last one ends, for contexts of up to `max_context` tokens."""
    bounds, length = [0], first_split
    while bounds[-1] < max_context:
        bounds.append(bounds[-1] + length)
        if len(bounds) % SPLITS_PER_LENGTH == 1:
            length *= 2
    return tuple(bounds)


class DecodeWork(NamedTuple):
    """The live splits of all decode rows, one entry per row and split; int32."""

    seqs_i: Array
    """The sequence of each split."""
    starts_i: Array
    """The first position of each split's first live KV tile."""
    ends_i: Array
    """One past each split's last position."""
    lows_s: Array
    """The first position in a row's window."""
    firsts_s: Array
    """The index of each row's first entry."""
    lasts_s: Array
    """One past the index of each row's last entry."""


def decode_work(batch: AttentionBatch, bounds: tuple[int, ...], window: Array | int, tile: int) -> DecodeWork:
    """Return what there is to do. Of the batch and the window only: layers with the same window share it."""
    s = batch.context_lens_s.shape[0]
    rows_s = jnp.arange(s, dtype=jnp.int32)
    lens_s = jnp.where(rows_s < batch.num_decodes, batch.context_lens_s, 0)
    lows_s = jnp.maximum(lens_s - window, 0).astype(jnp.int32)
    inner = jnp.asarray(bounds[1:-1], jnp.int32)
    split_of = lambda positions_s: jnp.sum(positions_s[:, None] >= inner[None], axis=1, dtype=jnp.int32)  # noqa: E731
    first_splits_s = split_of(lows_s)
    counts_s = jnp.where(lens_s > 0, split_of(lens_s - 1) - first_splits_s + 1, 0)
    # Not cumsum: this is one fusion.
    lasts_s = jnp.sum(jnp.where(rows_s[None] <= rows_s[:, None], counts_s[None], 0), axis=1, dtype=jnp.int32)
    firsts_s = lasts_s - counts_s

    items_i = jnp.arange(s * (len(bounds) - 1), dtype=jnp.int32)
    seqs_i = jnp.minimum(jnp.sum(items_i[:, None] >= lasts_s[None], axis=1, dtype=jnp.int32), s - 1)
    splits_i = jnp.minimum(first_splits_s[seqs_i] + items_i - firsts_s[seqs_i], len(bounds) - 2)
    bounds_p = jnp.asarray(bounds, jnp.int32)
    starts_i = jnp.maximum(bounds_p[splits_i], lows_s[seqs_i] // tile * tile)
    ends_i = jnp.minimum(bounds_p[splits_i + 1], lens_s[seqs_i])
    return DecodeWork(seqs_i, starts_i, ends_i, lows_s, firsts_s, lasts_s)
