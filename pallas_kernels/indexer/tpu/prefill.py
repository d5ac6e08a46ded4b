"""Choose for longer chunks, in tiles of rows.

One program: it writes all chunks' keys, then goes from tile to tile. The keys that any of a tile's rows sees stream
through VMEM once; eight rows at a time are scored, with all heads in one matmul. Then the positions of eight rows at a
time are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import AttentionBatch
from pallas_kernels.paged_attention.tpu.options import (
    LANES,
    ROW_ALIGNMENT,
    Options,
    ceil_div,
    hbm,
    matmul_dtype,
    take,
)
from pallas_kernels.paged_attention.tpu.stream import KVStream, Ring, Tile, ring_scratch
from pallas_kernels.paged_attention.tpu.write import BUFFERS, ChunkWriter, QueryTile, WriteScratch, write_scratch

from . import choice, scores
from .choice import ROWS
from .rows import ChosenRows, ChosenScratch, chosen_scratch

_KV_BUFFERS = 3


class _Scalars(NamedTuple):
    """Scalars, in SMEM."""

    first_block: Any
    """The first block of the layer."""
    lens_s: Any
    starts_s: Any
    ends_s: Any
    slots_t: Any
    tile_seqs_i: Any
    tile_rows_i: Any
    num_tiles: Any


class _Operands(NamedTuple):
    """The operands, in HBM."""

    tables: Any
    q: Any
    """[t / 8, n * 8, h]: the first heads of eight rows, then their second ones, and so on."""
    weights: Any
    """[t / 8, 8, 128]: heads are lanes."""
    new_k: Any
    """[1, t / 16, 16, h]."""
    pool: Any
    chosen: Any
    """[t / 8, 8, w], with the words of decode rows."""
    written: Any
    """The pool again, to write, and to read what was written."""
    out: Any
    """The words again, to write."""


class _Scratch(NamedTuple):
    """Scratch, in VMEM; g are the eights of rows of a tile."""

    q: Any
    """[2, g, n * 8, h]."""
    weights: Any
    """[2, g, 8, 128]."""
    input_semaphores: Any
    factors: Any
    """[g, n * 8, 128]: the weights of the tile at hand, the same in all lanes."""
    scores: Any
    """[g * chunks, 8, 128]."""


def prefill_choices(
    q_tnh: Array,
    weights_tn: Array,
    new_th: Array,
    pool: Array,
    tables: Array,
    batch: AttentionBatch,
    first_block: Array,
    chosen: Array,
    top_k: int,
    options: Options,
) -> tuple[Array, Array]:
    """Write the keys of the longer chunks and choose for them; return the words, and the pool.

    Words are [t / 8, 8, w]; those of other rows than the chunks' stay what they are.
    """
    (t, n, h), eights, words = q_tnh.shape, options.tiles.query // ROWS, chosen.shape[2]
    dtype = matmul_dtype(q_tnh.dtype, pool.dtype)
    q = q_tnh.astype(dtype).reshape(-1, ROWS, n, h).swapaxes(1, 2).reshape(-1, n * ROWS, h)
    new_k = new_th.reshape(1, t // ROW_ALIGNMENT, ROW_ALIGNMENT, h)
    scalars = _Scalars(
        first_block.reshape(1),
        batch.context_lens_s,
        batch.query_starts_s,
        batch.query_ends_s,
        batch.slots_t,
        batch.tile_seqs_i,
        batch.tile_rows_i,
        batch.num_tiles.reshape(1),
    )
    inputs = [tables, q, weights_tn.reshape(-1, ROWS, LANES), new_k, pool, chosen]
    scratch = _Scratch(
        pltpu.VMEM((BUFFERS, eights, *q.shape[1:]), dtype),
        pltpu.VMEM((BUFFERS, eights, ROWS, LANES), jnp.float32),
        pltpu.SemaphoreType.DMA((BUFFERS,)),
        pltpu.VMEM((eights, n * ROWS, LANES), jnp.float32),
        pltpu.VMEM((eights * choice.num_chunks(words), ROWS, LANES), jnp.int32),
    )
    ring = ring_scratch(_KV_BUFFERS, options.kv_tile, pool, tables)
    pool, chosen = pl.pallas_call(
        partial(_kernel, top_k=top_k, options=options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(),
            in_specs=[hbm()] * len(inputs),
            out_specs=[hbm(), hbm()],
            scratch_shapes=[
                *write_scratch(new_k, pool, options),
                *ring,
                *chosen_scratch(eights, words),
                *scratch,
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (pool, chosen)],
        input_output_aliases={len(scalars) + 4: 0, len(scalars) + 5: 1},
        name=f"{options.name}_prefill",
        **options.pallas_options(),
    )(*scalars, *inputs)
    return chosen, pool


def _kernel(*refs: Any, top_k: int, options: Options) -> None:
    scalars, refs = take(_Scalars, refs)
    operands, refs = take(_Operands, refs)
    writing, refs = take(WriteScratch, refs)
    ring, refs = take(Ring, refs)
    chosen, refs = take(ChosenScratch, refs)
    prefill = _Prefill(scalars, operands, ring, ChosenRows(chosen, operands.out), _Scratch(*refs), top_k, options)

    @pl.when(prefill.num_items > 0)
    def _() -> None:
        prefill.write(writing)
        prefill.run()


@dataclass(frozen=True)
class _Prefill:
    """The kernel; item i is tile i of rows."""

    scalars: _Scalars
    operands: _Operands
    ring: Ring
    chosen: ChosenRows
    scratch: _Scratch
    top_k: int
    options: Options

    @property
    def num_items(self) -> Array:
        return self.scalars.num_tiles[0]

    def describe(self, index: Array) -> QueryTile:
        """Return an item. If none of its rows needs scores, one slab of keys is fetched, which nobody reads."""
        scalars, query = self.scalars, self.options.tiles.query
        sequence, row = scalars.tile_seqs_i[index], scalars.tile_rows_i[index]
        left = scalars.ends_s[sequence] - row
        position, num_rows = scalars.lens_s[sequence] - left, jnp.minimum(left, query)
        end = position + num_rows
        return QueryTile(
            number=index,
            sequence=sequence,
            first=jnp.where(end > self.top_k, 0, end - 1),
            end=end,
            row=row,
            num_rows=num_rows,
            position=position,
            is_first=row == scalars.starts_s[sequence],
            is_last=left <= query,
        )

    def write(self, scratch: WriteScratch) -> None:
        """Write the keys of all chunks."""
        ChunkWriter(
            self.operands.new_k,
            self.operands.pool,
            self.operands.written,
            self.scalars.slots_t,
            first_block=self.scalars.first_block[0],
            num_tiles=self.num_items,
            describe=self.describe,
            scratch=scratch,
        ).run()

    def run(self) -> None:
        """Choose for all tiles."""
        stream = KVStream(
            self.operands.written,
            self.operands.tables,
            self.ring,
            first_block=self.scalars.first_block[0],
            num_items=self.num_items,
            describe=self.describe,
        )
        self.chosen.start()
        self.start_inputs(self.describe(jnp.int32(0)))
        stream.run(self.start, self.add_tile, self.end)
        self.chosen.finish()

    def start_inputs(self, item: QueryTile) -> None:
        for copy in self.input_copies(item):
            copy.start()

    def input_copies(self, item: QueryTile) -> list[Any]:
        """Return the copies of a tile's queries and weights, with padding up to eight rows."""
        buffer, first, num = lax.rem(item.number, BUFFERS), lax.div(item.row, ROWS), ceil_div(item.num_rows, ROWS)
        pairs = (self.operands.q, self.scratch.q), (self.operands.weights, self.scratch.weights)
        return [
            pltpu.make_async_copy(
                source.at[pl.ds(first, num)],
                target.at[buffer, pl.ds(0, num)],
                self.scratch.input_semaphores.at[buffer],
            )
            for source, target in pairs
        ]

    def start(self, item: QueryTile) -> None:
        later = item.number + 1
        pl.when(later < self.num_items)(lambda: self.start_inputs(self.describe(later)))
        for copy in self.input_copies(item):
            copy.wait()
        scratch = self.scratch

        def spread(eight: Array) -> None:
            weights = scratch.weights[lax.rem(item.number, BUFFERS), eight]
            scratch.factors[eight] = scores.spread_rows(weights, scratch.factors.shape[1] // ROWS)

        self.for_eights(item, lambda eight, last: pl.when(last >= self.top_k)(lambda: spread(eight)))

    def for_eights(self, item: QueryTile, body: Callable[[Array, Array], None]) -> None:
        """Call `body(eight, last)` for all eights of rows, with the position of the eight's last row."""

        def step(eight: Array, _: None) -> None:
            body(eight, item.position + jnp.minimum((eight + 1) * ROWS, item.num_rows) - 1)

        lax.fori_loop(0, ceil_div(item.num_rows, ROWS), step, None)

    def add_tile(self, tile: Tile[QueryTile]) -> None:
        begin = tile.tile * self.options.kv_tile

        def add(eight: Array, last: Array) -> None:
            pl.when((last >= self.top_k) & (last >= begin))(lambda: self.score(tile, eight))

        self.for_eights(tile.item, add)

    def score(self, tile: Tile[QueryTile], eight: Array) -> None:
        """Store the scores of a tile of keys for eight rows. Those that a row does not see may be anything."""
        scratch, num_keys = self.scratch, self.options.kv_tile
        q = scratch.q[lax.rem(tile.item.number, BUFFERS), eight]
        first = eight * self.num_chunks + tile.tile * (num_keys // LANES)
        keys = self.ring.read(tile.buffer, 0, num_keys)
        keys = scores.to_operand(keys, q.dtype, unpacks_float8=self.options.unpacks_float8)
        scores_rc = choice.sortable(scores.score(q, scratch.factors[eight], keys, ROWS))
        for i in range(num_keys // LANES):
            scratch.scores[first + i] = scores_rc[:, i * LANES : (i + 1) * LANES]

    @property
    def num_chunks(self) -> int:
        """Return the chunks of scores of one eight of rows."""
        return self.scratch.scores.shape[0] // self.scratch.factors.shape[0]

    def end(self, item: QueryTile) -> None:
        self.for_eights(item, partial(self.choose, item))

    def choose(self, item: QueryTile, eight: Array, most: Array) -> None:
        row = eight * ROWS + lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 0)
        last = jnp.where(row < item.num_rows, item.position + row, -1)
        self.chosen.clear(eight)
        rows = choice.rows_of(last, most, self.top_k)
        choice.choose(self.scratch.scores, eight * self.num_chunks, rows, self.top_k, partial(self.chosen.write, eight))
        self.chosen.send(eight, lax.div(item.row, ROWS) + eight)
