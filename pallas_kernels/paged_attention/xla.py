"""Paged attention in plain jnp, the fallback where no kernel can run.

Online softmax in float32 over KV tiles of fixed length. Decode rows go in groups, prefill chunks in tiles of query
rows. Both loop over live KV only, and no sum depends on the other rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .layout import AttentionBatch, SplitPool
from .tiles import XLA_TILES, Tiles

_Compute = Callable[[Any, Array, Array, Array | None], Array]
"""A function of rows [s, r, ...] of sequences with tables [s, m]; of their positions [s, r], -1 for rows that do not
count; and of one past the last position that each sees [s, r], None if that is its own. It returns results [s, r, ...].
"""
_Read = Callable[[Array], tuple[Array, Array]]
"""A function that returns the keys [s, k, h, c] and the values [s, k, c, v] of blocks [s, b], in the queries' dtype."""
_MAX_POSITION = 2**30
_MASKED = float(jnp.finfo(jnp.float32).min)
_MIN_ROWS = 2  # a dot of one row is rounded otherwise than the same row among many
_MAX_SINGLES = 2  # a group of 8 decode rows takes 2.5 to 4 times as long as one row, measured


class _Softmax(NamedTuple):
    """The running state of the online softmax, per sequence, kv head and query row."""

    max_skr: Array
    sum_skr: Array
    acc_skrh: Array


