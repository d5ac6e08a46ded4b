"""Sizes of the indexer's Hopper kernels, and the shapes that they do not take."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.paged_attention.gpu.common import WORKERS
from pallas_kernels.paged_attention.gpu.splits import SplitRule
from pallas_kernels.paged_attention.tiles import Tiles

from ..layout import IndexerShape

# The keys of a tile: the rows of a wgmma, whose columns are queries.
TILE = 64
# The most queries that are multiplied by a tile at a time, the columns of a wgmma.
_MOST_QUERIES = 256
# Chunks of a prompt begin at multiples of this many rows.
ROW_ALIGNMENT = 16
# The most bytes of scores at a time; a step of more rows is taken in pieces.
SCORE_BYTES = 256 * 2**20
# The least tiles of a split of a decode, in steps of up to this many rows, and in larger ones. Each brings the row's
# queries, as many bytes as a tile has at 64 heads.
_LEAST_TILES, _MANY_ROWS_TILES = {8: 2, 32: 4}, 8


def rows_together(num_heads: int) -> int:
    """Return the number of rows of a chunk that are scored together: a power of 2 that divides the row alignment."""
    rows = 1
    while 2 * rows <= min(ROW_ALIGNMENT, _MOST_QUERIES // num_heads):
        rows *= 2
    return rows


def gpu_tiles(shape: IndexerShape) -> Tiles:
    """Return the kernels' tile sizes."""
    return Tiles(decode=1, query=rows_together(shape.num_heads), kv=TILE)


def score_split_rule(num_rows: int) -> SplitRule:
    """Return how the contexts of decodes are split in steps of up to `num_rows` rows; see `splits.split_rule`."""
    fits = (tiles for most_rows, tiles in _LEAST_TILES.items() if num_rows <= most_rows)
    return SplitRule(WORKERS, next(fits, _MANY_ROWS_TILES))


def rows_at_a_time(num_rows: int, columns: int) -> int:
    """Return how many of a step's rows are scored before their positions are chosen; `columns` are scores of a row."""
    most = max(ROW_ALIGNMENT, SCORE_BYTES // (4 * columns) // ROW_ALIGNMENT * ROW_ALIGNMENT)
    return min(-(-num_rows // ROW_ALIGNMENT) * ROW_ALIGNMENT, most)


def refusal(shape: IndexerShape) -> str | None:
    """Return why the kernels cannot run a shape, or None if they can."""
    if shape.dtype != jnp.bfloat16 or shape.kv_dtype != jnp.bfloat16:
        names = (jnp.dtype(x).name for x in (shape.dtype, shape.kv_dtype))
        return f"queries and keys must be bfloat16, not {' and '.join(names)}"
    if shape.head_dim not in (64, 128, 256):
        return f"head_dim must be 64, 128 or 256, not {shape.head_dim}"
    if shape.num_heads % 8 or shape.num_heads > _MOST_QUERIES:
        return f"the number of heads must be a multiple of 8 up to {_MOST_QUERIES}, not {shape.num_heads}"
    if shape.block_size not in (16, 32, 64, 128):
        return f"block_size must be 16, 32, 64 or 128, not {shape.block_size}"
    return None
