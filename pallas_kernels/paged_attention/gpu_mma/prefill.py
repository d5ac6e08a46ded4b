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
from ..layout import AttentionBatch, FusedPool
from ..row_ends import tile_ends
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
    absent: frozenset[str]
    """The names of the operands that are absent."""
    interpret: bool


class _Operands(NamedTuple):
    """The refs to operands in global memory."""

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
    window_1: Any
    sinks_n: Any
    ends_r: Any
    """One past the last position that each row of each tile sees. This and the next two exist with row ends only."""
    least_ends_i: Any
    """The least end among the rows of each tile."""
    most_ends_i: Any
    """The largest end among them."""


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
    pool = kv_pool.kv
    h = pool.shape[3] // 2
    ends = None if batch.row_ends_t is None else tile_ends(batch, QUERY_TILE, QUERY_TILE)
    operands = _Operands(
        qo_tc,
        pool,
        batch.block_tables_sm,
        batch.context_lens_s,
        batch.query_ends_s,
        batch.tile_seqs_i,
        batch.tile_rows_i,
        _one(batch.num_tiles),
        _one(layer * (pool.shape[0] // num_layers)),
        _one(window),
        None if sinks_n is None else sinks_n.astype(jnp.float32),
        ends and ends.ends_ir.reshape(-1),
        ends and ends.least_ip.reshape(-1),
        ends and ends.most_ip.reshape(-1),
    )
    present = {name: x for name, x in operands._asdict().items() if x is not None}
    absent = frozenset(_Operands._fields) - present.keys()
    settings = _Settings(tiles.kv, scale, soft_cap, absent, interpret)

    def body(*refs: Any, smem: _Smem) -> None:
        named = dict.fromkeys(absent) | dict(zip(present, refs, strict=True))
        _run(settings, _Operands(**named), smem)

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
    kernel(*present.values())


def _one(x: Array | int) -> Array:
    return jnp.asarray(x, jnp.int32).reshape(1)


def _run(settings: _Settings, operands: _Operands, smem: _Smem) -> None:
    # Last tiles first: they see the most, and a long program should not start last. Programs beyond the last tile end.
    tile = operands.num_tiles_1[0] - 1 - lax.axis_index("tile")
    pl.when(tile >= 0)(lambda: _attend(settings, operands, smem, _work(settings, operands, tile)))


class _Work(NamedTuple):
    """The scalars of one program."""

    head: Array
    tile: Array
    seq: Array
    row: Array
    end: Array
    """One past the sequence's last row."""
    shift: Array
    """A row's position in the sequence, minus the row."""
    context_len: Array
    window: Array
    low: Array
    """The first position that the tile sees."""
    least_end: Array
    """The least end among the rows: all of them see the positions from their windows' begin up to it."""
    stop: Array
    """One past the last position that the tile sees."""


def _work(settings: _Settings, operands: _Operands, tile: Array) -> _Work:
    seq = operands.tile_seqs_i[tile]
    row = pl.multiple_of(operands.tile_rows_i[tile], MMA_ROWS)
    end, context_len, window = operands.query_ends_s[seq], operands.context_lens_s[seq], operands.window_1[0]
    shift = context_len - end
    if "ends_r" in settings.absent:
        least_end, stop = row + shift + 1, lax.min(row + QUERY_TILE, end) + shift
    else:
        least_end, stop = operands.least_ends_i[tile], operands.most_ends_i[tile]
    low = lax.max(row + shift - window + 1, 0)
    return _Work(
        lax.axis_index("head"), tile, seq, row, end, shift, context_len, window, low, least_end=least_end, stop=stop
    )


def _attend(settings: _Settings, operands: _Operands, smem: _Smem, work: _Work) -> None:
    """Attend 64 rows."""
    c, interpret = settings.kv_tile, settings.interpret
    h, dtype = smem.q_rh.shape[1], smem.q_rh.dtype
    mma = Operands.of(dtype, row_warps=_WARPS)
    kv_head = lax.div(work.head, operands.qo_tc.shape[1] // h // operands.kv_pool.shape[1])
    tiles = KVTiles(operands.kv_pool, operands.block_tables_sm, operands.first_row_1[0], dtype, c)
    keys, values = pl.ds(0, h), pl.ds(h, h)
    first, stop = lax.div(work.low, c), lax.div(work.stop - 1, c) + 1
    _load_queries(operands, smem, work)
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
        tiles.store(k_pieces, smem.k_ch, position, work.low, work.context_len)
        v_pieces = tiles.load(work.seq, kv_head, position, values)
        synchronize(interpret)  # the last tile's values have been read, too

        scores_rc, unit = in_log2(multiply_keys(), settings.scale, settings.soft_cap)
        is_partial = (position + c > work.least_end) | (position <= work.stop - 1 - work.window)
        mask = partial(_mask, operands, work, mma.sum, position)
        scores_rc = lax.cond(is_partial, mask, lambda x: x, scores_rc * unit)
        new_max_r = jnp.maximum(max_r, scores_rc.max(axis=1))
        decay_r = jnp.exp2(max_r - new_max_r)
        weights_rc = jnp.exp2(scores_rc - along_rows(new_max_r, scores_rc, mma.sum))
        sum_r = sum_r * decay_r + weights_rc.sum(axis=1)
        acc_p = tuple(acc_rh * along_rows(decay_r, acc_rh, mma.sum) for acc_rh in acc_p)

        tiles.store(v_pieces, smem.v_ch, position, work.low, work.context_len)
        more = partial(tiles.load, work.seq, kv_head, position + c, keys)
        # Without another tile, zeros: the present keys would be held in registers until here.
        k_pieces = lax.cond(tile + 1 < stop, more, lambda: tiles.nothing(k_pieces))
        synchronize(interpret)  # the keys have been read, too
        weights_rc = as_operand(weights_rc, dtype, mma, interpret)
        return tuple(add_values(weights_rc, *some) for some in enumerate(acc_p)), new_max_r, sum_r, k_pieces

    row = mma.sum.reduce(1)
    acc_p = tuple(zeros((QUERY_TILE, _COLUMNS), mma.sum) for _ in range(h // _COLUMNS))
    nothing = acc_p, zeros((QUERY_TILE,), row) + LOWEST, zeros((QUERY_TILE,), row)
    first_keys = tiles.load(work.seq, kv_head, first * c, keys)
    acc_p, max_r, sum_r, _ = lax.fori_loop(first, stop, step, (*nothing, first_keys))
    if operands.sinks_n is not None:
        sum_r += jnp.exp2(operands.sinks_n[work.head] * LOG2_E - max_r)
    inverse_r = 1.0 / jnp.maximum(sum_r, TINY)
    for part, acc_rh in enumerate(acc_p):
        out_rh = (acc_rh * along_rows(inverse_r, acc_rh, mma.sum)).astype(dtype)
        smem.q_rh[:, pl.ds(part * _COLUMNS, _COLUMNS)] = out_rh
    synchronize(interpret)
    _store_results(operands, smem, work)


def _pieces(work: _Work, h: int) -> list[tuple[Array, Any, Any]]:
    """Return the first row of each 16 rows, their place in memory and in shared memory."""
    columns, pieces = pl.ds(pl.multiple_of(work.head * h, h), h), []
    last = lax.div(work.end - 1, MMA_ROWS) * MMA_ROWS
    for start in range(0, QUERY_TILE, MMA_ROWS):
        # Rows beyond the sequence's end may be another program's, so the last piece is read again.
        rows = pl.ds(pl.multiple_of(lax.min(work.row + start, last), MMA_ROWS), MMA_ROWS)
        pieces.append((work.row + start, (rows, columns), pl.ds(start, MMA_ROWS)))
    return pieces


def _load_queries(operands: _Operands, smem: _Smem, work: _Work) -> None:
    pieces = _pieces(work, smem.q_rh.shape[1])
    load = partial(plgpu.load, layout=COPY_LAYOUT, optimized=False)
    for q_rh, (_, _, target) in zip([load(operands.qo_tc.at[at]) for _, at, _ in pieces], pieces, strict=True):
        smem.q_rh[target] = q_rh


def _store_results(operands: _Operands, smem: _Smem, work: _Work) -> None:
    for row, at, source in _pieces(work, smem.q_rh.shape[1]):

        @pl.when(row < work.end)
        def _(at: Any = at, source: Any = source) -> None:
            operands.qo_tc[at] = plgpu.load(smem.q_rh.at[source], layout=COPY_LAYOUT)


def _mask(operands: _Operands, work: _Work, layout: Any, first_position: Array, scores_rc: Array) -> Array:
    """Hide the positions before each row's window and those that it does not see yet."""
    iota = partial(plgpu.broadcasted_iota, jnp.int32, scores_rc.shape, layout=layout)
    # Rows of padding see what the last row sees: finite, and nothing beyond the context.
    positions_rc = lax.min(iota(0) + (work.row + work.shift), work.context_len - 1)
    keys_rc = iota(1) + first_position
    distance_rc = positions_rc - keys_rc
    if operands.ends_r is None:
        return jnp.where((distance_rc >= 0) & (distance_rc < work.window), scores_rc, -jnp.inf)
    first = pl.multiple_of(work.tile * QUERY_TILE, QUERY_TILE)
    ends_r = plgpu.load(operands.ends_r.at[pl.ds(first, QUERY_TILE)], layout=layout.reduce(1), optimized=False)
    return jnp.where((keys_rc < along_rows(ends_r, keys_rc, layout)) & (distance_rc < work.window), scores_rc, -jnp.inf)