def xla_paged_attention(
    q_tnh: Array,
    k_tkh: Array,
    v_tkh: Array,
    kv_pool: SplitPool,
    batch: AttentionBatch,
    *,
    layer: Array | int,
    num_layers: int,
    window: Array | int,
    scale: float,
    soft_cap: float | None = None,
    sinks_n: Array | None = None,
    tiles: Tiles = XLA_TILES,
    interpret: bool = False,
) -> tuple[Array, SplitPool]:
    """See `PagedAttention`; there is nothing to interpret."""
    del interpret
    first_block = layer * (kv_pool.k.shape[0] // num_layers)
    kv_pool = _write(kv_pool, k_tkh, v_tkh, first_block, batch.slots_t)
    k, h = k_tkh.shape[1:]

    def read(blocks_sb: Array) -> tuple[Array, Array]:
        s = len(blocks_sb)
        blocks = (widen(pool[first_block + blocks_sb], k_tkh.dtype, q_tnh.dtype) for pool in kv_pool)
        keys, values = (x.swapaxes(1, 2) for x in blocks)
        return keys.swapaxes(2, 3).reshape(s, k, h, -1), values.reshape(s, k, -1, h)

    out_tnh = attend_step(
        q_tnh,
        batch,
        read,
        num_kv_heads=k,
        value_dim=h,
        block_size=kv_pool.k.shape[-1],
        window=window,
        scale=scale,
        soft_cap=soft_cap,
        sinks_n=sinks_n,
        tiles=tiles,
    )
    return out_tnh, kv_pool


def attend_step(
    q_tnh: Array,
    batch: AttentionBatch,
    read: _Read,
    *,
    num_kv_heads: int,
    value_dim: int,
    block_size: int,
    window: Array | int,
    scale: float,
    soft_cap: float | None = None,
    sinks_n: Array | None = None,
    tiles: Tiles,
) -> Array:
    """Attend all rows of a step over keys and values that are already in the pool; return [t, n, value_dim]."""
    t, n, h = q_tnh.shape
    k, g = num_kv_heads, n // num_kv_heads
    sinks_kg = None if sinks_n is None else sinks_n.astype(jnp.float32).reshape(k, g)

    def attend(q_srkgh: Array, tables_sm: Array, positions_sr: Array, ends_sr: Array | None) -> Array:
        s, r = positions_sr.shape
        out_skrh = _attend(
            q_srkgh.swapaxes(1, 2).reshape(s, k, r * g, h),
            tables_sm,
            jnp.repeat(positions_sr, g, axis=1),
            None if ends_sr is None else jnp.repeat(ends_sr, g, axis=1),
            read=read,
            value_dim=value_dim,
            block_size=block_size,
            window=window,
            scale=scale,
            soft_cap=soft_cap,
            sinks_kg=sinks_kg,
            tile=tiles.kv,
        )
        return out_skrh.reshape(s, k, r, g, value_dim).swapaxes(1, 2)

    nothing = jnp.zeros((k, g, value_dim), q_tnh.dtype)
    return walk_rows(attend, q_tnh.reshape(t, k, g, h), nothing, batch, tiles).reshape(t, n, value_dim)


def walk_rows(compute: _Compute, rows_tx: Any, nothing: Array, batch: AttentionBatch, tiles: Tiles) -> Array:
    """Compute a result for every row of a step: decode rows in groups, longer chunks in tiles of rows.

    Args:
      compute: the function of a group of decode rows, or of a tile of rows of one sequence.
      rows_tx: the step's rows, an array [t, ...] or a tree of them.
      nothing: the result of a row of padding; `compute` returns arrays of such results.
      batch: the positions of the rows.
      tiles: the rows of a group and of a tile.

    Returns:
      The results [t, ...].
    """
    t = len(batch.slots_t)
    # Prefill writes whole tiles; the last one may reach beyond t.
    out = jnp.broadcast_to(nothing, (t + tiles.query, *nothing.shape))
    out = _decode(rows_tx, out, batch, compute, tiles.decode)
    out = _prefill(rows_tx, out, batch, compute, tiles.query)
    return out[:t]


def widen(numbers: Array, kv_dtype: Any, dtype: Any) -> Array:
    """Return a pool's numbers as operands of a matmul: 8-bit floats, held as uint8, become the queries' dtype."""
    return (numbers if numbers.dtype == kv_dtype else lax.bitcast_convert_type(numbers, kv_dtype)).astype(dtype)


def _write(kv_pool: SplitPool, k_tkh: Array, v_tkh: Array, first_block: Array | int, slots_t: Array) -> SplitPool:
    block_size = kv_pool.k.shape[-1]
    blocks_t, offsets_t = first_block + slots_t // block_size, slots_t % block_size
    if k_tkh.dtype != kv_pool.k.dtype:
        k_tkh, v_tkh = (lax.bitcast_convert_type(x, kv_pool.k.dtype) for x in (k_tkh, v_tkh))
    return SplitPool(
        kv_pool.k.at[blocks_t, :, :, offsets_t].set(k_tkh), kv_pool.v.at[blocks_t, :, offsets_t].set(v_tkh)
    )


def _decode(rows_tx: Any, out_tx: Array, batch: AttentionBatch, compute: _Compute, group: int) -> Array:
    """Compute the leading decode rows, `group` at a time, in the order of their lengths.

    A group takes as long as its longest row. One or two rows that are left over are computed singly: a group takes as
    long for them as for all its rows.
    """
    s, tables_sm = batch.context_lens_s.shape[0], batch.block_tables_sm
    group = min(group, s)
    lens_s = jnp.where(jnp.arange(s) < batch.num_decodes, batch.context_lens_s, 0)
    order_s = jnp.arange(s) if s == group else jnp.argsort(lens_s, descending=True)
    # A slice that reaches beyond the end would be moved, not cut, so rows are added; they read and write nothing. There
    # is more than one slice even for one group, or XLA would take its attention out of the loop and always run it.
    order_s = jnp.pad(order_s, (0, group), constant_values=len(out_tx))

    def compute_rows(out_tx: Array, start: Array, count: int) -> Array:
        rows = lax.dynamic_slice_in_dim(order_s, start, count)
        rows_sx, tables, lens = jax.tree.map(
            lambda x: x.at[rows].get(mode="fill", fill_value=0),
            (jax.tree.map(lambda x: x[:s], rows_tx), tables_sm, lens_s),
        )
        result_srx = compute(jax.tree.map(lambda x: x[:, None], rows_sx), tables, lens[:, None] - 1, None)
        return out_tx.at[rows].set(result_srx[:, 0], mode="drop")

    num_groups = (batch.num_decodes + group - 1 - min(_MAX_SINGLES, group - 1)) // group
    out_tx = lax.fori_loop(0, num_groups, lambda i, out: compute_rows(out, i * group, group), out_tx)
    return lax.fori_loop(num_groups * group, batch.num_decodes, lambda i, out: compute_rows(out, i, 1), out_tx)


def _prefill(rows_tx: Any, out_tx: Array, batch: AttentionBatch, compute: _Compute, tile: int) -> Array:
    """Compute the longer chunks, one tile of rows after the other."""
    rows_tx, row_ends_t = jax.tree.map(
        lambda x: jnp.pad(x, ((0, tile), *[(0, 0)] * (x.ndim - 1))), (rows_tx, batch.row_ends_t)
    )

    def body(i: Array, out_tx: Array) -> Array:
        seq, row = batch.tile_seqs_i[i], batch.tile_rows_i[i]
        rows, end = row + jnp.arange(tile), batch.query_ends_s[seq]
        positions = jnp.where(rows < end, batch.context_lens_s[seq] - end + rows, -1)
        table_sm = lax.dynamic_slice_in_dim(batch.block_tables_sm, seq, 1)
        of_tile, row_ends = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row, tile)[None], (rows_tx, row_ends_t))
        ends_sr = None if row_ends is None else jnp.where(rows < end, row_ends, 0)
        [result_rx] = compute(of_tile, table_sm, positions[None], ends_sr)
        # Rows beyond the sequence's end are overwritten by the next tile, or are padding.
        return lax.dynamic_update_slice_in_dim(out_tx, result_rx, row, 0)

    return lax.fori_loop(0, batch.num_tiles, body, out_tx)


