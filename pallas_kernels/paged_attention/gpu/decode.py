"""Paged attention of decode rows on Hopper: one query token per sequence, the context cut into splits.

A work item is one kv head of one split of one sequence. As many thread blocks as there are SMs each walk their share of
the items. In each, a producer warpgroup streams KV tiles by TMA into a ring of shared memory, and begins the next
item's before this one ends. Two consumer warpgroups attend with wgmma, the g query heads of the kv head padded to 64
rows. Up to h = 128 each takes half of a tile's positions, above it half of the columns of V, as the registers of one
would not hold all of them. Their result for an item is a part of its row; a second kernel adds up a row's parts, in
order.

Where splits and tiles begin depends on a row's own context and on the shapes of the step's arrays, so its result is
bitwise the same in every batch of these shapes. It is not bitwise that of the prefill kernel, which sums a row's tiles
in one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import batched
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from ..layout import AttentionBatch, FusedPool
from . import handover
from .combine import combine_splits, heads_at_a_time
from .common import (
    LOWEST,
    MMA_ROWS,
    SMEM_BYTES,
    SMEM_RESERVED,
    TINY,
    WORKERS,
    accumulator,
    along_rows,
    compiler_params,
    decode_query_dtype,
    in_log2,
    interpret_params,
    num_workers,
    online_softmax,
    product,
    query_unit,
    row_vector,
    smem_bytes,
    tiled_smem,
)
from .handover import PROVEN, Handover
from .splits import DecodeWork, SplitRule, decode_work, split_rule

# The positions of a KV tile that a group of consumers attends: the rows of the layout in which values are masked.
_ROWS = 64
_QUERY_BUFFERS = 2
# The columns of V that are multiplied, and of a result that are stored, at a time. They bound the registers.
_VALUE_COLUMNS = 64
_STORE_COLUMNS = 32
# The columns of an 8-bit pool that are widened at a time: a swizzled tile of it.
_CONVERTED_COLUMNS = 128
# The shared memory of reductions among threads, instead of 2 KiB. There are none here but in rows, which need none.
_REDUCTION_BYTES = 1024
# The layout of widened numbers: a thread has four neighbours of a row, a word of the pool.
_WIDENED = plgpu.Layout.WGMMA_UPCAST_2X


class DecodeConfig(NamedTuple):
    """The sizes that the kernel is compiled with for a shape."""

    groups: int
    """The number of parts of a KV tile that are attended at the same time."""
    shares: int
    """The number of warpgroups that attend each part; each multiplies its share of the columns of V."""
    stage_groups: int
    """The number of groups of consumers that share a stage of the ring: all of them, or 1, which frees it alone."""
    stages: int
    """The number of stages of the ring."""
    merges: bool
    """Whether the second group hands its result to the first, which merges them."""
    splits: SplitRule
    """The rule by which a row's context is divided."""
    workers: int = WORKERS
    """The number of thread blocks."""

    @property
    def tile(self) -> int:
        """Return the positions of a KV tile."""
        return self.groups * _ROWS

    @property
    def consumers(self) -> int:
        """Return the number of warpgroups that attend."""
        return self.groups * self.shares

    @property
    def tile_stages(self) -> int:
        """Return the number of stages that a KV tile takes."""
        return self.groups // self.stage_groups

    @property
    def parts(self) -> int:
        """Return the number of parts of an item's result."""
        return 1 if self.merges else self.groups


