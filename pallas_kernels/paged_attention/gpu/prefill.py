"""Ragged paged prefill for Hopper, in the shape of FlashAttention-3.

One program is one query head and one tile of 128 query rows of one sequence. Warpgroups 0 and 1 take 64 rows each and
alternate, one in its softmax while the other has the tensor cores; warpgroup 2 loads K and V from the blocks, one TMA
per block and operand, through a ring of stages. A program's results replace its queries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..layout import AttentionBatch, FusedPool
from ..tiles import Tiles
from . import handover
from .common import (
    LOG2_E,
    MMA_ROWS,
    SMEM_BYTES,
    along_rows,
    compiler_params,
    in_log2,
    interpret_params,
    live_rows,
    tiled_smem,
)
from .prefill_operands import STORE_ROWS, PrefillOperands, QueryTile
from .turns import Turns

_COMPUTE_WARPGROUPS = 2
_PRODUCER = _COMPUTE_WARPGROUPS
QUERY_TILE = _COMPUTE_WARPGROUPS * MMA_ROWS
# 2 x 224 + 56 = 504 registers: the limit for a thread of each warpgroup together.
_COMPUTE_REGISTERS, _PRODUCER_REGISTERS = 224, 56
_OVERHEAD_BYTES = 3 * 1024
"""The shared memory of barriers and of Mosaic GPU's own 2 KiB."""
# With one stage, a warpgroup that skips a tile could free the stage for the other, which may be one tile behind.
_MIN_STAGES, _MAX_STAGES = 2, 4
# Where products overlap, the other's values of the tile before are in use for longer.
_MIN_OVERLAPPED_STAGES = 3
_PART_COLUMNS = 64
"""The columns that the producer, which has few registers, handles at a time."""


