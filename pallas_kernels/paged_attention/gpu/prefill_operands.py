"""What the prefill kernels of all GPUs read from global memory, and the rows of queries that one program attends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ..layout import AttentionBatch, FusedPool
from ..row_ends import tile_ends

STORE_ROWS = 16
"""The rows that are read and stored at a time, so that a tile's last rows do not reach into the next chunk."""


class PrefillOperands(NamedTuple):
    """The arrays that a kernel gets, and in the kernel their refs; None for those that are absent."""

    qo_tc: Any
    """The queries [t, n * h]; results replace them."""
    kv_pool: Any
    block_tables_sm: Any
    context_lens_s: Any
    query_ends_s: Any
    tile_seqs_i: Any
    tile_rows_i: Any
    num_tiles_1: Any
    first_row_1: Any
    """The pool's row of the layer's null block."""
    window_1: Any
    sinks_n: Any
    row_ends_r: Any
    """One past the last position that each row of each tile sees. This and the next two exist with row ends only."""
    least_ends_p: Any
    """The least end among the rows of each part of a tile; the first tile's parts come first."""
    most_ends_p: Any
    """The largest end among them."""

    @classmethod
    def of(
        cls,
        qo_tc: Any,
        kv_pool: FusedPool,
        batch: AttentionBatch,
        *,
        layer: Array | int,
        num_layers: int,
        window: Array | int,
        sinks_n: Array | None,
        tile_rows: int,
        part_rows: int,
    ) -> PrefillOperands:
        """Return the arrays for tiles of `tile_rows` rows, and of their parts of `part_rows`."""
        ends = None if batch.row_ends_t is None else tile_ends(batch, tile_rows, part_rows)
        return cls(
            qo_tc,
            kv_pool.kv,
            batch.block_tables_sm,
            batch.context_lens_s,
            batch.query_ends_s,
            batch.tile_seqs_i,
            batch.tile_rows_i,
            _one(batch.num_tiles),
            _one(layer * (kv_pool.kv.shape[0] // num_layers)),
            _one(window),
            None if sinks_n is None else sinks_n.astype(jnp.float32),
            ends and ends.ends_ir.reshape(-1),
            ends and ends.least_ip.reshape(-1),
            ends and ends.most_ip.reshape(-1),
        )

    def present(self) -> list[Any]:
        """Return the arrays, without those that are absent."""
        return [x for x in self if x is not None]

    def with_refs(self, refs: Sequence[Any]) -> PrefillOperands:
        """Return the refs of the arrays that are present, in their places."""
        remaining = iter(refs)
        return PrefillOperands(*(x if x is None else next(remaining) for x in self))

    def query_tile(self, tile: Array, tile_rows: int) -> QueryTile:
        """Return a tile of the program's query head; in the kernel."""
        seq = self.tile_seqs_i[tile]
        row = pl.multiple_of(self.tile_rows_i[tile], STORE_ROWS)
        end, context_len, window = self.query_ends_s[seq], self.context_lens_s[seq], self.window_1[0]
        shift = context_len - end
        if self.row_ends_r is None:
            last = lax.min(row + tile_rows, end) - 1 + shift
        else:
            parts = self.most_ends_p.shape[0] // self.tile_seqs_i.shape[0]
            last = reduce(lax.max, [self.most_ends_p[tile * parts + i] for i in range(parts)]) - 1
        head = lax.axis_index("head")
        low = lax.max(row + shift - window + 1, 0)
        return QueryTile(head, tile, seq, row, end, shift, context_len, window, low, last)


class QueryTile(NamedTuple):
    """The rows that a program attends, and what they see; int32 scalars."""

    head: Array
    """The query head."""
    tile: Array
    """The index of the tile."""
    seq: Array
    row: Array
    """The first row in t."""
    end: Array
    """One past the sequence's last row."""
    shift: Array
    """A row's position in the sequence, minus the row."""
    context_len: Array
    window: Array
    low: Array
    """The first position that the rows see."""
    last: Array
    """The last position that the rows see."""


def _one(x: Array | int) -> Array:
    return jnp.asarray(x, jnp.int32).reshape(1)
