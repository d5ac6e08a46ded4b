"""Attention over latents on Hopper: 64 query vectors at a time, decodes' or a chunk's, with a range of a context.

A work item's vectors are the heads of one row, or of several rows of a chunk. As many thread blocks as there are SMs
walk their share of the items. In each, a producer warpgroup brings tiles of 64 tokens' latents into a ring of shared
memory, and begins the next item's before this one ends. A tile is in memory once, and serves as keys and, without its
rotated columns, as values. Two consumer warpgroups both compute all of its scores; each sums up half of the latents'
columns, as the registers of one would not hold all of them. They take turns, as in the prefill of paged attention.

In sparse attention an item is one row, and what it attends is a list of slots instead of a range of positions
(`gather.py`); all positions here are then places in this list.

Results take the place of queries in shared memory, which has room for nothing more beside two tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.common import (
    LOG2_E,
    LOWEST,
    MMA_ROWS,
    SMEM_BYTES,
    SMEM_RESERVED,
    TINY,
    WORKERS,
    accumulator,
    add_product,
    along_rows,
    compiler_params,
    interpret_params,
    live_rows,
    row_vector,
    smem_bytes,
    tiled_smem,
)

from .gather import HALF, SLOT_TILES, gather
from .sizes import CONSUMERS, PART_COLUMNS, STORE_BYTES, TILE

# 2 x 224 + 56 = 504 registers: the limit for a thread of each warpgroup together.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 224, 56
_MAX_STAGES, _RAW_STAGES = 8, 2


class Work(NamedTuple):
    """The work items, each for every group of heads; int32."""

    seqs_i: Array
    """The sequence of each item."""
    rows_i: Array
    """Its first row of queries."""
    starts_i: Array
    """The first position that it attends, a multiple of 64."""
    ends_i: Array
    """One past the last position."""
    sees_i: Array
    """One past the last position that its first row sees; each row sees one more than the row before."""
    totals: Array
    """An array with the number of items as its last entry."""


class Config(NamedTuple):
    """The settings that the kernel is compiled for, besides the shapes of its operands."""

    latent_dim: int
    head_groups: int
    heads: int
    """The heads of a group, with padding."""
    rows: int
    """The rows of an item."""
    scale: float
    is_split: bool
    """True if an item's result is a part of its row's, in float32. Otherwise it is the rows' result, in bfloat16."""
    interpret: bool
    kv_dtype: Any = jnp.dtype(jnp.bfloat16)
    """The dtype of the pool."""
    stages: int = 1
    """The number of tiles that the ring holds."""
    workers: int = WORKERS
    """The number of thread blocks."""
    is_chosen: bool = False
    """True if items attend lists of slots."""

    @property
    def name(self) -> str:
        """Return the kernel's name."""
        if self.is_chosen:
            return "latent_chosen_split" if self.is_split else "latent_chosen"
        return "latent_decode" if self.is_split else "latent_prefill"

    @property
    def converts(self) -> bool:
        """Return whether the pool has another dtype than the matmuls."""
        return self.kv_dtype != jnp.bfloat16

    @property
    def vectors(self) -> int:
        """Return the query vectors of an item."""
        return self.rows * self.heads

    @property
    def columns(self) -> int:
        """Return the columns that a consumer sums up."""
        return self.latent_dim // CONSUMERS

    @property
    def out_dtype(self) -> Any:
        """Return the dtype of results."""
        return jnp.float32 if self.is_split else jnp.bfloat16

    @property
    def stored(self) -> int:
        """Return the columns of a result that a consumer stores at a time."""
        return min(self.columns, STORE_BYTES // jnp.dtype(self.out_dtype).itemsize)


def fill_smem(config: Config, key_dim: int) -> Config:
    """Return the configuration with as many tiles as fit in the shared memory."""
    one = _buffer_types(config._replace(interpret=False), key_dim)
    room = SMEM_BYTES - SMEM_RESERVED - max(smem_bytes(one.queries), smem_bytes(one.results))
    room -= sum(smem_bytes(x) for x in (one.raw, one.slots) if x is not None)
    return config._replace(stages=min(_MAX_STAGES, room // smem_bytes(one.latents)))


class _Buffers(NamedTuple):
    """The buffers in shared memory, of 64 rows each."""

    latents: Any
    """A ring of tiles [stage, 64, key_dim] in bfloat16."""
    raw: Any
    """A ring of tiles [2, 64, key_dim] of a float8 pool, not converted, or of halves of tiles of chosen latents."""
    slots: Any
    """The slots [2, 64] of two tiles of chosen latents."""
    queries: Any
    """The queries [1, 64, key_dim]."""
    results: Any
    """Columns of results [w, 64, c] on their way to memory, in the place of the queries."""
    weights: Any
    """The probabilities [w, 64, 64], in the interpreter."""


def _buffer_types(config: Config, key_dim: int) -> _Buffers:
    raw = tiled_smem((_RAW_STAGES, TILE, key_dim), config.kv_dtype, columns=PART_COLUMNS) if config.converts else None
    if config.is_chosen:
        # By rows and not swizzled, so that a row is one plain copy.
        tiling = plgpu.TilingTransform((1, PART_COLUMNS))  # pyright: ignore[reportAbstractUsage]
        raw = plgpu.SMEM((2, HALF, key_dim), config.kv_dtype, transforms=(tiling,))
    return _Buffers(
        latents=tiled_smem((config.stages, TILE, key_dim), jnp.bfloat16),
        raw=raw,
        slots=plgpu.SMEM((SLOT_TILES, TILE), jnp.int32) if config.is_chosen else None,
        queries=tiled_smem((1, MMA_ROWS, key_dim), jnp.bfloat16),
        results=tiled_smem((CONSUMERS, MMA_ROWS, config.stored), config.out_dtype),
        weights=tiled_smem((CONSUMERS, MMA_ROWS, TILE), jnp.bfloat16) if config.interpret else None,
    )


class _Barriers(NamedTuple):
    """The barriers: of filled and free tiles, of the consumers' turns, and of an item's scores being complete."""

    q_full: Any
    q_free: Any
    tile_full: Any
    tile_free: Any
    raw: Any
    slots: Any
    turn: Any
    scored: Any


class _Item(NamedTuple):
    """A work item, read from memory; int32 scalars."""

    entry: Array
    group: Array
    seq: Array
    row: Array
    start: Array
    end: Array
    sees: Array

    @property
    def num_tiles(self) -> Array:
        """Return the number of tiles that it attends."""
        return lax.div(self.end - self.start + (TILE - 1), TILE)

    def live(self, j: Array) -> Array:
        """Return the number of tokens of its j-th tile that are before its end, if not all are."""
        return self.end - (self.start + j * TILE)


class _Refs(NamedTuple):
    """The operands, results and scratch of the kernel."""

    config: Config
    q_vh: Any
    """The queries, by rows, groups of heads, and heads."""
    pool: Any
    tokens: Sequence[Any]
    """The block ids of each sequence, and the layer's first block; or the slots that each row attends to."""
    work: Work
    out_vl: Any
    """The rows' results, laid out like queries, or parts [i, 1, head group, heads, latent_dim]."""
    logs: Sequence[Any]
    """The logarithms of parts' weights [i, 1, head group, 64], or nothing."""
    buffers: _Buffers
    barriers: _Barriers

    def vectors(self, item: _Item) -> Any:
        """Return the slice of all vectors that belong to an item."""
        first = (item.row * self.config.head_groups + item.group) * self.config.heads
        return pl.ds(pl.multiple_of(first, 8), self.config.vectors)


def attend(
    q_vh: Array, pool: Array, tokens: tuple[Array, ...], work: Work, out_vl: Any, config: Config
) -> tuple[Array, ...]:
    """Attend the items of `work`.

    Args:
      q_vh: queries by rows, groups of heads, and heads.
      pool: the pool of all layers.
      tokens: the block ids of each sequence [s, m], and the layer's first block in the pool [1]; if `config.is_chosen`
        the slots of each row's tokens in the pool [t, k], where k is a multiple of 64, and the pool is by slots.
      work: the work items.
      out_vl: a Ref that gets the items' rows, while other rows stay unchanged; None if the work is split.
      config: the settings, from `fill_smem`.

    Returns:
      If the work is split, each item's normalised results [i, 1, group, heads, latent_dim] and base-2 logarithms
      [i, 1, group, 64] of their weights; else nothing.
    """
    chunks, items = TILE // min(pool.shape[1], TILE), len(work.seqs_i)
    parts = items, 1, config.head_groups
    out_type = (
        jax.ShapeDtypeStruct((*parts, config.heads, config.latent_dim), jnp.float32),
        jax.ShapeDtypeStruct((*parts, MMA_ROWS), jnp.float32),
    )
    buffers = _buffer_types(config, pool.shape[2])
    barriers = _Barriers(
        q_full=plgpu.Barrier(),
        q_free=plgpu.Barrier(num_arrivals=CONSUMERS),
        tile_full=plgpu.Barrier(
            num_arrivals=1 if config.converts or config.is_chosen else chunks, num_barriers=config.stages
        ),
        tile_free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=config.stages),
        raw=plgpu.Barrier(
            num_arrivals=HALF if config.is_chosen else chunks,
            num_barriers=2 if config.is_chosen else _RAW_STAGES if config.converts else 1,
        ),
        slots=plgpu.Barrier(num_barriers=SLOT_TILES),
        turn=plgpu.Barrier(num_arrivals=CONSUMERS),
        scored=plgpu.Barrier(num_arrivals=CONSUMERS),
    )
    kernel = plgpu.kernel(
        partial(_attend_kernel, config=config),
        out_type=out_type if config.is_split else (),
        grid=(config.workers,),
        grid_names=("worker",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name=config.name,
        scratch_types={
            "latents": buffers.latents,
            "raw": buffers.raw,
            "slots": buffers.slots,
            "queries_or_results": plgpu.RefUnion(buffers.queries, buffers.results),
            "weights": buffers.weights,
            "barriers": barriers,
        },
        compiler_params=compiler_params(),
        interpret=interpret_params(config.interpret),
    )
    return kernel(q_vh, pool, *tokens, *work, *[out_vl] * (not config.is_split))


def _attend_kernel(*refs, config: Config, latents, raw, slots, queries_or_results, weights, barriers):
    q_vh, pool, *rest = refs
    tokens, rest = rest[: 2 - config.is_chosen], rest[2 - config.is_chosen :]
    work, (out_vl, *logs) = Work(*rest[: len(Work._fields)]), rest[len(Work._fields) :]
    queries, results = queries_or_results
    buffers = _Buffers(latents, raw, slots, queries, results, weights)
    kernel_refs = _Refs(config, q_vh, pool, tokens, work, out_vl, logs, buffers, barriers)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < CONSUMERS)
    def _():
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        plgpu.barrier_arrive(barriers.q_free)
        _for_each_item(kernel_refs, partial(_consume, kernel_refs, warpgroup))
        pl.when(warpgroup == 0)(partial(plgpu.barrier_wait, barriers.q_free))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == CONSUMERS)
    def _():
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        num_tiles = _for_each_item(kernel_refs, partial(_produce, kernel_refs))
        _drain(kernel_refs, num_tiles)


def _for_each_item(refs: _Refs, body: Callable[[_Item, Array], None]) -> Array:
    """Run `body(item, tile)` for the worker's items, `tile` counting tiles before each. Return their number."""
    worker, work, config = lax.axis_index("worker"), refs.work, refs.config
    total = work.totals[work.totals.shape[0] - 1] * config.head_groups
    num_items = lax.div(total - worker + (config.workers - 1), config.workers)

    def step(i, tile):
        index = worker + i * config.workers
        entry = lax.div(index, config.head_groups)
        scalars = [of[entry] for of in (work.seqs_i, work.rows_i, work.starts_i, work.ends_i, work.sees_i)]
        item = _Item(entry, lax.rem(index, config.head_groups), *scalars)
        body(item, tile)
        return tile + item.num_tiles

    return lax.fori_loop(0, num_items, step, jnp.int32(0))


def _produce(refs: _Refs, item: _Item, first_tile: Array) -> None:
    """Load an item's tiles."""
    if refs.config.is_chosen:
        pl.when(item.num_tiles > 0)(partial(gather, refs, item, first_tile, _wait_until_free))
        return
    bring = _bring_converted if refs.config.converts else _bring
    if refs.config.converts:
        _bring_raw(refs, item, jnp.int32(0), first_tile)
    lax.fori_loop(0, item.num_tiles, lambda j, _: bring(refs, item, j, first_tile + j), None)


def _drain(refs: _Refs, num_tiles: Array) -> None:
    """Wait until all tiles are free: no barrier may end with a phase that nobody waited for."""
    stages = refs.config.stages

    def wait(tile, _):
        plgpu.barrier_wait(refs.barriers.tile_free.at[lax.rem(tile, stages)])

    lax.fori_loop(lax.max(num_tiles - stages, 0), num_tiles, wait, None)


def _bring(refs: _Refs, item: _Item, j: Array, tile: Array) -> None:
    """Load an item's j-th tile, which is the worker's `tile`-th."""
    barriers, stage = refs.barriers, lax.rem(tile, refs.config.stages)
    latents, live = refs.buffers.latents.at[stage], item.live(j)
    # Before the wait, so that these loads pass while the stage drains.
    sources = _sources(refs, item, j)
    _wait_until_free(refs, tile)
    pl.when(live >= TILE)(partial(_copy, sources, latents, barriers.tile_full.at[stage]))

    @pl.when(live < TILE)
    def _():
        # Slots beyond the context hold anything, and 0 x NaN is NaN.
        _copy(sources, latents, barriers.raw.at[0])
        plgpu.barrier_wait(barriers.raw.at[0])
        for column in range(0, refs.config.latent_dim, PART_COLUMNS):
            part = latents.at[:, pl.ds(column, PART_COLUMNS)]
            part[...] = live_rows(part[...], pl.ds(0, TILE), live, plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        for _ in sources:
            plgpu.barrier_arrive(barriers.tile_full.at[stage])


def _bring_converted(refs: _Refs, item: _Item, j: Array, tile: Array) -> None:
    """Convert a tile of a float8 pool to bfloat16, while the next one is loaded."""
    raw, stage, live = lax.rem(tile, _RAW_STAGES), lax.rem(tile, refs.config.stages), item.live(j)
    pl.when(j + 1 < item.num_tiles)(partial(_bring_raw, refs, item, j + 1, tile + 1))
    plgpu.barrier_wait(refs.barriers.raw.at[raw])
    _wait_until_free(refs, tile)
    layout = plgpu.Layout.WGMMA_UPCAST_2X
    clear = partial(live_rows, rows=pl.ds(0, TILE), live=live, layout=layout)
    for column in range(0, refs.pool.shape[2], PART_COLUMNS):
        columns = pl.ds(column, PART_COLUMNS)
        part = plgpu.load(refs.buffers.raw.at[raw, :, columns], layout=layout)
        # The hardware takes float8 to float16 only.
        part = part.astype(jnp.float32).astype(jnp.bfloat16)
        refs.buffers.latents[stage, :, columns] = lax.cond(live < TILE, clear, lambda x: x, part)
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.barriers.tile_full.at[stage])


def _bring_raw(refs: _Refs, item: _Item, j: Array, tile: Array) -> None:
    """Load a tile of a float8 pool."""
    raw = lax.rem(tile, _RAW_STAGES)
    _copy(_sources(refs, item, j), refs.buffers.raw.at[raw], refs.barriers.raw.at[raw])


def _sources(refs: _Refs, item: _Item, j: Array) -> list[Any]:
    """Return the pool's slices with an item's j-th tile. Blocks beyond the table's end repeat its last one."""
    tables_sm, first_row = refs.tokens
    o, max_blocks = refs.pool.shape[1], tables_sm.shape[1]
    chunk, position = min(o, TILE), item.start + j * TILE
    sources = []
    for at in range(0, TILE, chunk):
        block = tables_sm[item.seq, lax.min(lax.div(position + at, o), max_blocks - 1)]
        source = refs.pool.at[first_row[0] + block]
        if chunk < o:
            source = source.at[pl.ds(pl.multiple_of(lax.rem(position + at, o), chunk), chunk)]
        sources.append(source)
    return sources


def _copy(sources: list[Any], target: Any, barrier: Any) -> None:
    """Start to copy slices of the pool to a tile."""
    chunk = TILE // len(sources)
    for i, source in enumerate(sources):
        plgpu.copy_gmem_to_smem(source, target.at[pl.ds(i * chunk, chunk)], barrier)


def _wait_until_free(refs: _Refs, tile: Array) -> None:
    """Wait until the consumers are done with the tile that a new one overwrites."""
    free = refs.barriers.tile_free.at[lax.rem(tile, refs.config.stages)]
    pl.when(tile >= refs.config.stages)(partial(plgpu.barrier_wait, free))


def _consume(refs: _Refs, me: Array, item: _Item, first_tile: Array) -> None:
    """Attend an item, and store this consumer's columns of the result."""
    config, buffers, barriers = refs.config, refs.buffers, refs.barriers
    unit = config.scale * LOG2_E
    columns = pl.ds(pl.multiple_of(me * config.columns, config.columns), config.columns)
    weights = None if buffers.weights is None else buffers.weights.at[me]
    pl.when(me == 0)(partial(_bring_queries, refs, item))
    plgpu.barrier_wait(barriers.q_full)

    def take_turns() -> None:
        # With one tile, each would wait for the other: for its turn, or for the next tile in place of this one.
        if config.stages > 1:
            plgpu.barrier_arrive(barriers.turn)
            plgpu.barrier_wait(barriers.turn)

    def step(j, state):
        max_r, sum_r, acc = state
        # Unless these are opaque to LLVM, it computes all matrix descriptors first and holds them in registers.
        stage, only = lax.optimization_barrier((lax.rem(first_tile + j, config.stages), jnp.int32(0)))
        position = item.start + j * TILE
        latents = buffers.latents.at[stage]
        plgpu.barrier_wait(barriers.tile_full.at[stage])
        scores = _scores(buffers.queries.at[only], latents, take_turns)
        mask = partial(_mask, config, item, position)
        scores = lax.cond(position + TILE > lax.min(item.sees, item.end), mask, lambda x: x, scores)
        new_max_r = jnp.maximum(max_r, scores.max(axis=1) * unit)
        decay_r = jnp.exp2(max_r - new_max_r)
        probs = jnp.exp2(scores * unit - along_rows(new_max_r, scores))
        sum_r = sum_r * decay_r + probs.sum(axis=1)
        acc, sum_r, new_max_r, probs = lax.optimization_barrier(
            (acc * along_rows(decay_r, acc), sum_r, new_max_r, probs.astype(jnp.bfloat16))
        )
        # All of the softmax happens before the tensor cores' next turn.
        take_turns()
        acc = add_product(acc, probs, latents.at[:, columns], weights)
        plgpu.barrier_arrive(barriers.tile_free.at[stage])
        return new_max_r, sum_r, acc

    # One is in its softmax while the other has the tensor cores.
    pl.when(me == 1)(take_turns)
    # Masked scores are -inf and weigh nothing, even against the LOWEST of a row that has seen no other.
    nothing = row_vector(MMA_ROWS, LOWEST), row_vector(MMA_ROWS, 0.0), accumulator(MMA_ROWS, config.columns)
    max_r, sum_r, acc = lax.fori_loop(0, item.num_tiles, step, nothing)
    pl.when(me == 0)(take_turns)
    sum_r = jnp.maximum(sum_r, TINY)
    # Both are done with the queries, and results take their place.
    plgpu.barrier_arrive(barriers.scored)
    plgpu.barrier_wait(barriers.scored)
    # Otherwise addresses of what is stored are computed before the loop, and held in registers all the while.
    me, item = lax.optimization_barrier((me, item))
    for logs in refs.logs:
        pl.when(me == 0)(partial(_store_logs, logs, item, max_r + jnp.log2(sum_r)))
    _store(refs, me, item, acc * along_rows(1.0 / sum_r, acc))
    plgpu.barrier_arrive(barriers.q_free)


def _scores(queries: Any, latents: Any, take_turns: Callable[[], None]) -> Array:
    """Return the products of queries and latents; the other consumer has the tensor cores once they are under way."""

    def multiply(accumulator_ref: Any) -> Array:
        plgpu.wgmma(accumulator_ref, queries, latents.transpose((1, 0)))
        take_turns()
        return accumulator_ref[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((MMA_ROWS, TILE), jnp.float32))


def _bring_queries(refs: _Refs, item: _Item) -> None:
    """Load an item's queries once the last item's results are on their way."""
    plgpu.barrier_wait(refs.barriers.q_free)
    queries = refs.buffers.queries.at[0, pl.ds(0, refs.config.vectors)]
    plgpu.copy_gmem_to_smem(refs.q_vh.at[refs.vectors(item)], queries, refs.barriers.q_full)


def _mask(config: Config, item: _Item, first_position: Array, scores: Array) -> Array:
    """Hide from each row of an item the positions beyond it, and from all rows the positions beyond the item's end."""
    layout = plgpu.Layout.WGMMA
    keys = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout) + first_position
    is_seen = keys < item.end
    if config.rows > 1:
        vectors_r = plgpu.broadcasted_iota(jnp.int32, (MMA_ROWS,), 0, layout=layout.reduce(1))
        is_seen &= keys < along_rows(lax.div(vectors_r, config.heads) + item.sees, scores)
    return jnp.where(is_seen, scores, -jnp.inf)


def _store_logs(logs: Any, item: _Item, logs_r: Array) -> None:
    logs[item.entry, 0, item.group] = logs_r


def _store(refs: _Refs, me: Array, item: _Item, result: Array) -> None:
    """Store a consumer's columns of an item's result."""
    config, buffer = refs.config, refs.buffers.results.at[me]
    target = refs.out_vl.at[item.entry, 0, item.group] if config.is_split else refs.out_vl.at[refs.vectors(item)]
    for first in range(0, config.columns, config.stored):
        buffer[...] = result[:, first : first + config.stored].astype(config.out_dtype)
        plgpu.commit_smem()
        columns = pl.ds(pl.multiple_of(me * config.columns + first, config.stored), config.stored)
        plgpu.copy_smem_to_gmem(buffer.at[pl.ds(0, config.vectors)], target.at[:, columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