class _Config(NamedTuple):
    """The settings that the kernel is compiled for, besides the shapes of its operands."""

    group: int
    head_dim: int
    block_size: int
    kv_tile: int
    kv_dtype: Any
    scale: float
    soft_cap: float | None
    may_overlap: bool
    """Whether products overlap where registers and shared memory allow it, see `Turns`."""
    interpret: bool

    @property
    def piece(self) -> int:
        """Return the number of tokens that one TMA brings."""
        return min(self.block_size, self.kv_tile)

    @property
    def num_pieces(self) -> int:
        return self.kv_tile // self.piece

    @property
    def converts(self) -> bool:
        """Return whether the pool has another dtype than the matmuls."""
        return self.kv_dtype != jnp.bfloat16

    @property
    def raw_stages(self) -> int:
        """Return the number of buffers for tiles in the pool's dtype, before they are converted."""
        if not self.converts:
            return 0
        return 2 if self.head_dim < 256 else 1

    @property
    def stages(self) -> int:
        """Return the number of stages that fit in the shared memory."""
        q_bytes = QUERY_TILE * self.head_dim * 2
        kv_bytes = self.kv_tile * self.head_dim * 2
        raw_bytes = self.raw_stages * kv_bytes
        return min(_MAX_STAGES, (SMEM_BYTES - _OVERHEAD_BYTES - q_bytes - raw_bytes) // (2 * kv_bytes))

    @property
    def overlaps(self) -> bool:
        # Above h = 128 the registers do not hold scores, weights and results at the same time.
        return self.may_overlap and self.head_dim <= 128 and self.stages >= _MIN_OVERLAPPED_STAGES


class _Smem(NamedTuple):
    """The refs in SMEM: w compute warpgroups, r rows of one, c tokens of a KV tile, a stages."""

    q_wrh: Any
    k_ach: Any
    v_ach: Any
    raw_ac2h: Any
    probs_wrc: Any


class _Barriers(NamedTuple):
    """The barriers: of filled and emptied stages, per warpgroup or stage, and of the warpgroups' turns."""

    q_w: Any
    k_a: Any
    v_a: Any
    k_free_a: Any
    v_free_a: Any
    raw_a: Any
    turn: Any


class _Program(NamedTuple):
    """The work of one program, with its refs."""

    config: _Config
    operands: PrefillOperands
    smem: _Smem
    barriers: _Barriers
    query: QueryTile
    first: Array
    """The first KV tile that the rows see."""
    stop: Array
    """One past the last KV tile that the rows see."""


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
    and each row of a wgmma is summed for itself. Rows from a sequence's end to the next multiple of 16 become finite.
    """
    pool = kv_pool.kv
    h = pool.shape[3] // 2
    n = qo_tc.shape[1] // h
    if tiles.query != QUERY_TILE or tiles.kv % MMA_ROWS:
        raise ValueError(f"prefill takes tiles of 128 query rows and a multiple of 64 tokens, not {tiles}")
    operands = PrefillOperands.of(
        qo_tc,
        kv_pool,
        batch,
        layer=layer,
        num_layers=num_layers,
        window=window,
        sinks_n=sinks_n,
        tile_rows=QUERY_TILE,
        part_rows=MMA_ROWS,
    )
    config = _Config(
        group=n // pool.shape[1],
        head_dim=h,
        block_size=pool.shape[2],
        kv_tile=tiles.kv,
        kv_dtype=pool.dtype,
        scale=scale,
        soft_cap=soft_cap,
        may_overlap=handover.CHOSEN.overlaps,
        interpret=interpret,
    )
    if config.stages < _MIN_STAGES:
        raise ValueError(f"prefill: {_MIN_STAGES} KV tiles of {tiles.kv} tokens do not fit in shared memory at h={h}")

    def body(*refs: Any, smem: _Smem, barriers: _Barriers) -> None:
        _run(config, operands.with_refs(refs), smem, barriers)

    kernel = plgpu.kernel(
        body,
        out_type=(),
        # The heads of a group run side by side and share their K and V in the L2 cache.
        grid=(batch.tile_seqs_i.shape[0], n),
        grid_names=("tile", "head"),
        num_threads=_COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types={"smem": _smem(config), "barriers": _barriers(config)},
        kernel_name="paged_prefill",
        compiler_params=compiler_params(),
        interpret=interpret_params(interpret),
    )
    kernel(*operands.present())


def _smem(config: _Config) -> _Smem:
    h, c = config.head_dim, config.kv_tile
    rows = (_COMPUTE_WARPGROUPS, MMA_ROWS)
    return _Smem(
        q_wrh=tiled_smem((*rows, h), jnp.bfloat16),
        k_ach=tiled_smem((config.stages, c, h), jnp.bfloat16),
        v_ach=tiled_smem((config.stages, c, h), jnp.bfloat16),
        raw_ac2h=tiled_smem((config.raw_stages, c, 2 * h), config.kv_dtype, columns=_PART_COLUMNS)
        if config.converts
        else None,
        probs_wrc=tiled_smem((*rows, c), jnp.bfloat16) if config.interpret else None,
    )


def _barriers(config: _Config) -> _Barriers:
    stages, both = config.stages, _COMPUTE_WARPGROUPS
    arrivals = 1 if config.converts else config.num_pieces
    return _Barriers(
        q_w=plgpu.Barrier(num_arrivals=MMA_ROWS // STORE_ROWS, num_barriers=both),
        k_a=plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        v_a=plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        k_free_a=plgpu.Barrier(num_arrivals=both, num_barriers=stages),
        v_free_a=plgpu.Barrier(num_arrivals=both, num_barriers=stages),
        raw_a=plgpu.Barrier(num_arrivals=config.num_pieces, num_barriers=max(1, config.raw_stages)),
        turn=plgpu.Barrier(num_arrivals=both),
    )


def _run(config: _Config, operands: PrefillOperands, smem: _Smem, barriers: _Barriers) -> None:
    warpgroup = lax.axis_index("warpgroup")
    # Last tiles first: they see the most, and a long program should not start last. Programs beyond the last tile end.
    tile = operands.num_tiles_1[0] - 1 - lax.axis_index("tile")

    @pl.when(tile >= 0)
    def _() -> None:
        query = operands.query_tile(tile, QUERY_TILE)
        first, stop = lax.div(query.low, config.kv_tile), lax.div(query.last, config.kv_tile) + 1
        program = _Program(config, operands, smem, barriers, query, first, stop)

        @pl.when(warpgroup < _COMPUTE_WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            _compute(program, warpgroup)

        @pl.when(warpgroup == _PRODUCER)
        def _() -> None:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            _produce(program)


def _compute(program: _Program, warpgroup: Array) -> None:
    """Attend 64 rows."""
    config, operands, smem, barriers, query = program[:5]
    h, c = config.head_dim, config.kv_tile
    row = query.row + warpgroup * MMA_ROWS
    last_row = lax.min(row + MMA_ROWS, query.end) - 1
    least_end, last = row + query.shift + 1, last_row + query.shift
    if operands.row_ends_r is not None:
        half = query.tile * _COMPUTE_WARPGROUPS + warpgroup
        least_end, last = operands.least_ends_p[half], operands.most_ends_p[half] - 1
    # Past its own last KV tile, and if all of its rows are beyond the end, a warpgroup only keeps the turns.
    stop = jnp.where(row < query.end, lax.div(last, c) + 1, program.first)

    q_rh = smem.q_wrh.at[warpgroup]
    columns = pl.ds(pl.multiple_of(query.head * h, h), h)
    last_piece = lax.div(query.end - 1, STORE_ROWS) * STORE_ROWS
    for first in range(0, MMA_ROWS, STORE_ROWS):
        # Rows beyond the sequence's end may be another program's, so the last piece is read again.
        piece = pl.ds(pl.multiple_of(lax.min(row + first, last_piece), STORE_ROWS), STORE_ROWS)
        target = q_rh.at[pl.ds(first, STORE_ROWS)]
        plgpu.copy_gmem_to_smem(operands.qo_tc.at[piece, columns], target, barriers.q_w.at[warpgroup])
    plgpu.barrier_wait(barriers.q_w.at[warpgroup])

    mask = partial(_mask_by_row_ends, program, warpgroup) if operands.row_ends_r is not None else partial(_mask, query)

    def weigh(scores_rc: Array, tile: Array) -> tuple[Array, float]:
        scores_rc, unit = in_log2(scores_rc, config.scale, config.soft_cap)
        is_partial = ((tile + 1) * c > least_end) | (tile * c <= last_row + query.shift - query.window)
        return lax.cond(is_partial, lambda x: mask(x, row, tile * c), lambda x: x, scores_rc), unit

    turns = Turns(warpgroup, smem, barriers, overlaps=config.overlaps)
    acc_rh, max_r, sum_r = turns.attend(program.first, stop, program.stop, weigh)

    if operands.sinks_n is not None:
        sum_r += jnp.exp2(operands.sinks_n[query.head] * LOG2_E - max_r)
    q_rh[...] = (acc_rh * along_rows(1.0 / sum_r, acc_rh)).astype(jnp.bfloat16)
    plgpu.commit_smem()
    # Otherwise addresses of these are computed with those of the queries, and held in registers all the while.
    row, head = lax.optimization_barrier((row, query.head))
    columns = pl.ds(pl.multiple_of(head * h, h), h)
    for first in range(0, MMA_ROWS, STORE_ROWS):
        source = q_rh.at[pl.ds(first, STORE_ROWS)]
        target = operands.qo_tc.at[pl.ds(pl.multiple_of(row + first, STORE_ROWS), STORE_ROWS), columns]
        pl.when(row + first < query.end)(partial(plgpu.copy_smem_to_gmem, source, target))
    plgpu.wait_smem_to_gmem(0)


def _mask(query: QueryTile, scores_rc: Array, row: Array, first_position: Array) -> Array:
    """Hide the positions after each row's own or before its window; the first row is `row`."""
    iota = partial(plgpu.broadcasted_iota, jnp.int32, scores_rc.shape, layout=plgpu.Layout.WGMMA)
    # Rows of padding see what the last row sees: finite, and nothing beyond the context.
    positions_rc = lax.min(iota(0) + (row + query.shift), query.context_len - 1)
    distance_rc = positions_rc - (iota(1) + first_position)
    return jnp.where((distance_rc >= 0) & (distance_rc < query.window), scores_rc, -jnp.inf)


def _mask_by_row_ends(
    program: _Program, warpgroup: Array, scores_rc: Array, row: Array, first_position: Array
) -> Array:
    """Hide the positions before each row's window, and from its end on; the first row is `row`."""
    query, layout = program.query, plgpu.Layout.WGMMA
    first = pl.multiple_of((query.tile * _COMPUTE_WARPGROUPS + warpgroup) * MMA_ROWS, MMA_ROWS)
    ends_r = program.operands.row_ends_r.at[pl.ds(first, MMA_ROWS)]
    ends_r = plgpu.load(ends_r, layout=layout.reduce(1), optimized=False)
    rows_r = plgpu.broadcasted_iota(jnp.int32, (MMA_ROWS,), 0, layout=layout.reduce(1))
    positions_r = lax.min(rows_r + (row + query.shift), query.context_len - 1)
    begins_r = positions_r - (query.window - 1)
    # Positions, not columns: a value that does not depend on the KV tile would be held in registers all through the
    # loop.
    keys_rc = plgpu.broadcasted_iota(jnp.int32, scores_rc.shape, 1, layout=layout) + first_position
    is_seen_rc = (keys_rc < along_rows(ends_r, scores_rc)) & (keys_rc >= along_rows(begins_r, scores_rc))
    return jnp.where(is_seen_rc, scores_rc, -jnp.inf)


def _produce(program: _Program) -> None:
    """Keep the stages full."""
    config = program.config
    fill = _fill_by_conversion if config.converts else _fill
    if config.converts:
        _fetch_raw(program, program.first)

    @pl.loop(program.first, program.stop)
    def _(tile: Array) -> None:
        number = tile - program.first
        stage = lax.rem(number, config.stages)

        def wait_until_free(barrier_a: Any) -> None:
            pl.when(number >= config.stages)(partial(plgpu.barrier_wait, barrier_a.at[stage]))

        fill(program, tile, stage, wait_until_free)

    if not config.interpret:
        return

    # jax 0.11's interpreter requires that a waiting thread sees all phases of a barrier.
    @pl.loop(lax.max(program.stop - config.stages, program.first), program.stop)
    def _(tile: Array) -> None:
        stage = lax.rem(tile - program.first, config.stages)
        plgpu.barrier_wait(program.barriers.k_free_a.at[stage])
        plgpu.barrier_wait(program.barriers.v_free_a.at[stage])


def _sources(program: _Program, tile: Array) -> list[Any]:
    """Return the pool's slices [piece, 2 * h] of a KV tile.

    Pieces beyond the context repeat its last block, and pieces before the window its first: earlier blocks may be
    another sequence's by now, and hold anything, and 0 x NaN is NaN. Only the context's last block has empty slots, and
    the tile with it is cleared.
    """
    config, operands, query = program.config, program.operands, program.query
    kv_head = lax.div(query.head, config.group)
    first_block = lax.div(query.low, config.block_size)
    last_block = lax.div(query.context_len - 1, config.block_size)
    sources = []
    for j in range(config.num_pieces):
        token = tile * config.kv_tile + j * config.piece
        block = lax.max(first_block, lax.min(lax.div(token, config.block_size), last_block))
        row = operands.first_row_1[0] + operands.block_tables_sm[query.seq, block]
        source = operands.kv_pool.at[row, kv_head]
        if config.piece < config.block_size:
            offset = pl.multiple_of(lax.rem(token, config.block_size), config.piece)
            source = source.at[pl.ds(offset, config.piece)]
        sources.append(source)
    return sources


def _live(program: _Program, tile: Array) -> tuple[Array, Array]:
    """Return the first row of a KV tile that the query tile sees, and one past the last that is in the context.

    Rows before the first may be those of a block with empty slots, which stands for earlier blocks.
    """
    start = tile * program.config.kv_tile
    return program.query.low - start, program.query.context_len - start


def _copy(config: _Config, sources: list[Any], column: int, target_ch: Any, barrier: Any) -> None:
    """Start to copy as many columns as the target has, from `column` on."""
    for j, source in enumerate(sources):
        target = target_ch.at[pl.ds(j * config.piece, config.piece)]
        plgpu.copy_gmem_to_smem(source.at[:, pl.ds(column, target_ch.shape[-1])], target, barrier)


def _fill(program: _Program, tile: Array, stage: Array, wait_until_free: Callable[[Any], None]) -> None:
    """Load a KV tile."""
    config, barriers = program.config, program.barriers
    k_ch, v_ch = program.smem.k_ach.at[stage], program.smem.v_ach.at[stage]
    # Block ids are read before the stage is free.
    sources = _sources(program, tile)
    wait_until_free(barriers.k_free_a)
    _copy(config, sources, 0, k_ch, barriers.k_a.at[stage])
    wait_until_free(barriers.v_free_a)
    first, live = _live(program, tile)

    @pl.when(live >= config.kv_tile)
    def _() -> None:
        _copy(config, sources, config.head_dim, v_ch, barriers.v_a.at[stage])

    @pl.when(live < config.kv_tile)
    def _() -> None:
        # Slots beyond the context may hold anything, and 0 x NaN is NaN.
        _copy(config, sources, config.head_dim, v_ch, barriers.raw_a.at[0])
        plgpu.barrier_wait(barriers.raw_a.at[0])
        for rows, columns in _parts(config):
            part = v_ch.at[rows, columns]
            part[...] = live_rows(part[...], rows, live, plgpu.Layout.WGMMA, first)
        plgpu.commit_smem()
        for _ in range(config.num_pieces):
            plgpu.barrier_arrive(barriers.v_a.at[stage])


def _fetch_raw(program: _Program, tile: Array) -> None:
    """Start to load a KV tile in the pool's dtype, if there is one."""
    config = program.config

    @pl.when(tile < program.stop)
    def _() -> None:
        raw = lax.rem(tile - program.first, config.raw_stages)
        sources = _sources(program, tile)
        _copy(config, sources, 0, program.smem.raw_ac2h.at[raw], program.barriers.raw_a.at[raw])


def _fill_by_conversion(program: _Program, tile: Array, stage: Array, wait_until_free: Callable[[Any], None]) -> None:
    """Convert a KV tile to bfloat16, while the next one is loaded if there is a second buffer for it."""
    config, smem, barriers = program.config, program.smem, program.barriers
    raw = lax.rem(tile - program.first, config.raw_stages)
    raw_c2h, (first, live) = smem.raw_ac2h.at[raw], _live(program, tile)

    def convert(target_ch: Any, first_column: int) -> None:
        layout = plgpu.Layout.WGMMA_UPCAST_2X
        for rows, columns in _parts(config):
            part = plgpu.load(raw_c2h.at[rows, pl.ds(first_column + columns.start, columns.size)], layout=layout)
            # The hardware takes float8 to float16 only.
            part = part.astype(jnp.float32).astype(jnp.bfloat16)
            if first_column:
                clear = partial(live_rows, rows=rows, live=live, layout=layout, first=first)
                part = lax.cond(live < config.kv_tile, clear, lambda x: x, part)
            target_ch[rows, columns] = part
        plgpu.commit_smem()

    if config.raw_stages > 1:
        _fetch_raw(program, tile + 1)
    plgpu.barrier_wait(barriers.raw_a.at[raw])
    wait_until_free(barriers.k_free_a)
    convert(smem.k_ach.at[stage], 0)
    plgpu.barrier_arrive(barriers.k_a.at[stage])
    wait_until_free(barriers.v_free_a)
    convert(smem.v_ach.at[stage], config.head_dim)
    plgpu.barrier_arrive(barriers.v_a.at[stage])
    if config.raw_stages == 1:
        _fetch_raw(program, tile + 1)


def _parts(config: _Config) -> list[tuple[Any, Any]]:
    """Divide a tile of K or V into parts that the producer's few registers hold."""
    return [
        (pl.ds(row, MMA_ROWS), pl.ds(column, _PART_COLUMNS))
        for row in range(0, config.kv_tile, MMA_ROWS)
        for column in range(0, config.head_dim, _PART_COLUMNS)
    ]
