"""Attend longer chunks, in tiles of query rows.

One program: it writes all chunks' K and V (`write.py`), then attends tile after tile. The rows of a tile are its tokens
times the query heads of a kv head, so that a KV tile is one matmul operand for many rows. They are taken in blocks; a
block of which some do not see all of the KV tile (the diagonal, the window's edge, a chunk's end) in parts, and of
those only the ones on an edge mask, and the ones that see nothing are skipped.
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

from ..layout import AttentionBatch
from . import softmax
from .options import LANES, ROW_ALIGNMENT, Options, ceil_div, hbm, matmul_dtype, take
from .stream import KVStream, Ring, Tile, clear_slabs, ring_scratch
from .write import ChunkWriter, QueryTile, WriteScratch, write_scratch

BUFFERS = 2
KV_BUFFERS = 2
PART_ROWS = 256
"""At most so many rows are attended at a time, if one token's are not more."""
BLOCK_ROWS = 1024
"""So many rows, of one head or several, are attended where there is no mask: a long stretch of code hides latencies."""


class _Scalars(NamedTuple):
    """Scalars, in SMEM."""

    place: Any
    """The first block of the layer, and the window."""
    lens_s: Any
    starts_s: Any
    ends_s: Any
    slots_t: Any
    tile_seqs_i: Any
    tile_rows_i: Any
    num_tiles: Any


class _Operands(NamedTuple):
    """Operands, in HBM but for the sinks."""

    tables: Any
    q: Any
    """[k, t / 16, 16 * g, c]."""
    new_kv: Any
    """[k, t / 16, 16, 2 * h]."""
    pool: Any
    sinks_krx: Any
    out: Any
    """Its shape is that of q."""
    written: Any
    """The pool again, to write and to read what was written."""


class _Scratch(NamedTuple):
    """Scratch, in VMEM."""

    q: Any
    """[2, k, query / 16, 16 * g, c]."""
    q_semaphores: Any
    out: Any
    """Its shape is that of q."""
    out_semaphores: Any
    maxima: Any
    """[k, query * g, 128], as the sums."""
    sums: Any
    values: Any


