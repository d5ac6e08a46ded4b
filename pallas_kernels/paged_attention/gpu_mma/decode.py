"""Paged attention of decode rows: one query token per sequence, the context cut into splits.

A work item is 16 query heads of one kv head in one split of one sequence. A thread block of four warps takes an item's
KV tiles past its queries. While a tile is attended in shared memory, the next one is on its way to registers. The warps
divide the positions of a tile for the scores, which they then exchange, and the columns of V for the sums. An item's
result is a part of its row; `combine.py` adds up a row's parts, in order.

Where splits and tiles begin depends on a row's own context only, so its result is bitwise the same in every batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..gpu.common import LOWEST, TINY, in_log2, interpret_params, tiled_smem
from ..gpu.splits import DecodeWork, SplitRule, decode_work
from ..layout import AttentionBatch, FusedPool
from .combine import combine_splits
from .common import (
    MMA_ROWS,
    KVTiles,
    Operands,
    add_product,
    along_rows,
    compiler_params,
    store_vector,
    synchronize,
    zeros,
)

# The least positions of a split. For each split a part of the result is written and read.
_LEAST_SPLIT = 256
# The items that a single sequence is cut into, at most: enough for all multiprocessors of the largest GPUs. Each leaves
# 16 rows in float32, so their results take at most 10 KiB times h for each sequence of a step: 320 MiB for 256
# sequences with h = 128.
_MOST_ITEMS = 160
# The most thread blocks. Those that find no item end at once; each of the others takes items at equal distances.
_MOST_BLOCKS = 2048


class DecodeSizes(NamedTuple):
    """The sizes that the kernel is compiled with for a shape."""

    tile: int
    """The number of positions that are attended at a time."""
    splits: SplitRule
    """The rule by which a row's context is divided."""
    most_blocks: int = _MOST_BLOCKS
    """The most thread blocks."""


