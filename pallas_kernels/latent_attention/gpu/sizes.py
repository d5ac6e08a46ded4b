"""Sizes of the Hopper kernels of attention over latents, and the shapes that they do not take."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.paged_attention.gpu.common import MMA_ROWS, TILED_ROWS, WORKERS
from pallas_kernels.paged_attention.gpu.splits import SplitRule
from pallas_kernels.paged_attention.layout import FLOAT8
from pallas_kernels.paged_attention.tiles import Tiles

from ..layout import LatentShape

# The tokens of a tile: a consumer's scores are 64 x 64.
TILE = 64
# The warpgroups that attend. Each computes all scores of a tile, and sums up its share of the latents' columns.
CONSUMERS = 2
# The bytes of each row of a result that a consumer stores at a time: both take no more shared memory than the queries.
STORE_BYTES = 512
# The columns that the producer, which has few registers, handles at a time.
PART_COLUMNS = 64
# Chunks of a prompt begin at multiples of this many rows.
_ROW_ALIGNMENT = 16
# The least tiles of a split, in steps of up to this many rows, and in larger ones. For each split the sums of a row are
# written and read: 256 KiB for 64 heads of 512 columns, where a tile has 72.
_LEAST_TILES, _MANY_ROWS_TILES = {8: 2, 32: 4}, 8
# The most memory for the parts of splits, used or not.
_PARTS_BYTES = 128 * 2**20


class Heads(NamedTuple):
    """How heads, and in chunks several rows of them, fill the 64 rows of a wgmma."""

    groups: int
    """The number of groups that a row's heads are divided into, which are attended one by one."""
    size: int
    """The heads of a group."""
    rows: int
    """The number of rows of a chunk that are attended together."""

    @property
    def padded(self) -> int:
        """Return the heads of a group of a decode, with padding: a TMA brings whole groups of 8."""
        return -(-self.size // TILED_ROWS) * TILED_ROWS


def divide_heads(num_heads: int) -> Heads:
    """Return how `num_heads` heads fill a wgmma best."""
    groups = next(
        count for count in range(1, num_heads + 1) if num_heads % count == 0 and num_heads // count <= MMA_ROWS
    )
    size, rows = num_heads // groups, 1
    # The rows divide the row alignment, so that rows that are attended together never belong to two chunks.
    while groups == 1 and 2 * rows <= min(_ROW_ALIGNMENT, MMA_ROWS // size):
        rows *= 2
    return Heads(groups, size, rows)


def gpu_tiles(shape: LatentShape) -> Tiles:
    """Return the kernels' tile sizes."""
    return Tiles(decode=1, query=divide_heads(shape.num_heads).rows, kv=TILE)


def split_rule(num_rows: int, heads: Heads, latent_dim: int) -> SplitRule:
    """Return how decodes' contexts are split in steps of up to `num_rows` rows; see `splits.split_rule`."""
    split_bytes = num_rows * heads.groups * heads.padded * latent_dim * 4
    fits = (tiles for most_rows, tiles in _LEAST_TILES.items() if num_rows <= most_rows)
    return SplitRule(
        most=max(1, min(WORKERS // heads.groups, _PARTS_BYTES // split_bytes)),
        least_tiles=next(fits, _MANY_ROWS_TILES),
    )


def refusal(shape: LatentShape) -> str | None:
    """Return why the kernels cannot run a shape, or None if they can."""
    if shape.latent_dim not in (256, 512) or shape.rope_dim != PART_COLUMNS:
        return f"latents must be of 256 or 512 numbers and 64 rotated ones, not {shape.latent_dim} and {shape.rope_dim}"
    heads = divide_heads(shape.num_heads)
    if (heads.rows if shape.top_k is None else 1) * heads.size % TILED_ROWS:
        return f"{shape.num_heads} heads fill no whole groups of 8 rows, which is what a TMA writes"
    if shape.dtype != jnp.bfloat16:
        return f"dtype must be bfloat16, not {jnp.dtype(shape.dtype).name}"
    if shape.kv_dtype not in (jnp.bfloat16, *FLOAT8):
        return f"the pool must be bfloat16 or float8, not {jnp.dtype(shape.kv_dtype).name}"
    if shape.block_size not in (16, 32, 64, 128):
        return f"block_size must be 16, 32, 64, 128, not {shape.block_size}"
    return None