def _attend(
    q_skrh: Array,
    tables_sm: Array,
    positions_sr: Array,
    ends_sr: Array | None,
    *,
    read: _Read,
    value_dim: int,
    block_size: int,
    window: Array | int,
    scale: float,
    soft_cap: float | None,
    sinks_kg: Array | None,
    tile: int,
) -> Array:
    """Attend each query row to the positions up to its own, or to its end; a row at position -1 gives 0.

    Rows of a kv head are g query heads of one token after the other.
    """
    s, k, r, _ = q_skrh.shape
    blocks = max(1, tile // block_size)
    tile = blocks * block_size
    tables_sm = jnp.pad(tables_sm, ((0, 0), (0, -tables_sm.shape[1] % blocks)))
    if r < _MIN_ROWS:
        q_skrh = jnp.pad(q_skrh, ((0, 0), (0, 0), (0, _MIN_ROWS - r), (0, 0)))
        positions_sr = jnp.pad(positions_sr, ((0, 0), (0, _MIN_ROWS - r)), constant_values=-1)
    rows = q_skrh.shape[2]
    lengths_s = positions_sr.max(axis=1) + 1 if ends_sr is None else ends_sr.max(axis=1)
    first_tile = jnp.maximum(jnp.where(positions_sr < 0, _MAX_POSITION, positions_sr).min() - window + 1, 0) // tile
    last_tile = (lengths_s.max() + tile - 1) // tile
    # By default a GPU rounds float32 operands to 11 bits, and a TPU to 8.
    precision = lax.Precision.HIGHEST if q_skrh.dtype == jnp.float32 else None
    multiply = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    def body(i: Array, state: _Softmax) -> _Softmax:
        kv_positions = i * tile + jnp.arange(tile)
        k_skhc, v_skch = read(lax.dynamic_slice_in_dim(tables_sm, i * blocks, blocks, axis=1))
        scores = multiply("skrh,skhc->skrc", q_skrh, k_skhc) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        ahead_src = positions_sr[:, :, None] - kv_positions[None, None]
        is_before_end = ahead_src >= 0 if ends_sr is None else kv_positions < ends_sr[:, :, None]
        scores = jnp.where((is_before_end & (ahead_src < window))[:, None], scores, _MASKED)
        max_skr = jnp.maximum(state.max_skr, scores.max(axis=-1))
        # _MASKED - _MASKED is 0: rows that have seen nothing yet must not count masked entries as exp(0).
        probs = jnp.where(scores > _MASKED, jnp.exp(scores - max_skr[..., None]), 0.0)
        decay_skr = jnp.exp(state.max_skr - max_skr)
        # Slots beyond the length may hold anything, and 0 x NaN is NaN.
        is_live_sc = kv_positions[None] < lengths_s[:, None]
        v_skch = jnp.where(is_live_sc[:, None, :, None], v_skch, 0)
        acc = multiply("skrc,skch->skrh", probs.astype(v_skch.dtype), v_skch)
        return _Softmax(
            max_skr, state.sum_skr * decay_skr + probs.sum(axis=-1), state.acc_skrh * decay_skr[..., None] + acc
        )

    nothing = _Softmax(jnp.full((s, k, rows), _MASKED), jnp.zeros((s, k, rows)), jnp.zeros((s, k, rows, value_dim)))
    if sinks_kg is not None:  # one more score per head, without a value
        sinks_kr = jnp.pad(jnp.tile(sinks_kg, (1, r // sinks_kg.shape[1])), ((0, 0), (0, rows - r)))
        nothing = nothing._replace(max_skr=jnp.broadcast_to(sinks_kr, (s, k, rows)), sum_skr=jnp.ones((s, k, rows)))
    state = lax.fori_loop(first_tile, last_tile, body, nothing)
    out = state.acc_skrh / jnp.maximum(state.sum_skr, 1e-30)[..., None]
    return out[:, :, :r].astype(q_skrh.dtype)