def decode_config(
    head_dim: int, kv_dtype: DTypeLike, num_rows: int, num_kv_heads: int, way: Handover = PROVEN
) -> DecodeConfig:
    """Return the configuration that fills the shared memory. It depends on shapes only, so that sums never change."""
    # One warpgroup's registers do not hold 64 rows of h = 256.
    groups, shares = (2, 1) if head_dim <= 128 else (1, 2)
    config = DecodeConfig(
        groups,
        shares,
        stage_groups=1 if way.splits_tiles else groups,
        stages=1,
        merges=way.merges and groups == 2,
        splits=split_rule(num_rows, num_kv_heads, WORKERS),
    )
    # The logarithms take part of the reserve, see `_REDUCTION_BYTES`.
    buffers = _buffer_types(config, head_dim, kv_dtype)._replace(logs=None)
    stage, total = smem_bytes(buffers.kv), sum(map(smem_bytes, jax.tree.leaves(tuple(buffers))))
    return config._replace(stages=min(8 * config.tile_stages, 1 + (SMEM_BYTES - SMEM_RESERVED - total) // stage))


def decode_attention(
    q_rkgh: Array,
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
    config: DecodeConfig | None = None,
    interpret: bool = False,
    num_cores: int | None = None,
) -> None:
    """Attend the leading decode rows; K and V of the step are in the pool.

    Args:
      q_rkgh: the queries of at least s rows, see `decode_queries`. g is a multiple of 8, as a TMA writes whole groups
        of 8 rows of a tiled buffer; the query heads that pad it hold anything.
      kv_pool, batch, layer, num_layers, window, scale, soft_cap, sinks_n: see `PagedAttention`.
      out_tc: a Ref to [t, n * h] that gets the result in the decode rows; the others are unchanged.
      config: sizes to use instead of the shape's.
      interpret: run in the interpreter.
      num_cores: the number of the GPU's multiprocessors.
    """
    k, h = q_rkgh.shape[1], q_rkgh.shape[3]
    s, max_blocks = batch.block_tables_sm.shape
    rows_l, _, o, _ = kv_pool.kv.shape
    if config is None:
        config = decode_config(h, kv_pool.kv.dtype, s, k, handover.CHOSEN)
        config = config._replace(workers=num_workers(num_cores, interpret))
    work = decode_work(batch, config.splits, config.tile, window, max_blocks * o)
    first_row = jnp.asarray(layer * (rows_l // num_layers), jnp.int32).reshape(1)
    heads = heads_at_a_time(h)
    g = -(-out_tc.shape[1] // (k * h * heads)) * heads
    tables_sm = batch.block_tables_sm
    parts = _attend(q_rkgh, g, kv_pool.kv, tables_sm, first_row, work, scale, soft_cap, config, interpret)
    combine_splits(*parts, work, sinks_n, out_tc, interpret)


class _Buffers(NamedTuple):
    """The shared memory; w counts consumers, p the groups of them, r = 64 a group's positions of a tile."""

    kv: Any
    """A ring of KV tiles [stage, stage's p, r, 2 h], in the pool's layout."""
    q: Any
    """Queries [2, 64, h]; an item's are loaded while the last one's are used."""
    p: Any
    """Probabilities [w, 64, r]."""
    out: Any
    """Columns of results [w, 64, 32] on their way to memory, or to the other group."""
    converted: Any
    """Keys, then values [p, r, h] of an 8-bit pool in float16."""
    logs: Any
    """The logarithms [64] of the weights of a result that is handed over."""


def _buffer_types(config: DecodeConfig, h: int, kv_dtype: DTypeLike) -> _Buffers:
    w, dtype = config.consumers, decode_query_dtype(jnp.bfloat16, kv_dtype)
    return _Buffers(
        kv=tiled_smem((config.stages, config.stage_groups, _ROWS, 2 * h), kv_dtype, columns=h),
        q=tiled_smem((_QUERY_BUFFERS, MMA_ROWS, h), dtype),
        p=tiled_smem((w, MMA_ROWS, _ROWS), dtype),
        out=plgpu.SMEM((w, MMA_ROWS, _STORE_COLUMNS), jnp.float32),
        converted=None if kv_dtype == dtype else tiled_smem((config.groups, _ROWS, h), dtype),
        logs=plgpu.SMEM((MMA_ROWS,), jnp.float32) if config.merges else None,
    )


def _attend(
    q_rkgh: Array,
    g: int,
    kv: Array,
    tables_sm: Array,
    first_row: Array,
    work: DecodeWork,
    scale: float,
    soft_cap: float | None,
    config: DecodeConfig,
    interpret: bool,
) -> tuple[Array, Array]:
    """Return each item's normalised results [i, p, k, g, h] and base-2 logarithms [i, p, k, 64] of their weights.

    p counts groups, or is 1 where they merge. Only the first `g` query heads are stored.
    """
    k, h = kv.shape[1], q_rkgh.shape[3]
    items, w = work.seqs_i.shape[0], config.consumers
    chunks = config.stage_groups * _ROWS // min(kv.shape[2], _ROWS)
    kernel = plgpu.kernel(
        partial(_attend_kernel, config=config, scale=scale / query_unit(q_rkgh.dtype), soft_cap=soft_cap),
        out_type=(
            jax.ShapeDtypeStruct((items, config.parts, k, g, h), jnp.float32),
            jax.ShapeDtypeStruct((items, config.parts, k, MMA_ROWS), jnp.float32),
        ),
        grid=(config.workers,),
        grid_names=("worker",),
        num_threads=w + 1,
        thread_name="warpgroup",
        kernel_name="paged_decode",
        scratch_types={
            "buffers": _buffer_types(config, h, kv.dtype),
            "q_full": plgpu.Barrier(num_barriers=_QUERY_BUFFERS),
            "q_free": plgpu.Barrier(num_arrivals=w, num_barriers=_QUERY_BUFFERS),
            "kv_full": plgpu.Barrier(num_arrivals=chunks, num_barriers=config.stages),
            "kv_free": plgpu.Barrier(num_arrivals=w // config.tile_stages, num_barriers=config.stages),
            "shared": plgpu.Barrier(num_arrivals=config.shares, num_barriers=config.groups),
            **({"half_full": plgpu.Barrier(), "half_free": plgpu.Barrier()} if config.merges else {}),
        },
        compiler_params=replace(compiler_params(), reduction_scratch_bytes=_REDUCTION_BYTES),
        interpret=interpret_params(interpret),
    )
    return kernel(q_rkgh, kv, tables_sm, first_row, *work)


class _Item(NamedTuple):
    """A work item, read from memory; int32 scalars."""

    entry: Array
    head: Array
    seq: Array
    start: Array
    end: Array


class _Refs(NamedTuple):
    """The operands, results and scratch of the kernel."""

    q_rkgh: Any
    kv: Any
    tables_sm: Any
    first_row: Any
    work: DecodeWork
    parts: Any
    logs: Any
    buffers: _Buffers
    q_full: Any
    q_free: Any
    kv_full: Any
    kv_free: Any
    shared: Any
    half_full: Any = None
    half_free: Any = None
    """The barriers of a result that is handed over, if it is."""


def _attend_kernel(*refs, config: DecodeConfig, scale: float, soft_cap: float | None, **scratch):
    q, kv, tables, first_row, *work, parts, logs = refs
    refs = _Refs(q, kv, tables, first_row, DecodeWork(*work), parts, logs, **scratch)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < config.consumers)
    def _():
        plgpu.set_max_registers(232, action="increase")
        _start_queries(refs, warpgroup)
        consume = partial(_consume, refs, config, _consumer(config), scale=scale, soft_cap=soft_cap)
        _for_each_item(refs, config, consume)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == config.consumers)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        num_tiles = _for_each_item(refs, config, partial(_produce, refs, config))
        _drain(refs, config, num_tiles)


def _for_each_item(refs: _Refs, config: DecodeConfig, body: Callable[[Array, _Item, Array], None]) -> Array:
    """Run `body(i, item, tile)` for the worker's i-th item, `tile` counting tiles before it. Return their number."""
    worker, k, work = lax.axis_index("worker"), refs.kv.shape[1], refs.work
    total = work.lasts_s[work.lasts_s.shape[0] - 1] * k
    num_items = lax.div(total - worker + (config.workers - 1), config.workers)

    def step(i, tile):
        index = worker + i * config.workers
        entry = lax.div(index, k)
        item = _Item(entry, lax.rem(index, k), work.seqs_i[entry], work.starts_i[entry], work.ends_i[entry])
        body(i, item, tile)
        return tile + _num_tiles(item, config)

    return lax.fori_loop(0, num_items, step, jnp.int32(0))


def _drain(refs: _Refs, config: DecodeConfig, num_tiles: Array) -> None:
    """Wait until all stages and query buffers are free: no barrier may end with a phase that nobody waited for."""

    def wait(number, _):
        plgpu.barrier_wait(refs.kv_free.at[lax.rem(number, config.stages)])

    num_stages = num_tiles * config.tile_stages
    lax.fori_loop(lax.max(num_stages - config.stages, 0), num_stages, wait, None)
    for buffer in range(_QUERY_BUFFERS):
        plgpu.barrier_wait(refs.q_free.at[buffer])


def _num_tiles(item: _Item, config: DecodeConfig) -> Array:
    return lax.div(item.end - item.start + (config.tile - 1), config.tile)


def _start_queries(refs: _Refs, wg: Array) -> None:
    """Zero the rows that pad the g query heads, and give both buffers to the producer."""

    @pl.when(wg == 0)
    def _():
        for buffer in range(_QUERY_BUFFERS):
            ref = refs.buffers.q.at[buffer]
            ref[...] = jnp.zeros(ref.shape, ref.dtype)
        plgpu.commit_smem()

    for buffer in range(_QUERY_BUFFERS):
        plgpu.barrier_arrive(refs.q_free.at[buffer])


def _produce(refs: _Refs, config: DecodeConfig, i: Array, item: _Item, first_tile: Array) -> None:
    """Load an item's queries and KV tiles."""
    g = refs.q_rkgh.shape[2]
    o, max_blocks = refs.kv.shape[2], refs.tables_sm.shape[1]
    chunk = min(o, _ROWS)

    buffer = lax.rem(i, _QUERY_BUFFERS)
    plgpu.barrier_wait(refs.q_free.at[buffer])
    q = refs.buffers.q.at[buffer, pl.ds(0, g)]
    plgpu.copy_gmem_to_smem(refs.q_rkgh.at[item.seq, item.head], q, refs.q_full.at[buffer])

    def bring(j, _):
        position = item.start + j * config.tile
        # Before the wait, so that these loads pass while the stage drains.
        chunks = []
        for c in range(config.tile // chunk):
            at = position + c * chunk
            block = refs.tables_sm[item.seq, lax.min(lax.div(at, o), max_blocks - 1)]
            chunks.append((refs.first_row[0] + block, lax.rem(at, o)))

        for i, stage_chunks in enumerate(batched(chunks, len(chunks) // config.tile_stages)):
            number = (first_tile + j) * config.tile_stages + i
            stage = lax.rem(number, config.stages)
            pl.when(number >= config.stages)(partial(plgpu.barrier_wait, refs.kv_free.at[stage]))
            for c, (row, offset) in enumerate(stage_chunks):
                slot, first = divmod(c * chunk, _ROWS)
                source = refs.kv.at[row, item.head]
                if chunk < o:
                    source = source.at[pl.ds(pl.multiple_of(offset, chunk), chunk)]
                target = refs.buffers.kv.at[stage, slot, pl.ds(first, chunk)]
                plgpu.copy_gmem_to_smem(source, target, refs.kv_full.at[stage])

    lax.fori_loop(0, _num_tiles(item, config), bring, None)


class _Result(NamedTuple):
    """A consumer's result of an item."""

    max_r: Array
    sum_r: Array
    acc_c: tuple[Array, ...]
    """Columns of the sum of the weighted values."""

    def log_r(self) -> Array:
        """Return log2 of the rows' weights."""
        return self.max_r + jnp.log2(jnp.maximum(self.sum_r, TINY))

    def inverse_r(self) -> Array:
        """Return what normalises the rows."""
        return 1.0 / jnp.maximum(self.sum_r, TINY)

    def pieces(self) -> list[Array]:
        """Return the columns as they are stored at a time."""
        starts = range(0, _VALUE_COLUMNS, _STORE_COLUMNS)
        return [acc[:, start : start + _STORE_COLUMNS] for acc in self.acc_c for start in starts]


class _Consumer(NamedTuple):
    """The index of a warpgroup among the consumers."""

    warpgroup: Array
    group: Array
    """The group of a tile's positions that it attends."""
    share: Array | int
    """The share of the columns of V that it multiplies."""
    num_shares: int

    def columns(self, start: int, h: int, width: int) -> list[Any]:
        """Return this share of columns start .. start + h, divided into slices of at most `width`."""
        share = h // self.num_shares
        width = min(width, share)
        firsts = [start + self.share * share + column for column in range(0, share, width)]
        return [pl.ds(pl.multiple_of(first, width) if isinstance(first, Array) else first, width) for first in firsts]


def _consumer(config: DecodeConfig) -> _Consumer:
    warpgroup = lax.axis_index("warpgroup")
    if config.shares == 1:
        return _Consumer(warpgroup, warpgroup, 0, 1)
    return _Consumer(warpgroup, lax.div(warpgroup, config.shares), lax.rem(warpgroup, config.shares), config.shares)


def _consume(
    refs: _Refs,
    config: DecodeConfig,
    me: _Consumer,
    i: Array,
    item: _Item,
    first_tile: Array,
    *,
    scale: float,
    soft_cap: float | None,
) -> None:
    """Attend one consumer's part of an item's tiles, and store the result."""
    h = refs.q_rkgh.shape[3]
    buffer = lax.rem(i, _QUERY_BUFFERS)
    low = refs.work.lows_s[item.seq]
    p = refs.buffers.p.at[me.warpgroup]
    plgpu.barrier_wait(refs.q_full.at[buffer])

    def attend(j, state):
        max_r, sum_r, acc_c = state
        # Unless these are opaque to LLVM, it computes all matrix descriptors first and holds them in registers.
        number = (first_tile + j) * config.tile_stages
        if config.stage_groups == 1:
            number += me.group
        stage, q_buffer, group = lax.optimization_barrier((lax.rem(number, config.stages), buffer, me.group))
        position = item.start + j * config.tile + me.group * _ROWS
        plgpu.barrier_wait(refs.kv_full.at[stage])
        keys = _keys(refs, me._replace(group=group), stage)
        scores = product(refs.buffers.q.at[q_buffer], keys.transpose((1, 0)))
        _share(refs, me)  # the keys are used, so values may take their place
        scores, unit = in_log2(scores, scale, soft_cap)
        is_partial = (position < low) | (position + _ROWS > item.end)
        live = _Live(is_partial, low - position, item.end - position)
        scores = lax.cond(is_partial, partial(_mask, live), lambda x: x, scores)
        # The sum comes before the products, so that they have the registers of the probabilities.
        probs, decay_r, max_r, sum_r = online_softmax(scores, unit, max_r, sum_r)
        p[...] = probs.astype(p.dtype)
        values = _values(refs, me._replace(group=group), stage, live)
        plgpu.commit_smem()
        acc_c = tuple(
            acc * along_rows(decay_r, acc) + product(p, value) for acc, value in zip(acc_c, values, strict=True)
        )
        plgpu.barrier_arrive(refs.kv_free.at[stage])
        return max_r, sum_r, acc_c

    num_columns = h // config.shares // _VALUE_COLUMNS
    nothing = (
        row_vector(MMA_ROWS, LOWEST),
        row_vector(MMA_ROWS, 0.0),
        tuple(accumulator(MMA_ROWS, _VALUE_COLUMNS) for _ in range(num_columns)),
    )
    max_r, sum_r, acc_c = lax.fori_loop(0, _num_tiles(item, config), attend, nothing)
    plgpu.barrier_arrive(refs.q_free.at[buffer])
    result = _Result(max_r, sum_r, acc_c)
    if not config.merges:
        _store(refs, me, item, result)
        return
    pl.when(me.group == 1)(partial(_hand_over, refs, result))
    pl.when(me.group == 0)(partial(_store, refs, me._replace(group=0), item, result, merges=True))


class _Live(NamedTuple):
    """The positions of a group's part of a tile that its row sees, counted from the part's first."""

    is_partial: Array
    """Whether it sees some only."""
    first: Array
    stop: Array

    def has(self, positions: Array) -> Array:
        """Return whether the row sees the positions."""
        return (positions >= self.first) & (positions < self.stop)


def _mask(live: _Live, scores_rc: Array) -> Array:
    """Hide the columns that the row does not see."""
    columns_rc = plgpu.broadcasted_iota(jnp.int32, scores_rc.shape, 1, layout=plgpu.Layout.WGMMA)
    return jnp.where(live.has(columns_rc), scores_rc, -jnp.inf)


def _keys(refs: _Refs, me: _Consumer, stage: Array) -> Any:
    """Return a group's keys [64, h] of a stage as wgmma takes them; each of its warpgroups converts a share."""
    h = refs.q_rkgh.shape[3]
    kv = _stage(refs, me, stage)
    if refs.buffers.converted is None:
        return kv.at[:, pl.ds(0, h)]
    converted = refs.buffers.converted.at[me.group]
    for columns in me.columns(0, h, _CONVERTED_COLUMNS):
        converted[:, columns] = _widen(kv.at[:, columns])
    plgpu.commit_smem()
    _share(refs, me)
    return converted


def _share(refs: _Refs, me: _Consumer) -> None:
    """Wait for the other warpgroups that use the same converted keys, if there are any."""
    if refs.buffers.converted is not None and me.num_shares > 1:
        plgpu.barrier_arrive(refs.shared.at[me.group])
        plgpu.barrier_wait(refs.shared.at[me.group])


def _values(refs: _Refs, me: _Consumer, stage: Array, live: _Live) -> list[Any]:
    """Return this consumer's values of a stage as wgmma takes them, in columns, not committed.

    Values that the row does not see are 0: slots beyond the context hold anything, and blocks before its window may be
    another sequence's by now, and 0 x NaN is NaN.
    """
    h = refs.q_rkgh.shape[3]
    kv = _stage(refs, me, stage)

    def zeroed(x: Array, layout: Any) -> Array:
        rows = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout)
        return jnp.where(live.has(rows), x, jnp.zeros_like(x))

    if refs.buffers.converted is not None:
        converted = refs.buffers.converted.at[me.group]
        zeroed_part = partial(zeroed, layout=_WIDENED)
        for source, target in zip(
            me.columns(h, h, _CONVERTED_COLUMNS), me.columns(0, h, _CONVERTED_COLUMNS), strict=True
        ):
            widened = _widen(kv.at[:, source])
            converted[:, target] = lax.cond(live.is_partial, zeroed_part, lambda x: x, widened)
        return [converted.at[:, columns] for columns in me.columns(0, h, _VALUE_COLUMNS)]

    values = [kv.at[:, columns] for columns in me.columns(h, h, _VALUE_COLUMNS)]

    @pl.when(live.is_partial)
    def _():
        for value in values:
            value[...] = zeroed(value[...], plgpu.Layout.WGMMA)

    return values


def _widen(ref: Any) -> Array:
    """Return an 8-bit matrix in float16, exactly: one instruction for two numbers."""
    return plgpu.load(ref, layout=_WIDENED).astype(jnp.float16)


def _stage(refs: _Refs, me: _Consumer, stage: Array) -> Any:
    """Return the keys and values [64, 2 h] of a consumer's group in a stage."""
    return refs.buffers.kv.at[stage, me.group if refs.buffers.kv.shape[1] > 1 else 0]


def _hand_over(refs: _Refs, result: _Result) -> None:
    """Hand the second group's result to the first, some columns at a time."""
    refs.buffers.logs[...] = result.log_r()
    inverse_r = result.inverse_r()
    for piece in result.pieces():
        refs.buffers.out[1] = piece * along_rows(inverse_r, piece)
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.half_full)
        plgpu.barrier_wait(refs.half_free)


def _store(refs: _Refs, me: _Consumer, item: _Item, result: _Result, merges: bool = False) -> None:
    """Store a consumer's part: its rows divided by their sums, and log2 of their weights.

    With `merges`, what the second group hands over is added.
    """
    g, h = refs.parts.shape[3:]
    out = refs.buffers.out.at[me.warpgroup]
    part = refs.parts.at[item.entry, me.group, item.head]
    log_r, factor_r, other_factor_r = result.log_r(), result.inverse_r(), None
    if merges:
        plgpu.barrier_wait(refs.half_full)
        other_log_r = plgpu.load(refs.buffers.logs, layout=plgpu.Layout.WGMMA.reduce(1))
        max_r = jnp.maximum(log_r, other_log_r)
        weight_r, other_weight_r = jnp.exp2(log_r - max_r), jnp.exp2(other_log_r - max_r)
        sum_r = weight_r + other_weight_r
        log_r, factor_r, other_factor_r = max_r + jnp.log2(sum_r), factor_r * (weight_r / sum_r), other_weight_r / sum_r

    # A part with nothing in its window weighs 2**LOWEST = 0 beside any other.
    @pl.when(jnp.asarray(me.share == 0))
    def _():
        refs.logs[item.entry, me.group, item.head] = log_r

    for i, (columns, piece) in enumerate(zip(me.columns(0, h, _STORE_COLUMNS), result.pieces(), strict=True)):
        scaled = piece * along_rows(factor_r, piece)
        if other_factor_r is not None:
            if i:
                plgpu.barrier_wait(refs.half_full)
            other = plgpu.load(refs.buffers.out.at[1], layout=plgpu.Layout.WGMMA)
            plgpu.barrier_arrive(refs.half_free)
            scaled += other * along_rows(other_factor_r, other)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out[...] = scaled
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out.at[pl.ds(0, g)], part.at[:, columns])