def prefill_attention(
    q_tkgc: Array,
    new_tkc: Array,
    pool: Array,
    tables: Array,
    sinks_kg: Array | None,
    batch: AttentionBatch,
    place: Array,
    options: Options,
) -> tuple[Array, Array]:
    """Write and attend the longer chunks; return their rows of [t, k, g, c] and the pool. Other rows are not set."""
    t, k, g, c = q_tkgc.shape
    steps, query = t // ROW_ALIGNMENT, options.tiles.query
    dtype = matmul_dtype(q_tkgc.dtype, pool.dtype)
    q = q_tkgc.transpose(1, 0, 2, 3).reshape(k, steps, ROW_ALIGNMENT * g, c).astype(dtype)
    new_kv = new_tkc.transpose(1, 0, 2).reshape(k, steps, ROW_ALIGNMENT, -1)
    scalars = _Scalars(
        place,
        batch.context_lens_s,
        batch.query_starts_s,
        batch.query_ends_s,
        batch.slots_t,
        batch.tile_seqs_i,
        batch.tile_rows_i,
        batch.num_tiles.reshape(1),
    )
    inputs = [tables, q, new_kv, pool]
    in_specs = [hbm()] * len(inputs)
    if sinks_kg is not None:
        inputs.append(_sinks_of_rows(sinks_kg, Cut.of(query, g, k).part_tokens))
        in_specs.append(pl.BlockSpec(memory_space=pltpu.VMEM))
    float32 = partial(pltpu.VMEM, dtype=jnp.float32)
    ring = ring_scratch(KV_BUFFERS, options.kv_tile, pool, tables)
    scratch = _Scratch(
        pltpu.VMEM((BUFFERS, k, query // ROW_ALIGNMENT, ROW_ALIGNMENT * g, c), dtype),
        pltpu.SemaphoreType.DMA((BUFFERS,)),
        pltpu.VMEM((BUFFERS, k, query // ROW_ALIGNMENT, ROW_ALIGNMENT * g, c), q_tkgc.dtype),
        pltpu.SemaphoreType.DMA((BUFFERS,)),
        float32((k, query * g, LANES)),
        float32((k, query * g, LANES)),
        float32((k, query * g, c)),
    )
    out, pool = pl.pallas_call(
        partial(_kernel, options=options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(),
            in_specs=in_specs,
            out_specs=[hbm(), hbm()],
            scratch_shapes=[*write_scratch(new_kv, pool, options), *ring, *scratch],
        ),
        out_shape=[jax.ShapeDtypeStruct(q.shape, q_tkgc.dtype), jax.ShapeDtypeStruct(pool.shape, pool.dtype)],
        input_output_aliases={len(scalars) + 3: 1},
        name="paged_prefill",
        **options.pallas_options(),
    )(*scalars, *inputs)
    return out.reshape(k, t, g, c).transpose(1, 0, 2, 3), pool


class Cut(NamedTuple):
    """The way in which the rows of a tile are attended: in parts, or in blocks of several parts and heads."""

    part_tokens: int
    block_tokens: int
    block_heads: int

    @staticmethod
    def of(query: int, group: int, k: int) -> Cut:
        """Return the largest parts and blocks that fit the limits."""
        sizes = [tokens for tokens in (ROW_ALIGNMENT << i for i in range(8)) if query % tokens == 0]
        part_tokens, block_tokens = (
            max((tokens for tokens in sizes if tokens * group <= limit), default=ROW_ALIGNMENT)
            for limit in (PART_ROWS, BLOCK_ROWS)
        )
        heads = [x for x in range(1, k + 1) if k % x == 0 and (x == 1 or x * block_tokens * group <= BLOCK_ROWS)]
        return Cut(part_tokens, block_tokens, max(heads))

    @property
    def parts_per_block(self) -> int:
        return self.block_tokens // self.part_tokens


def _sinks_of_rows(sinks_kg: Array, num_tokens: int) -> Array:
    """Return [k, num_tokens * g, 128]."""
    sinks_kr = jnp.tile(sinks_kg.astype(jnp.float32), (1, num_tokens))
    return jnp.broadcast_to(sinks_kr[..., None], (*sinks_kr.shape, LANES))


def _kernel(*refs: Any, options: Options) -> None:
    scalars, refs = take(_Scalars, refs)
    operands, refs = take(_Operands, refs if options.has_sinks else (*refs[:4], None, *refs[4:]))
    writing, refs = take(WriteScratch, refs)
    ring, refs = take(Ring, refs)
    prefill = _Prefill(scalars, operands, ring, _Scratch(*refs), options)

    @pl.when(prefill.num_items > 0)
    def _() -> None:
        prefill.write(writing)
        prefill.run()


@dataclass(frozen=True)
class _Prefill:
    """The kernel; item i is query tile i."""

    scalars: _Scalars
    operands: _Operands
    ring: Ring
    scratch: _Scratch
    options: Options

    @property
    def num_items(self) -> Array:
        return self.scalars.num_tiles[0]

    def describe(self, index: Array) -> QueryTile:
        scalars, query = self.scalars, self.options.tiles.query
        sequence, row = scalars.tile_seqs_i[index], scalars.tile_rows_i[index]
        left = scalars.ends_s[sequence] - row
        position = scalars.lens_s[sequence] - left
        return QueryTile(
            number=index,
            sequence=sequence,
            first=jnp.maximum(position - scalars.place[1] + 1, 0),
            end=position + jnp.minimum(left, query),
            row=row,
            position=position,
            is_first=row == scalars.starts_s[sequence],
            is_last=left <= query,
        )

    def write(self, scratch: WriteScratch) -> None:
        """Write the K and V of all chunks."""
        ChunkWriter(
            self.operands.new_kv,
            self.operands.pool,
            self.operands.written,
            self.scalars.slots_t,
            first_block=self.scalars.place[0],
            num_tiles=self.num_items,
            describe=self.describe,
            scratch=scratch,
        ).run()

    def run(self) -> None:
        """Attend all tiles."""
        stream = KVStream(
            self.operands.written,
            self.operands.tables,
            self.ring,
            first_block=self.scalars.place[0],
            num_items=self.num_items,
            describe=self.describe,
        )
        self.q_copy(self.describe(jnp.int32(0))).start()
        stream.run(self.start, partial(self.attend, stream), self.end)
        stream.for_last(BUFFERS, lambda item: self.out_copy(item).wait())

    def q_copy(self, item: QueryTile) -> Any:
        place, source, target = self._rows_of(item, self.operands.q, self.scratch.q)
        return pltpu.make_async_copy(source, target, self.scratch.q_semaphores.at[place])

    def out_copy(self, item: QueryTile) -> Any:
        place, target, source = self._rows_of(item, self.operands.out, self.scratch.out)
        return pltpu.make_async_copy(source, target, self.scratch.out_semaphores.at[place])

    def _rows_of(self, item: QueryTile, operand: Any, buffer: Any) -> tuple[Array, Any, Any]:
        """Return the buffer's place, and the tile's rows in HBM and there; rows up to the alignment are padding."""
        place = lax.rem(item.number, BUFFERS)
        first, num = lax.div(item.row, ROW_ALIGNMENT), ceil_div(item.num_rows, ROW_ALIGNMENT)
        return place, operand.at[:, pl.ds(first, num)], buffer.at[place, :, pl.ds(0, num)]

    def start(self, item: QueryTile) -> None:
        later = item.number + 1
        pl.when(later < self.num_items)(lambda: self.q_copy(self.describe(later)).start())
        sinks_krx = self.operands.sinks_krx
        self.for_each_part(
            item,
            lambda head, part: softmax.start(self.state(head, part), None if sinks_krx is None else sinks_krx[head]),
        )
        self.q_copy(item).wait()

    @property
    def cut(self) -> Cut:
        return Cut.of(self.options.tiles.query, self.options.group, self.scratch.q.shape[1])

    def for_each_part(self, item: QueryTile, body: Callable[[Array, Array], None]) -> None:
        """Call `body(head, part)` for all rows of the tile."""
        num_parts = ceil_div(item.num_rows, self.cut.part_tokens)

        def of_head(head: Array, _: None) -> None:
            lax.fori_loop(0, num_parts, lambda part, _: body(head, part), None)

        lax.fori_loop(0, self.scratch.q.shape[1], of_head, None)

    def state(self, head: Any, part: Array, num_tokens: int | None = None) -> softmax.State:
        """Return the state of a part of the rows, or of a block of `num_tokens`."""
        rows = (num_tokens or self.cut.part_tokens) * self.options.group
        scratch = self.scratch
        return softmax.State(scratch.maxima, scratch.sums, scratch.values).at(head, pl.ds(part * rows, rows))

    def attend(self, stream: KVStream, tile: Tile[QueryTile]) -> None:
        self.clear(stream, tile)
        cut, item, tile_tokens = self.cut, tile.item, self.options.kv_tile
        tile_first = tile.tile * tile_tokens

        def is_whole(first: Array, last: Array) -> Array:
            """Say whether tokens at these positions attend to all of the tile."""
            return (tile_first + tile_tokens <= first + 1) & (tile_first > last - self.scalars.place[1])

        def attend_part(head: Array, part: Array) -> None:
            first = item.position + part * cut.part_tokens
            last = first + cut.part_tokens - 1

            def attend(is_masked: bool) -> None:
                keep_rt = self._keep(first - tile_first) if is_masked else None
                heads = [self._operands(tile, head, part, cut.part_tokens)]
                softmax.attend(self.state(head, part), heads, keep_rt, self.options)

            whole = is_whole(first, last)
            is_seen = (tile_first <= last) & (tile_first + tile_tokens > first - self.scalars.place[1] + 1)
            pl.when(whole)(lambda: attend(is_masked=False))
            pl.when(is_seen & ~whole)(lambda: attend(is_masked=True))

        def attend_block(i: Array, block: Array) -> None:
            first_head = i * cut.block_heads
            first = item.position + block * cut.block_tokens
            last = first + cut.block_tokens - 1

            def attend() -> None:
                heads = [self._operands(tile, first_head + j, block, cut.block_tokens) for j in range(cut.block_heads)]
                state = self.state(pl.ds(first_head, cut.block_heads), block, cut.block_tokens)
                softmax.attend(state, heads, None, self.options)

            def attend_parts(head: Array, _: None) -> None:
                begin = block * cut.parts_per_block
                end = jnp.minimum(begin + cut.parts_per_block, ceil_div(item.num_rows, cut.part_tokens))
                lax.fori_loop(begin, end, lambda part, _: attend_part(first_head + head, part), None)

            whole = is_whole(first, last) & (last < item.end)
            pl.when(whole)(attend)
            pl.when(~whole)(lambda: lax.fori_loop(0, cut.block_heads, attend_parts, None))

        if cut.parts_per_block * cut.block_heads == 1:
            self.for_each_part(item, attend_part)
            return
        num_blocks = ceil_div(item.num_rows, cut.block_tokens)

        def of_heads(i: Array, _: None) -> None:
            lax.fori_loop(0, num_blocks, lambda block, _: attend_block(i, block), None)

        lax.fori_loop(0, self.scratch.q.shape[1] // cut.block_heads, of_heads, None)

    def clear(self, stream: KVStream, tile: Tile[QueryTile]) -> None:
        """Zero what lies beyond the item's positions: it may hold NaN, and 0 x NaN is NaN."""
        first_slab, end_slab = stream.slabs(tile.item, tile.tile)
        clear_slabs(self.ring.buffers, tile.buffer, jnp.int32(0), first_slab)
        clear_slabs(self.ring.buffers, tile.buffer, end_slab, jnp.int32(self.ring.buffers.shape[2]))
        slab = self.ring.buffers.shape[3]
        rest = lax.rem(tile.item.end, slab)

        @pl.when((rest > 0) & (tile.item.end < (tile.tile + 1) * self.options.kv_tile))
        def _() -> None:
            rows = self.ring.buffers[tile.buffer, :, end_slab - 1]
            is_live = lax.broadcasted_iota(jnp.int32, rows.shape, 1) < rest
            self.ring.buffers[tile.buffer, :, end_slab - 1] = jnp.where(is_live, rows, jnp.zeros_like(rows))

    def _operands(self, tile: Tile[QueryTile], head: Array, part: Array, num_tokens: int) -> softmax.Operands:
        """Return some rows of q and the tile's K and V."""
        steps = num_tokens // ROW_ALIGNMENT
        q = self.scratch.q[lax.rem(tile.item.number, BUFFERS), head, pl.ds(part * steps, steps)]
        kv_tc = self.ring.buffers[tile.buffer, head].reshape(self.options.kv_tile, -1)
        return softmax.Operands(q.reshape(-1, q.shape[-1]), kv_tc)

    def _keep(self, ahead: Array) -> Array:
        """Return the mask of a part's rows, the first of which is `ahead` of the tile's first position."""
        group, num_tokens = self.options.group, self.options.kv_tile
        rows = self.cut.part_tokens * group
        token = lax.broadcasted_iota(jnp.int32, (rows, LANES), 0)
        if group > 1:  # whole division, by way of float32: exact, the half keeps it off the edge
            token = ((token.astype(jnp.float32) + 0.5) * (1 / group)).astype(jnp.int32)
        last = jnp.concatenate([token + ahead] * (num_tokens // LANES), axis=1)
        before_first = jnp.concatenate([token + (ahead - self.scalars.place[1])] * (num_tokens // LANES), axis=1)
        position = lax.broadcasted_iota(jnp.int32, (rows, num_tokens), 1)
        return (position <= last) & (position > before_first)

    def end(self, item: QueryTile) -> None:
        earlier = item.number - BUFFERS
        pl.when(earlier >= 0)(lambda: self.out_copy(self.describe(earlier)).wait())
        out, steps = self.scratch.out, self.cut.part_tokens // ROW_ALIGNMENT
        place = lax.rem(item.number, BUFFERS)

        def store(head: Array, part: Array) -> None:
            rows = softmax.result(self.state(head, part)).astype(out.dtype)
            out[place, head, pl.ds(part * steps, steps)] = rows.reshape(steps, -1, rows.shape[-1])

        self.for_each_part(item, store)
        self.out_copy(item).start()