def decode_sizes(head_dim: int, num_kv_heads: int, group: int) -> DecodeSizes:
    """Return the sizes for `group` query heads of each kv head. The next tile is in registers, 64 of each thread."""
    tile, split_items = 64 if head_dim <= 128 else 32, num_kv_heads * -(-group // MMA_ROWS)
    return DecodeSizes(tile, SplitRule(most=max(1, _MOST_ITEMS // split_items), least_tiles=_LEAST_SPLIT // tile))


def decode_attention(
    q_rkmh: Array,
    kv_pool: FusedPool,
    batch: AttentionBatch,
    out_tc: Any,
    *,
    layer: Array | int,
    num_layers: int,
    window: Array | int,
    scale: float,
    soft_cap: float | None = None,
    sinks_n: Array | None = None,
    sizes: DecodeSizes | None = None,
    interpret: bool = False,
) -> None:
    """Attend the leading decode rows; K and V of the step are in the pool.

    Args:
      q_rkmh: the queries of at least s rows; m is a multiple of 16, and the query heads that pad it hold anything.
      kv_pool, batch, layer, num_layers, window, scale, soft_cap, sinks_n: see `PagedAttention`.
      out_tc: a Ref to [t, n * h] that gets the result in the decode rows; the others are unchanged.
      sizes: sizes to use instead of the shape's.
      interpret: run in the interpreter.
    """
    k, h = q_rkmh.shape[1], q_rkmh.shape[3]
    max_context = batch.block_tables_sm.shape[1] * kv_pool.kv.shape[2]
    sizes = sizes or decode_sizes(h, k, q_rkmh.shape[2])
    work = decode_work(batch, sizes.splits, sizes.tile, window, max_context)
    first_row = jnp.asarray(layer * (kv_pool.kv.shape[0] // num_layers), jnp.int32).reshape(1)
    items, m = work.seqs_i.shape[0], q_rkmh.shape[2]
    kernel = plgpu.kernel(
        partial(_decode_kernel, sizes=sizes, scale=scale, soft_cap=soft_cap, interpret=interpret),
        out_type=(
            jax.ShapeDtypeStruct((items, k, m, h), jnp.float32),
            jax.ShapeDtypeStruct((items, k, m), jnp.float32),
        ),
        grid=(min(items * k * (m // MMA_ROWS), sizes.most_blocks),),
        grid_names=("block",),
        kernel_name="paged_decode",
        scratch_types={
            "k_smem": tiled_smem((sizes.tile, h), q_rkmh.dtype),
            "v_smem": tiled_smem((sizes.tile, h), q_rkmh.dtype),
            "score_smem": plgpu.SMEM((MMA_ROWS, sizes.tile), jnp.float32),
        },
        compiler_params=compiler_params(),
        interpret=interpret_params(interpret),
    )
    parts_ikmh, logs_ikm = kernel(q_rkmh, kv_pool.kv, batch.block_tables_sm, first_row, *work)
    combine_splits(parts_ikmh, logs_ikm, work, sinks_n, out_tc, interpret)


class _Refs(NamedTuple):
    """The operands, results and scratch of the kernel."""

    q_rkmh: Any
    kv: Any
    tables_sm: Any
    first_row: Any
    work: DecodeWork
    parts_ikmh: Any
    logs_ikm: Any
    k_smem: Any
    v_smem: Any
    score_smem: Any


def _decode_kernel(
    *refs: Any, sizes: DecodeSizes, scale: float, soft_cap: float | None, interpret: bool, **scratch: Any
) -> None:
    q, kv, tables, first_row, *work, parts, logs = refs
    refs = _Refs(q, kv, tables, first_row, DecodeWork(*work), parts, logs, **scratch)
    _, k, m, _ = q.shape
    groups = m // MMA_ROWS
    num_blocks = min(parts.shape[0] * k * groups, sizes.most_blocks)
    total = refs.work.lasts_s[refs.work.lasts_s.shape[0] - 1] * (k * groups)
    attend = partial(_attend, refs, sizes, scale=scale, soft_cap=soft_cap, interpret=interpret)

    def step(i: Array, _: None) -> None:
        index = lax.axis_index("block") + i * num_blocks
        entry = lax.div(index, k * groups)
        attend(entry, lax.div(lax.rem(index, k * groups), groups), lax.rem(index, groups))

    num_items = lax.div(total - lax.axis_index("block") + (num_blocks - 1), num_blocks)
    lax.fori_loop(0, num_items, step, None)


def _attend(
    refs: _Refs,
    sizes: DecodeSizes,
    entry: Array,
    head: Array,
    group: Array,
    *,
    scale: float,
    soft_cap: float | None,
    interpret: bool,
) -> None:
    """Attend 16 query heads of an item, and store their results divided by their weights, and log2 of the weights."""
    h, dtype, tile = refs.q_rkmh.shape[3], refs.q_rkmh.dtype, sizes.tile
    mma = Operands.of(dtype, row_warps=1)
    seq, start, end = (x[entry] for x in (refs.work.seqs_i, refs.work.starts_i, refs.work.ends_i))
    low = refs.work.lows_s[seq]
    num_tiles = lax.div(end - start + (tile - 1), tile)
    tiles = KVTiles(refs.kv, refs.tables_sm, refs.first_row[0], dtype, tile)
    halves = (pl.ds(0, h), pl.ds(h, h))
    rows = pl.ds(pl.multiple_of(group * MMA_ROWS, MMA_ROWS), MMA_ROWS)
    q_mh = plgpu.load(refs.q_rkmh.at[seq, head, rows], layout=mma.lhs, optimized=False)

    def bring(j: Array) -> tuple[tuple[Array, ...], ...]:
        return tuple(tiles.load(seq, head, start + j * tile, half) for half in halves)

    def step(j: Array, state: Any) -> Any:
        acc, max_m, sum_m, kv = state
        position = start + j * tile
        synchronize(interpret)  # the last tile has been read
        for pieces, smem in zip(kv, (refs.k_smem, refs.v_smem), strict=True):
            tiles.store(pieces, smem, position, low, end)
        kv = lax.cond(j + 1 < num_tiles, lambda: bring(j + 1), lambda: kv)
        synchronize(interpret)

        keys_hc = plgpu.load(refs.k_smem.T, layout=mma.rhs)
        refs.score_smem[...] = add_product(zeros((MMA_ROWS, tile), mma.sum), q_mh, keys_hc, interpret)
        synchronize(interpret)
        # Each warp has all scores, since it needs all weights.
        scores, unit = in_log2(plgpu.load(refs.score_smem, layout=mma.lhs), scale, soft_cap)
        positions = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=mma.lhs) + position
        scores = jnp.where((positions >= low) & (positions < end), scores * unit, -jnp.inf)
        new_max_m = jnp.maximum(max_m, scores.max(axis=1))
        decay_m = jnp.exp2(max_m - new_max_m)
        weights = jnp.exp2(scores - along_rows(new_max_m, scores, mma.lhs))
        acc *= along_rows(decay_m, acc, mma.sum)
        values_ch = plgpu.load(refs.v_smem, layout=mma.rhs)
        acc = add_product(acc, weights.astype(dtype), values_ch, interpret)
        return acc, new_max_m, sum_m * decay_m + weights.sum(axis=1), kv

    row = mma.lhs.reduce(1)
    nothing = zeros((MMA_ROWS, h), mma.sum), zeros((MMA_ROWS,), row) + LOWEST, zeros((MMA_ROWS,), row)
    acc, max_m, sum_m, _ = lax.fori_loop(0, num_tiles, step, (*nothing, bring(jnp.int32(0))))
    sum_m = jnp.maximum(sum_m, TINY)
    # A part with nothing in its window weighs 2**LOWEST = 0 beside any other.
    store_vector(refs.logs_ikm.at[entry, head, rows], max_m + jnp.log2(sum_m))
    refs.parts_ikmh[entry, head, rows] = acc * along_rows(1.0 / sum_m, acc, mma.sum)
