"""Row ends for kernels that attend in tiles: how far ahead each row sees, and the limits of parts of the tiles."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .layout import AttentionBatch

_NO_ROWS = 2**30
"""The least end of a part that has no rows."""


class _TileEnds(NamedTuple):
    """How far the rows of a batch's tiles see, int32."""

    ahead_t: Array
    """The number of positions after its own that each row sees; 0 for rows that are in no tile."""
    ends_ir: Array
    """The end of each row of each tile; for rows that are not the sequence's, the end of the sequence."""
    least_ip: Array
    """The least end of the rows of each part of each tile."""
    most_ip: Array
    """The largest end of those rows; 0 where there are none."""


def tile_ends(batch: AttentionBatch, query: int, part: int) -> _TileEnds:
    """Return how far the batch's tiles of `query` rows see, and their parts of `part` rows."""
    assert batch.row_ends_t is not None
    t, num_tiles = batch.row_ends_t.shape[0], batch.tile_rows_i.shape[0]
    rows_ir = batch.tile_rows_i[:, None] + jnp.arange(query, dtype=jnp.int32)
    seq_ends_i, lens_i = batch.query_ends_s[batch.tile_seqs_i], batch.context_lens_s[batch.tile_seqs_i]
    is_used_i = lax.iota(jnp.int32, num_tiles) < batch.num_tiles
    is_row_ir = (rows_ir < seq_ends_i[:, None]) & is_used_i[:, None]
    ends_ir = batch.row_ends_t.at[rows_ir].get(mode="clip")
    rows_t = jnp.arange(t, dtype=jnp.int32)
    # A scatter of the tiles' rows would go over them one by one on a TPU.
    first_i = jnp.where(is_used_i, batch.tile_rows_i, t)
    tiles_t = jnp.searchsorted(first_i, rows_t, side="right", method="compare_all") - 1
    end_i = jnp.minimum(first_i + query, seq_ends_i)
    is_row_t = (tiles_t >= 0) & (rows_t < end_i[tiles_t])
    ahead_t = jnp.where(is_row_t, batch.row_ends_t - (lens_i - seq_ends_i)[tiles_t] - rows_t - 1, 0)
    least_ip, most_ip = (
        reduce(jnp.where(is_row_ir, ends_ir, without).reshape(num_tiles, -1, part), axis=2)
        for reduce, without in ((jnp.min, _NO_ROWS), (jnp.max, 0))
    )
    return _TileEnds(ahead_t, jnp.where(is_row_ir, ends_ir, lens_i[:, None]), least_ip, most_ip)
