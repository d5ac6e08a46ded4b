"""Ragged paged prefill in the manner of FlashAttention-2.

A thread block of four warps takes one query head of 64 query rows of one sequence, 16 rows a warp, past the KV tiles
that they see. A tile's V is on its way to registers while its K is multiplied, and the next tile's K while its V is.
Results replace the queries.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..gpu.common import LOG2_E, LOWEST, TINY, in_log2, interpret_params, tiled_smem
from ..gpu.prefill_operands import PrefillOperands, QueryTile
from ..layout import AttentionBatch, FusedPool
from ..tiles import Tiles
from .common import (
    COPY_LAYOUT,
    MMA_ROWS,
    KVTiles,
    Operands,
    add_product,
    along_rows,
    as_operand,
    compiler_params,
    synchronize,
    zeros,
)

_WARPS = 4
QUERY_TILE = _WARPS * MMA_ROWS
# The columns of a head, and the rows of values, that are multiplied at a time. They bound the registers, as each warp
# needs all keys and values.
_COLUMNS = 64
_VALUE_ROWS = 16


class _Settings(NamedTuple):
    """What the kernel is compiled for, besides the shapes of its operands."""

    kv_tile: int
    scale: float
    soft_cap: float | None
    interpret: bool


class _Smem(NamedTuple):
    """The shared memory: the queries, later the results, and a tile of keys and one of values."""

    q_rh: Any
    k_ch: Any
    v_ch: Any


def prefill_attention(
    qo_tc: Any,
    kv_pool: FusedPool,
    batch: AttentionBatch,
    *,
    layer: Array | int,
    num_layers: int,
    window: Array | int,
    scale: float,
    soft_cap: float | None = None,
    sinks_n: Array | None = None,
    tiles: Tiles,
    interpret: bool = False,
) -> None:
    """Attend the rows of the batch's tiles; this step's K and V are in the pool already.

    `qo_tc` is a Ref to the queries [t, n * h], t a multiple of 16; the tiles' rows get their results, the others are
    unchanged. A row's result depends on its sequence and position only, to the bit: KV tiles are cut from position 0,
    and each row of an mma is summed for itself. Rows from a sequence's end to the next multiple of 16 become finite.
    """
    h = kv_pool.kv.shape[3] // 2
    operands = PrefillOperands.of(
        qo_tc,
        kv_pool,
        batch,
        layer=layer,
        num_layers=num_layers,
        window=window,
        sinks_n=sinks_n,
        tile_rows=QUERY_TILE,
        part_rows=QUERY_TILE,
    )
    settings = _Settings(tiles.kv, scale, soft_cap, interpret)

    def body(*refs: Any, smem: _Smem) -> None:
        _run(settings, operands.with_refs(refs), smem)

    kernel = plgpu.kernel(
        body,
        out_type=(),
        # The heads of a group run side by side and share their K and V in the L2 cache.
        grid=(batch.tile_seqs_i.shape[0], qo_tc.shape[1] // h),
        grid_names=("tile", "head"),
        scratch_types={"smem": _Smem(*(tiled_smem((rows, h), qo_tc.dtype) for rows in (QUERY_TILE, *[tiles.kv] * 2)))},
        kernel_name="paged_prefill",
        compiler_params=compiler_params(),
        interpret=interpret_params(interpret),
    )
    kernel(*operands.present())


def _run(settings: _Settings, operands: PrefillOperands, smem: _Smem) -> None:
    # Last tiles first: they see the most, and a long program should not start last. Programs beyond the last tile end.
    tile = operands.num_tiles_1[0] - 1 - lax.axis_index("tile")
    pl.when(tile >= 0)(lambda: _attend(settings, operands, smem, operands.query_tile(tile, QUERY_TILE)))


def _attend(settings: _Settings, operands: PrefillOperands, smem: _Smem, query: QueryTile) -> None:
    """Attend 64 rows."""
    c, interpret = settings.kv_tile, settings.interpret
    h, dtype = smem.q_rh.shape[1], smem.q_rh.dtype
    mma = Operands.of(dtype, row_warps=_WARPS)
    kv_head = lax.div(query.head, operands.qo_tc.shape[1] // h // operands.kv_pool.shape[1])
    tiles = KVTiles(operands.kv_pool, operands.block_tables_sm, operands.first_row_1[0], dtype, c)
    keys, values = pl.ds(0, h), pl.ds(h, h)
    first, stop = lax.div(query.low, c), lax.div(query.last, c) + 1
    # All of the rows see the positions from their windows' begin up to the least end among them.
    least_end = query.row + query.shift + 1 if operands.row_ends_r is None else operands.least_ends_p[query.tile]
    _load_queries(operands, smem, query)
    synchronize(interpret)

    def multiply_keys() -> Array:
        scores_rc = zeros((QUERY_TILE, c), mma.sum)
        for column in range(0, h, _COLUMNS):
            columns = pl.ds(column, _COLUMNS)
            q_rh = plgpu.load(smem.q_rh.at[:, columns], layout=mma.lhs)
            keys_hc = plgpu.load(smem.k_ch.at[:, columns].T, layout=mma.rhs)
            scores_rc = add_product(scores_rc, q_rh, keys_hc, interpret)
        return scores_rc

    def add_values(weights_rc: Array, part: int, acc_rh: Array) -> Array:
        columns = pl.ds(part * _COLUMNS, _COLUMNS)
        for start in range(0, c, _VALUE_ROWS):
            values_ch = plgpu.load(smem.v_ch.at[pl.ds(start, _VALUE_ROWS), columns], layout=mma.rhs)
            acc_rh = add_product(acc_rh, weights_rc[:, start : start + _VALUE_ROWS], values_ch, interpret)
        return acc_rh

    def step(tile: Array, state: Any) -> Any:
        acc_p, max_r, sum_r, k_pieces = state
        position = tile * c
        tiles.store(k_pieces, smem.k_ch, position, query.low, query.context_len)
        v_pieces = tiles.load(query.seq, kv_head, position, values)
        synchronize(interpret)  # the last tile's values have been read, too

        scores_rc, unit = in_log2(multiply_keys(), settings.scale, settings.soft_cap)
        is_partial = (position + c > least_end) | (position <= query.last - query.window)
        mask = partial(_mask, operands, query, mma.sum, position)
        scores_rc = lax.cond(is_partial, mask, lambda x: x, scores_rc * unit)
        new_max_r = jnp.maximum(max_r, scores_rc.max(axis=1))
        decay_r = jnp.exp2(max_r - new_max_r)
        weights_rc = jnp.exp2(scores_rc - along_rows(new_max_r, scores_rc, mma.sum))
        sum_r = sum_r * decay_r + weights_rc.sum(axis=1)
        acc_p = tuple(acc_rh * along_rows(decay_r, acc_rh, mma.sum) for acc_rh in acc_p)

        tiles.store(v_pieces, smem.v_ch, position, query.low, query.context_len)
        more = partial(tiles.load, query.seq, kv_head, position + c, keys)
        # Without another tile, zeros: the present keys would be held in registers until here.
        k_pieces = lax.cond(tile + 1 < stop, more, lambda: tiles.nothing(k_pieces))
        synchronize(interpret)  # the keys have been read, too
        weights_rc = as_operand(weights_rc, dtype, mma, interpret)
        return tuple(add_values(weights_rc, *some) for some in enumerate(acc_p)), new_max_r, sum_r, k_pieces

    row = mma.sum.reduce(1)
    acc_p = tuple(zeros((QUERY_TILE, _COLUMNS), mma.sum) for _ in range(h // _COLUMNS))
    nothing = acc_p, zeros((QUERY_TILE,), row) + LOWEST, zeros((QUERY_TILE,), row)
    first_keys = tiles.load(query.seq, kv_head, first * c, keys)
    acc_p, max_r, sum_r, _ = lax.fori_loop(first, stop, step, (*nothing, first_keys))
    if operands.sinks_n is not None:
        sum_r += jnp.exp2(operands.sinks_n[query.head] * LOG2_E - max_r)
    inverse_r = 1.0 / jnp.maximum(sum_r, TINY)
    for part, acc_rh in enumerate(acc_p):
        out_rh = (acc_rh * along_rows(inverse_r, acc_rh, mma.sum)).astype(dtype)
        smem.q_rh[:, pl.ds(part * _COLUMNS, _COLUMNS)] = out_rh
    synchronize(interpret)
    _store_results(operands, smem, query)


def _pieces(query: QueryTile, h: int) -> list[tuple[Array, Any, Any]]:
    """Return the first row of each 16 rows, their place in memory and in shared memory."""
    columns, pieces = pl.ds(pl.multiple_of(query.head * h, h), h), []
    last = lax.div(query.end - 1, MMA_ROWS) * MMA_ROWS
    for start in range(0, QUERY_TILE, MMA_ROWS):
        # Rows beyond the sequence's end may be another program's, so the last piece is read again.
        rows = pl.ds(pl.multiple_of(lax.min(query.row + start, last), MMA_ROWS), MMA_ROWS)
        pieces.append((query.row + start, (rows, columns), pl.ds(start, MMA_ROWS)))
    return pieces


def _load_queries(operands: PrefillOperands, smem: _Smem, query: QueryTile) -> None:
    pieces = _pieces(query, smem.q_rh.shape[1])
    load = partial(plgpu.load, layout=COPY_LAYOUT, optimized=False)
    for q_rh, (_, _, target) in zip([load(operands.qo_tc.at[at]) for _, at, _ in pieces], pieces, strict=True):
        smem.q_rh[target] = q_rh


def _store_results(operands: PrefillOperands, smem: _Smem, query: QueryTile) -> None:
    for row, at, source in _pieces(query, smem.q_rh.shape[1]):

        @pl.when(row < query.end)
        def _(at: Any = at, source: Any = source) -> None:
            operands.qo_tc[at] = plgpu.load(smem.q_rh.at[source], layout=COPY_LAYOUT)


def _mask(operands: PrefillOperands, query: QueryTile, layout: Any, first_position: Array, scores_rc: Array) -> Array:
    """Hide the positions before each row's window and those that it does not see yet."""
    iota = partial(plgpu.broadcasted_iota, jnp.int32, scores_rc.shape, layout=layout)
    # Rows of padding see what the last row sees: finite, and nothing beyond the context.
    positions_rc = lax.min(iota(0) + (query.row + query.shift), query.context_len - 1)
    keys_rc = iota(1) + first_position
    distance_rc = positions_rc - keys_rc
    if operands.row_ends_r is None:
        return jnp.where((distance_rc >= 0) & (distance_rc < query.window), scores_rc, -jnp.inf)
    first = pl.multiple_of(query.tile * QUERY_TILE, QUERY_TILE)
    ends_r = plgpu.load(operands.row_ends_r.at[pl.ds(first, QUERY_TILE)], layout=layout.reduce(1), optimized=False)
    return jnp.where(
        (keys_rc < along_rows(ends_r, keys_rc, layout)) & (distance_rc < query.window), scores_rc, -jnp.inf
    )
