"""Scores of positions on Hopper: a tile of 64 keys by the queries of all heads of a row, or of several rows of a chunk.

Keys are the rows of a wgmma and queries its columns, so that a sum over heads is one along a row. As many thread blocks
as there are SMs walk their share of the work items. In each, a producer warpgroup brings tiles of keys into a ring of
shared memory, and two consumer warpgroups take them in turn: one multiplies while the other weights and sums up. Scores
go to memory as integers of the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.common import (
    SMEM_BYTES,
    SMEM_RESERVED,
    WORKERS,
    compiler_params,
    interpret_params,
    product,
    smem_bytes,
    tiled_smem,
)

from .sizes import TILE

CONSUMERS = 2
# 2 x 224 + 56 = 504 registers: the limit for a thread of each warpgroup together.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 224, 56
_MAX_STAGES = 8


class Work(NamedTuple):
    """The work items; int32."""

    seqs_i: Array
    """The sequence of each item."""
    rows_i: Array
    """Its first row of queries."""
    starts_i: Array
    """The first position that is scored, a multiple of 64."""
    ends_i: Array
    """One past the last position."""
    totals: Array
    """An array with the number of items as its last entry."""


class Config(NamedTuple):
    """The settings that the kernel is compiled for, besides the shapes of its operands."""

    heads: int
    rows: int
    """The rows of an item."""
    first_row: int
    """The step's row that has the first row of scores."""
    interpret: bool
    workers: int = WORKERS
    """The number of thread blocks."""
    stages: int = 1
    """The number of tiles that the ring holds."""

    @property
    def queries(self) -> int:
        """Return the queries of an item."""
        return self.rows * self.heads


class _Item(NamedTuple):
    """A work item, read from memory; int32 scalars."""

    seq: Array
    row: Array
    start: Array
    end: Array

    @property
    def num_tiles(self) -> Array:
        """Return the number of tiles that it scores."""
        return lax.div(self.end - self.start + (TILE - 1), TILE)


class _Barriers(NamedTuple):
    """The barriers, of an item's queries and weights, and of tiles of keys."""

    q_full: Any
    q_free: Any
    tile_full: Any
    tile_free: Any


class _Refs(NamedTuple):
    """The operands, results and scratch of the kernel."""

    config: Config
    q_vh: Any
    """The queries, by rows and heads."""
    weights_v: Any
    """Their weights."""
    pool: Any
    tables_sm: Any
    first_block: Any
    work: Work
    scores_rc: Any
    keys: Any
    """A ring of tiles [stage, 64, h]."""
    queries: Any
    """An item's queries [queries, h]."""
    weights: Any
    """An item's weights [queries]."""
    barriers: _Barriers


