"""Choose for decode rows: sequences with one new token each.

One program. The keys of all sequences stream through one ring. A sequence's scores fill one of eight rows; after every
eighth sequence the positions of all eight are chosen, as a pass takes as long for one row as for eight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import AttentionBatch
from pallas_kernels.paged_attention.tpu.options import LANES, Options, hbm, matmul_dtype, take
from pallas_kernels.paged_attention.tpu.stream import KVStream, Ring, Tile, ring_scratch
from pallas_kernels.paged_attention.tpu.write import BUFFERS, TokenWriter

from . import choice, scores
from .rows import ChosenRows, ChosenScratch, chosen_scratch


class _Scalars(NamedTuple):
    """Scalars, in SMEM."""

    first_block: Any
    """The first block of the layer."""
    lens_s: Any
    slots_s: Any
    num_decodes: Any


class _Operands(NamedTuple):
    """The operands, in HBM."""

    tables: Any
    q: Any
    """[s, n, h]."""
    weights: Any
    """[s, 1, 128]: heads are lanes."""
    new_k: Any
    """[s, 1, h]."""
    pool: Any
    out: Any
    """[t / 8, 8, w]; rows that are no decodes are not set, or 0."""
    written: Any
    """The pool again, to write."""


class _Scratch(NamedTuple):
    """Scratch, in VMEM."""

    q: Any
    """[num_buffers, n, h], as for the two after it."""
    weights: Any
    new_k: Any
    input_semaphores: Any
    slabs: Any
    """[2, 1, slab, h], on the way to the pool."""
    slab_semaphores: Any
    factors: Any
    """[n, 128]: the weights of the row at hand, the same in all lanes."""
    scores: Any
    """[chunks, 8, 128]."""


def decode_choices(
    q_snh: Array,
    weights_sn: Array,
    new_sh: Array,
    pool: Array,
    tables: Array,
    batch: AttentionBatch,
    first_block: Array,
    words: int,
    top_k: int,
    options: Options,
) -> tuple[Array, Array]:
    """Write the keys of the leading `num_decodes` sequences and choose for them.

    Return words [t / 8, 8, w], whose other rows are arbitrary, and the pool.
    """
    (s, n, h), num_buffers, slab = q_snh.shape, options.tiles.decode, pool.shape[3]
    dtype = matmul_dtype(q_snh.dtype, pool.dtype)
    scalars = _Scalars(first_block.reshape(1), batch.context_lens_s, batch.slots_t[:s], batch.num_decodes.reshape(1))
    inputs = [tables, q_snh.astype(dtype), weights_sn[:, None], new_sh[:, None], pool]
    scratch = _Scratch(
        pltpu.VMEM((num_buffers, n, h), dtype),
        pltpu.VMEM((num_buffers, 1, LANES), jnp.float32),
        pltpu.VMEM((num_buffers, 1, h), new_sh.dtype),
        pltpu.SemaphoreType.DMA((num_buffers,)),
        pltpu.VMEM((BUFFERS, 1, slab, h), pool.dtype),
        pltpu.SemaphoreType.DMA((BUFFERS,)),
        pltpu.VMEM((n, LANES), jnp.float32),
        pltpu.VMEM((choice.num_chunks(words), choice.ROWS, LANES), jnp.int32),
    )
    ring = ring_scratch(num_buffers, options.kv_tile, pool, tables)
    chosen, pool = pl.pallas_call(
        partial(_kernel, top_k=top_k, options=options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(),
            in_specs=[hbm()] * len(inputs),
            out_specs=[hbm(), hbm()],
            scratch_shapes=[*ring, *chosen_scratch(1, words), *scratch],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((len(batch.slots_t) // choice.ROWS, choice.ROWS, words), jnp.int32),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={len(scalars) + 4: 1},
        name=f"{options.name}_decode",
        **options.pallas_options(),
    )(*scalars, *inputs)
    return chosen, pool


def _kernel(*refs: Any, top_k: int, options: Options) -> None:
    scalars, refs = take(_Scalars, refs)
    operands, refs = take(_Operands, refs)
    ring, refs = take(Ring, refs)
    chosen, refs = take(ChosenScratch, refs)
    decode = _Decode(scalars, operands, ring, ChosenRows(chosen, operands.out), _Scratch(*refs), top_k, options)
    pl.when(decode.num_items > 0)(decode.run)


class _Sequence(NamedTuple):
    """An item of the stream."""

    number: Array
    sequence: Array
    first: Array
    end: Array
    slot: Array
    """The slot of the new token."""


@dataclass(frozen=True)
class _Decode:
    """The kernel."""

    scalars: _Scalars
    operands: _Operands
    ring: Ring
    chosen: ChosenRows
    scratch: _Scratch
    top_k: int
    options: Options

    @property
    def num_items(self) -> Array:
        return self.scalars.num_decodes[0]

    @property
    def writer(self) -> TokenWriter:
        scratch = self.scratch
        return TokenWriter(
            self.ring.buffers,
            scratch.new_k,
            scratch.slabs,
            scratch.slab_semaphores,
            self.operands.written,
            self.scalars.first_block[0],
        )

    def run(self) -> None:
        stream = KVStream(
            self.operands.pool,
            self.operands.tables,
            self.ring,
            first_block=self.scalars.first_block[0],
            num_items=self.num_items,
            describe=self.describe,
            on_fetch=self.fetch_inputs,
        )
        self.chosen.start()
        stream.run(self.start, self.add_tile, self.end)
        stream.for_last(BUFFERS, lambda item: self.writer.copy(item).wait())
        self.chosen.finish()

    def describe(self, index: Array) -> _Sequence:
        """Return an item. If it needs no scores, its last rows alone are fetched, to write the new key."""
        end = jnp.maximum(self.scalars.lens_s[index], 1)
        first = jnp.where(end > self.top_k, 0, end - 1)
        return _Sequence(index, index, first, end, self.scalars.slots_s[index])

    def fetch_inputs(self, item: _Sequence) -> None:
        for copy in self.input_copies(item):
            copy.start()

    def input_copies(self, item: _Sequence) -> list[Any]:
        operands, scratch, buffer = self.operands, self.scratch, lax.rem(item.number, self.scratch.q.shape[0])
        pairs = (operands.q, scratch.q), (operands.weights, scratch.weights), (operands.new_k, scratch.new_k)
        semaphore = scratch.input_semaphores.at[buffer]
        return [pltpu.make_async_copy(source.at[item.number], target.at[buffer], semaphore) for source, target in pairs]

    def start(self, item: _Sequence) -> None:
        for copy in self.input_copies(item):
            copy.wait()
        weights_1n = self.scratch.weights[lax.rem(item.number, self.scratch.weights.shape[0])]
        self.scratch.factors[...] = scores.spread_row(weights_1n, self.scratch.factors.shape[0])

    def add_tile(self, tile: Tile[_Sequence]) -> None:
        is_last = tile.item.end <= (tile.tile + 1) * self.options.kv_tile
        pl.when(is_last)(lambda: self.writer.write(tile.item, (tile.buffer - tile.tile) * self.ring.tile_blocks))
        pl.when(tile.item.end > self.top_k)(lambda: self.score(tile))

    def score(self, tile: Tile[_Sequence]) -> None:
        """Fill the sequence's row with the scores of a tile. Those that it does not see may be anything."""
        scratch, num_keys = self.scratch, self.options.kv_tile
        q_nh = scratch.q[lax.rem(tile.item.number, scratch.q.shape[0])]
        row = lax.rem(tile.item.number, choice.ROWS)
        is_row = lax.broadcasted_iota(jnp.int32, (choice.ROWS, LANES), 0) == row
        keys = self.ring.read(tile.buffer, 0, num_keys)
        keys = scores.to_operand(keys, q_nh.dtype, unpacks_float8=self.options.unpacks_float8)
        scores_1c = choice.sortable(scores.score(q_nh, scratch.factors[...], keys, 1))
        for i in range(num_keys // LANES):
            chunk = tile.tile * (num_keys // LANES) + i
            new = jnp.broadcast_to(scores_1c[:, i * LANES : (i + 1) * LANES], is_row.shape)
            scratch.scores[chunk] = jnp.where(is_row, new, scratch.scores[chunk])

    def end(self, item: _Sequence) -> None:
        is_last = item.number == self.num_items - 1
        pl.when((lax.rem(item.number, choice.ROWS) == choice.ROWS - 1) | is_last)(lambda: self.choose(item))

    def choose(self, item: _Sequence) -> None:
        """Choose for eight sequences, up to this one."""
        group = lax.div(item.number, choice.ROWS)
        row = lax.broadcasted_iota(jnp.int32, (choice.ROWS, LANES), 0)
        last, most = jnp.full((choice.ROWS, LANES), -1, jnp.int32), jnp.int32(-1)
        for i in range(choice.ROWS):
            sequence = group * choice.ROWS + i
            length = self.scalars.lens_s[jnp.minimum(sequence, item.number)]
            position = jnp.where(sequence <= item.number, jnp.maximum(length, 1) - 1, -1)
            last, most = jnp.where(row == i, position, last), jnp.maximum(most, position)
        self.chosen.clear(0)
        rows = choice.rows_of(last, most, self.top_k)
        choice.choose(self.scratch.scores, 0, rows, self.top_k, partial(self.chosen.write, 0))
        self.chosen.send(0, group)