def score(
    q_vh: Array,
    weights_v: Array,
    pool: Array,
    tables_sm: Array,
    first_block: Array,
    work: Work,
    scores_rc: Any,
    config: Config,
) -> tuple[Array, ...]:
    """Score the items of `work`.

    Args:
      q_vh: queries by rows and heads.
      weights_v: their weights, float32.
      pool: the pool of all layers; `first_block` [1] is the layer's first block in it.
      tables_sm: the block ids of each sequence.
      work: the work items.
      scores_rc: a Ref that gets the items' scores as `in_order` has them; or the shape of a new array, in which all
        else holds anything. Its row 0 is the step's row `config.first_row`. Whole tiles are stored: positions behind an
        item's end, or that a row does not see, get scores of anything.
      config: the settings; the ring gets as many tiles as fit.

    Returns:
      The new array, or nothing.
    """
    is_new = isinstance(scores_rc, jax.ShapeDtypeStruct)
    h, chunks = q_vh.shape[1], TILE // min(pool.shape[1], TILE)
    queries, weights = tiled_smem((config.queries, h), jnp.bfloat16), plgpu.SMEM((config.queries,), jnp.float32)
    tile = tiled_smem((1, TILE, h), jnp.bfloat16)
    room = SMEM_BYTES - SMEM_RESERVED - smem_bytes(queries) - smem_bytes(weights)
    config = config._replace(stages=min(_MAX_STAGES, room // smem_bytes(tile)))
    kernel = plgpu.kernel(
        partial(_score_kernel, config=config),
        out_type=(scores_rc,) if is_new else (),
        grid=(config.workers,),
        grid_names=("worker",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="indexer_score_decodes" if config.rows == 1 else "indexer_score_chunks",
        scratch_types={
            "keys": tiled_smem((config.stages, TILE, h), jnp.bfloat16),
            "queries": queries,
            "weights": weights,
            "barriers": _Barriers(
                q_full=plgpu.Barrier(num_arrivals=2),
                q_free=plgpu.Barrier(num_arrivals=CONSUMERS),
                tile_full=plgpu.Barrier(num_arrivals=chunks, num_barriers=config.stages),
                tile_free=plgpu.Barrier(num_barriers=config.stages),
            ),
        },
        compiler_params=compiler_params(),
        interpret=interpret_params(config.interpret),
    )
    return kernel(q_vh, weights_v, pool, tables_sm, first_block, *work, *[] if is_new else [scores_rc])


def in_order(scores: Array) -> Array:
    """Return float32 scores as int32 of the same order, in which -0 is 0."""
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _score_kernel(*refs, config: Config, keys, queries, weights, barriers):
    q_vh, weights_v, pool, tables_sm, first_block, *rest = refs
    work, [scores_rc] = Work(*rest[: len(Work._fields)]), rest[len(Work._fields) :]
    operands = q_vh, weights_v, pool, tables_sm, first_block, work, scores_rc
    kernel_refs = _Refs(config, *operands, keys, queries, weights, barriers)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < CONSUMERS)
    def _():
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        plgpu.barrier_arrive(barriers.q_free)
        _for_each_item(kernel_refs, partial(_consume, kernel_refs, warpgroup))
        pl.when(warpgroup == 0)(partial(plgpu.barrier_wait, barriers.q_free))

    @pl.when(warpgroup == CONSUMERS)
    def _():
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        num_tiles = _for_each_item(kernel_refs, partial(_produce, kernel_refs))
        # No barrier may end with a phase that nobody waited for.
        first = lax.max(num_tiles - config.stages, 0)
        lax.fori_loop(first, num_tiles, lambda tile, _: _wait_until_free(kernel_refs, tile), None)


def _for_each_item(refs: _Refs, body: Callable[[_Item, Array], None]) -> Array:
    """Run `body(item, tile)` for the worker's items, `tile` counting tiles before each. Return their number."""
    worker, work, config = lax.axis_index("worker"), refs.work, refs.config
    total = work.totals[work.totals.shape[0] - 1]
    num_items = lax.div(total - worker + (config.workers - 1), config.workers)

    def step(i, tile):
        index = worker + i * config.workers
        item = _Item(*[of[index] for of in (work.seqs_i, work.rows_i, work.starts_i, work.ends_i)])
        body(item, tile)
        return tile + item.num_tiles

    return lax.fori_loop(0, num_items, step, jnp.int32(0))


def _produce(refs: _Refs, item: _Item, first_tile: Array) -> None:
    """Load an item's tiles."""

    def bring(j: Array, _: None) -> None:
        tile = first_tile + j
        stage = lax.rem(tile, refs.config.stages)
        # Before the wait, so that these loads pass while the stage drains.
        sources = _sources(refs, item, j)
        pl.when(tile >= refs.config.stages)(partial(_wait_until_free, refs, tile))
        chunk = TILE // len(sources)
        for i, source in enumerate(sources):
            target = refs.keys.at[stage, pl.ds(i * chunk, chunk)]
            plgpu.copy_gmem_to_smem(source, target, refs.barriers.tile_full.at[stage])

    lax.fori_loop(0, item.num_tiles, bring, None)


def _wait_until_free(refs: _Refs, tile: Array) -> None:
    """Wait until the place of a tile in the ring is free."""
    plgpu.barrier_wait(refs.barriers.tile_free.at[lax.rem(tile, refs.config.stages)])


def _sources(refs: _Refs, item: _Item, j: Array) -> list[Any]:
    """Return the pool's slices with an item's j-th tile. Blocks beyond the table's end repeat its last one."""
    o, max_blocks = refs.pool.shape[1], refs.tables_sm.shape[1]
    chunk, position = min(o, TILE), item.start + j * TILE
    sources = []
    for at in range(0, TILE, chunk):
        block = refs.tables_sm[item.seq, lax.min(lax.div(position + at, o), max_blocks - 1)]
        source = refs.pool.at[refs.first_block[0] + block]
        if chunk < o:
            source = source.at[pl.ds(pl.multiple_of(lax.rem(position + at, o), chunk), chunk)]
        sources.append(source)
    return sources


def _consume(refs: _Refs, me: Array, item: _Item, first_tile: Array) -> None:
    """Score every second tile of an item; the other consumer scores the rest."""
    config, barriers = refs.config, refs.barriers
    pl.when(me == 0)(partial(_bring_queries, refs, item))
    plgpu.barrier_wait(barriers.q_full)
    first = lax.rem(me + first_tile, CONSUMERS)

    def step(i: Array, _: None) -> None:
        j = first + i * CONSUMERS
        # Opaque to LLVM, which otherwise computes all matrix descriptors first and holds them in registers.
        stage = lax.optimization_barrier(lax.rem(first_tile + j, config.stages))
        plgpu.barrier_wait(barriers.tile_full.at[stage])
        products_cv = product(refs.keys.at[stage], refs.queries.transpose((1, 0)))
        plgpu.barrier_arrive(barriers.tile_free.at[stage])
        position = pl.multiple_of(item.start + j * TILE, TILE)
        for row in range(config.rows):
            heads = row * config.heads
            weights_n = plgpu.load(refs.weights.at[pl.ds(heads, config.heads)], layout=plgpu.Layout.WGMMA.reduce(0))
            positive_cn = jnp.maximum(products_cv[:, heads : heads + config.heads], 0.0)
            weights_cn = lax.broadcast_in_dim(weights_n, positive_cn.shape, (1,))
            scores_c = (positive_cn * weights_cn).sum(axis=1)
            refs.scores_rc[item.row - config.first_row + row, pl.ds(position, TILE)] = in_order(scores_c)

    lax.fori_loop(0, lax.div(item.num_tiles - first + (CONSUMERS - 1), CONSUMERS), step, None)
    # Threads have read weights, whose place an asynchronous copy overwrites.
    plgpu.commit_smem()
    plgpu.barrier_arrive(barriers.q_free)


def _bring_queries(refs: _Refs, item: _Item) -> None:
    """Load an item's queries and weights once both consumers are done with the last item's."""
    plgpu.barrier_wait(refs.barriers.q_free)
    of = pl.ds(pl.multiple_of(item.row * refs.config.heads, 8), refs.config.queries)
    plgpu.copy_gmem_to_smem(refs.q_vh.at[of], refs.queries, refs.barriers.q_full)
    plgpu.copy_gmem_to_smem(refs.weights_v.at[of], refs.weights, refs.barriers.q_full)
