"""Attend longer chunks, in tiles of query rows.

One program: it writes all chunks' K and V (`write.py`), then attends tile after tile. The rows of a tile are its tokens
times the query heads of a kv head, so that a KV tile is one matmul operand for many rows. They are taken in blocks,
which mask where some rows do not see all of the KV tile (the diagonal, a row's end, the window's edge), and leave out
its second half where no row sees it. A block at a chunk's end that is at most half full is taken in parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..layout import AttentionBatch
from ..row_ends import tile_ends
from . import chosen, softmax
from .options import LANES, ROW_ALIGNMENT, SUBLANES, Options, ceil_div, div, hbm, matmul_dtype, present, rem, take
from .stream import KVStream, Ring, Tile, ring_scratch
from .write import ChunkWriter, QueryTile, WriteScratch, write_scratch

BUFFERS = 2
_KV_BUFFERS = 2
_PART_ROWS = 256
"""The most rows of a part, unless the rows of `ROW_ALIGNMENT` tokens are more."""
_BLOCK_ROWS = 2048
"""The most rows, of one head or several, of a block: a long stretch of code hides latencies."""


class _Scalars(NamedTuple):
    """Scalars, in SMEM."""

    first_and_window: Any
    """The first block of the layer, and the window."""
    lens_s: Any
    starts_s: Any
    ends_s: Any
    slots_t: Any
    tile_seqs_i: Any
    tile_rows_i: Any
    num_tiles: Any
    tile_ends_i: Any
    """One past the last position that any row of the tile sees. This and the next two exist with row ends only."""
    least_ends_p: Any
    """The least end among the rows of each part, of all tiles one after the other."""
    most_ends_p: Any
    """The largest end among the rows of each part."""


class _Operands(NamedTuple):
    """The operands, in HBM except the sinks."""

    tables: Any
    q: Any
    """[k, t / 16, 16 * g, c]."""
    new_kv: Any
    """[k, t / 16, 16, columns of the pool]."""
    pool: Any
    sinks_krx: Any
    ahead: Any
    """[t / 16, 16 * g, 128], the number of later positions that a row sees, in all lanes; with row ends only."""
    chosen: Any
    """[t / 16, 16, w], if positions are chosen."""
    out: Any
    """[k, t / 16, 16 * g, v]."""
    written: Any
    """The pool again, to write, and to read what was written."""


class _Scratch(NamedTuple):
    """Scratch, in VMEM."""

    q: Any
    """[2, k, query / 16, 16 * g, c]."""
    ahead: Any
    """[2, query / 16, 16 * g, 128], with row ends only."""
    chosen: Any
    """[2, query / 16, 16, w], if positions are chosen."""
    q_semaphores: Any
    out: Any
    """[2, k, query / 16, 16 * g, v]."""
    out_semaphores: Any
    maxima: Any
    """[k, query * g, 128], as for the sums."""
    sums: Any
    values: Any
    """[k, query * g, v]."""


def prefill_attention(
    q_tkgc: Array,
    new_tkc: Array,
    pool: Array,
    tables: Array,
    sinks_kg: Array | None,
    chosen_tw: Array | None,
    batch: AttentionBatch,
    first_and_window: Array,
    options: Options,
) -> tuple[Array, Array]:
    """Write and attend the longer chunks; return their rows of [t, k, g, v] and the pool. Other rows are not set."""
    (t, k, g, c), v = q_tkgc.shape, options.num_values
    steps, query = t // ROW_ALIGNMENT, options.tiles.query
    dtype = matmul_dtype(q_tkgc.dtype, pool.dtype)
    q = q_tkgc.transpose(1, 0, 2, 3).reshape(k, steps, ROW_ALIGNMENT * g, c).astype(dtype)
    new_kv = new_tkc.transpose(1, 0, 2).reshape(k, steps, ROW_ALIGNMENT, -1)
    cut, ends = Cut.of(query, g, k), None
    if options.has_row_ends:
        ends = tile_ends(batch, query, cut.part_tokens)
    scalars = _Scalars(
        first_and_window,
        batch.context_lens_s,
        batch.query_starts_s,
        batch.query_ends_s,
        batch.slots_t,
        batch.tile_seqs_i,
        batch.tile_rows_i,
        batch.num_tiles.reshape(1),
        ends and ends.most_ip.max(axis=1),
        ends and ends.least_ip.reshape(-1),
        ends and ends.most_ip.reshape(-1),
    )
    inputs = [tables, q, new_kv, pool]
    in_specs = [hbm()] * len(inputs)
    if sinks_kg is not None:
        inputs.append(_sinks_of_rows(sinks_kg, cut.part_tokens))
        in_specs.append(pl.BlockSpec(memory_space=pltpu.VMEM))
    if ends is not None:
        inputs.append(_ahead_of_rows(ends.ahead_t, g))
        in_specs.append(hbm())
    words = None if chosen_tw is None else chosen_tw.reshape(steps, ROW_ALIGNMENT, -1)
    if words is not None:
        inputs.append(words)
        in_specs.append(hbm())
    float32 = partial(pltpu.VMEM, dtype=jnp.float32)
    ring = ring_scratch(_KV_BUFFERS, options.kv_tile, pool, tables)
    scratch = _Scratch(
        pltpu.VMEM((BUFFERS, k, query // ROW_ALIGNMENT, ROW_ALIGNMENT * g, c), dtype),
        None if ends is None else pltpu.VMEM((BUFFERS, query // ROW_ALIGNMENT, ROW_ALIGNMENT * g, LANES), jnp.int32),
        None if words is None else pltpu.VMEM((BUFFERS, query // ROW_ALIGNMENT, *words.shape[1:]), jnp.int32),
        pltpu.SemaphoreType.DMA((BUFFERS,)),
        pltpu.VMEM((BUFFERS, k, query // ROW_ALIGNMENT, ROW_ALIGNMENT * g, v), q_tkgc.dtype),
        pltpu.SemaphoreType.DMA((BUFFERS,)),
        float32((k, query * g, LANES)),
        float32((k, query * g, LANES)),
        float32((k, query * g, v)),
    )
    out, pool = pl.pallas_call(
        partial(_kernel, options=options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(present(scalars)),
            grid=(),
            in_specs=in_specs,
            out_specs=[hbm(), hbm()],
            scratch_shapes=[*write_scratch(new_kv, pool, options), *ring, *present(scratch)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((*q.shape[:-1], v), q_tkgc.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={len(present(scalars)) + 3: 1},
        name=f"{options.name}_prefill",
        **options.pallas_options(),
    )(*present(scalars), *inputs)
    return out.reshape(k, t, g, v).transpose(1, 0, 2, 3), pool


class _Ends(NamedTuple):
    """The limits of the ends of some rows."""

    least: Array
    most: Array


class _Rows(NamedTuple):
    """Rows that are attended together: `num_tokens` tokens, the same ones for each of some heads."""

    head: Array
    num_heads: int
    number: Array
    """The first of the tokens, divided by `num_tokens`."""
    num_tokens: int


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
            for limit in (_PART_ROWS, _BLOCK_ROWS)
        )
        heads = [x for x in range(1, k + 1) if k % x == 0 and (x == 1 or x * block_tokens * group <= _BLOCK_ROWS)]
        return Cut(part_tokens, block_tokens, max(heads))

    @property
    def parts_per_block(self) -> int:
        return self.block_tokens // self.part_tokens


def _sinks_of_rows(sinks_kg: Array, num_tokens: int) -> Array:
    """Return [k, num_tokens * g, 128]."""
    sinks_kr = jnp.tile(sinks_kg.astype(jnp.float32), (1, num_tokens))
    return jnp.broadcast_to(sinks_kr[..., None], (*sinks_kr.shape, LANES))


def _ahead_of_rows(ahead_t: Array, group: int) -> Array:
    """Return [t / 16, 16 * g, 128]."""
    ahead_sr = jnp.repeat(ahead_t, group).reshape(-1, ROW_ALIGNMENT * group)
    return jnp.broadcast_to(ahead_sr[..., None], (*ahead_sr.shape, LANES))


def _kernel(*refs: Any, options: Options) -> None:
    scalars, refs = take(_Scalars, refs, options.absent)
    operands, refs = take(_Operands, refs, options.absent)
    writing, refs = take(WriteScratch, refs)
    ring, refs = take(Ring, refs)
    scratch = take(_Scratch, refs, options.absent)[0]
    prefill = _Prefill(scalars, operands, ring, scratch, options)

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
        position, num_rows = scalars.lens_s[sequence] - left, jnp.minimum(left, query)
        return QueryTile(
            number=index,
            sequence=sequence,
            first=jnp.maximum(position - scalars.first_and_window[1] + 1, 0),
            end=scalars.tile_ends_i[index] if self.options.has_row_ends else position + num_rows,
            row=row,
            num_rows=num_rows,
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
            first_block=self.scalars.first_and_window[0],
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
            first_block=self.scalars.first_and_window[0],
            num_items=self.num_items,
            describe=self.describe,
        )
        self.start_queries(self.describe(jnp.int32(0)))
        stream.run(self.start, partial(self.attend, stream), self.end)
        stream.for_last(BUFFERS, lambda item: self.out_copy(item).wait())

    def start_queries(self, item: QueryTile) -> None:
        for copy in self.q_copies(item):
            copy.start()

    def q_copies(self, item: QueryTile) -> list[Any]:
        """Return the copies of a tile's queries, of how far ahead they see, and of what is chosen for them."""
        index, source, target = self._rows_of(item, self.operands.q, self.scratch.q)
        pairs = [(source, target)]
        if self.options.has_row_ends:
            _, source, target = self._rows_of(item, self.operands.ahead, self.scratch.ahead)
            pairs.append((source, target))
        if self.options.has_chosen:
            _, source, target = self._rows_of(item, self.operands.chosen, self.scratch.chosen)
            pairs.append((source, target))
        return [pltpu.make_async_copy(*pair, self.scratch.q_semaphores.at[index]) for pair in pairs]

    def out_copy(self, item: QueryTile) -> Any:
        index, target, source = self._rows_of(item, self.operands.out, self.scratch.out)
        return pltpu.make_async_copy(source, target, self.scratch.out_semaphores.at[index])

    def _rows_of(self, item: QueryTile, operand: Any, buffer: Any) -> tuple[Array, Any, Any]:
        """Return a buffer's index, and the tile's rows in HBM and in the buffer, with padding up to the alignment."""
        index = rem(item.number, BUFFERS)
        first, num = div(item.row, ROW_ALIGNMENT), ceil_div(item.num_rows, ROW_ALIGNMENT)
        heads = (slice(None),) * (len(operand.shape) - 3)
        return index, operand.at[*heads, pl.ds(first, num)], buffer.at[index, *heads, pl.ds(0, num)]

    def start(self, item: QueryTile) -> None:
        later = item.number + 1
        pl.when(later < self.num_items)(lambda: self.start_queries(self.describe(later)))
        sinks_krx = self.operands.sinks_krx
        self.for_each_part(
            item,
            lambda rows: softmax.start(
                self.state(rows), None if sinks_krx is None else sinks_krx[pl.ds(rows.head, rows.num_heads)]
            ),
        )
        for copy in self.q_copies(item):
            copy.wait()

    @property
    def cut(self) -> Cut:
        return Cut.of(self.options.tiles.query, self.options.group, self.scratch.q.shape[1])

    def for_each_part(self, item: QueryTile, body: Callable[[_Rows], None]) -> None:
        """Call `body` for all rows of the tile."""
        tokens = self.cut.part_tokens
        num_parts = ceil_div(item.num_rows, tokens)

        def of_head(head: Array, _: None) -> None:
            lax.fori_loop(0, num_parts, lambda part, _: body(_Rows(head, 1, part, tokens)), None)

        lax.fori_loop(0, self.scratch.q.shape[1], of_head, None)

    def state(self, rows: _Rows) -> softmax.State:
        num_rows, scratch = rows.num_tokens * self.options.group, self.scratch
        state = softmax.State(scratch.maxima, scratch.sums, scratch.values)
        return state.at(pl.ds(rows.head, rows.num_heads), pl.ds(rows.number * num_rows, num_rows))

    def attend(self, stream: KVStream, tile: Tile[QueryTile]) -> None:
        self.clear(stream, tile)
        cut = self.cut
        num_blocks = ceil_div(tile.item.num_rows, cut.block_tokens)

        def of_heads(i: Array, _: None) -> None:
            head = i * cut.block_heads
            lax.fori_loop(0, num_blocks, lambda block, _: self.attend_block(tile, head, block), None)

        lax.fori_loop(0, self.scratch.q.shape[1] // cut.block_heads, of_heads, None)

    def attend_block(self, tile: Tile[QueryTile], head: Array, block: Array) -> None:
        """Attend a block's rows together; if no more than half of them exist, part by part."""
        cut, item, kv_tile = self.cut, tile.item, self.options.kv_tile
        first = item.position + block * cut.block_tokens
        rows_left = item.num_rows - block * cut.block_tokens
        num_parts = jnp.minimum(ceil_div(rows_left, cut.part_tokens), cut.parts_per_block)
        ends = self._ends(tile, block * cut.parts_per_block, cut.parts_per_block)
        is_seen, is_whole = self._sight(tile, first, cut.block_tokens, ends)
        together = is_seen & (2 * num_parts > cut.parts_per_block)
        rows = _Rows(head, cut.block_heads, block, cut.block_tokens)
        is_masked = together
        if not self.options.has_chosen:
            is_masked = together & ~is_whole
            pl.when(together & is_whole)(lambda: self.attend_rows(tile, rows, kv_tile, is_masked=False))
        # Adding fully masked scores would change nothing.
        near = max(kv_tile // 2, LANES)
        is_near = ends.most <= tile.tile * kv_tile + near
        pl.when(is_masked & ~is_near)(lambda: self.attend_rows(tile, rows, kv_tile, is_masked=True))
        pl.when(is_masked & is_near)(lambda: self.attend_rows(tile, rows, near, is_masked=True))

        def attend_part(i: Array, part: Array) -> None:
            first, ends = item.position + part * cut.part_tokens, self._ends(tile, part, 1)
            is_seen, _ = self._sight(tile, first, cut.part_tokens, ends)
            rows = _Rows(head + i, 1, part, cut.part_tokens)
            pl.when(is_seen)(lambda: self.attend_rows(tile, rows, kv_tile, is_masked=True))

        def attend_parts(i: Array, _: None) -> None:
            begin = block * cut.parts_per_block
            lax.fori_loop(begin, begin + num_parts, lambda part, _: attend_part(i, part), None)

        if cut.parts_per_block > 1:
            pl.when(is_seen & ~together)(lambda: lax.fori_loop(0, cut.block_heads, attend_parts, None))

    def _ends(self, tile: Tile[QueryTile], part: Array, num_parts: int) -> _Ends:
        """Return the ends of some parts of the query tile, from this one on."""
        tokens = self.cut.part_tokens
        if not self.options.has_row_ends:
            first = tile.item.position + part * tokens
            return _Ends(first + 1, first + num_parts * tokens)
        index = tile.item.number * (self.options.tiles.query // tokens) + part
        least, most = self.scalars.least_ends_p, self.scalars.most_ends_p
        return _Ends(
            reduce(jnp.minimum, [least[index + i] for i in range(num_parts)]),
            reduce(jnp.maximum, [most[index + i] for i in range(num_parts)]),
        )

    def _sight(self, tile: Tile[QueryTile], first: Array, num_tokens: int, ends: _Ends) -> tuple[Array, Array]:
        """Return whether any of `num_tokens` tokens from `first` on sees any of the tile, and whether all see all."""
        last, window = first + num_tokens - 1, self.scalars.first_and_window[1]
        begin, end = tile.tile * self.options.kv_tile, (tile.tile + 1) * self.options.kv_tile
        return (begin < ends.most) & (end > first - window + 1), (end <= ends.least) & (begin > last - window)

    def attend_rows(self, tile: Tile[QueryTile], rows: _Rows, kv_tokens: int, *, is_masked: bool) -> None:
        """Attend to the tile's first `kv_tokens`."""
        ahead = tile.item.position + rows.number * rows.num_tokens - tile.tile * self.options.kv_tile
        keep_rt = None
        if self.options.has_chosen:
            keep_rt = self._keep_chosen(tile, rows, kv_tokens)
        elif is_masked:
            keep_rt = self._keep(tile.item, rows, ahead, kv_tokens)
        steps = rows.num_tokens // ROW_ALIGNMENT
        heads = []
        for head in (rows.head + i for i in range(rows.num_heads)):
            q = self.scratch.q[rem(tile.item.number, BUFFERS), head, pl.ds(rows.number * steps, steps)]
            kv_tc = self.ring.read(tile.buffer, head, kv_tokens)
            heads.append(softmax.Operands(q.reshape(-1, q.shape[-1]), (kv_tc,), keep_rt))
        softmax.attend(self.state(rows), heads, self.options)

    def clear(self, stream: KVStream, tile: Tile[QueryTile]) -> None:
        """Zero the positions beyond the item's: they may hold NaN, and 0 x NaN is NaN."""
        copies, span = stream.copies(tile), stream.span(tile.item, tile.tile)
        copies.clear(span)
        _, _, per_block, slab, _ = self.ring.buffers.shape
        rest = rem(tile.item.end, slab)

        @pl.when((rest > 0) & (tile.item.end < (tile.tile + 1) * self.options.kv_tile))
        def _() -> None:
            block, index = copies.first + div(span.end - 1, per_block), rem(span.end - 1, per_block)
            rows = self.ring.buffers[block, :, index]
            is_live = lax.broadcasted_iota(jnp.int32, rows.shape, 1) < rest
            self.ring.buffers[block, :, index] = jnp.where(is_live, rows, jnp.zeros_like(rows))

    def _keep(self, item: QueryTile, some: _Rows, ahead: Array, kv_tokens: int) -> Array:
        """Return the mask of some tokens' rows of one head; the first is `ahead` positions behind the tile's first."""
        group, window = self.options.group, self.scalars.first_and_window[1]
        rows = some.num_tokens * group
        # The tokens of this many rows are those of the rows before, plus a number.
        period = math.lcm(group, SUBLANES)
        token = lax.broadcasted_iota(jnp.int32, (period, LANES), 0)
        if group > 1:  # integer division in float32: exact, since the half keeps it off the edge
            token = ((token.astype(jnp.float32) + 0.5) * (1 / group)).astype(jnp.int32)
        token += ahead - window + 1
        first = jnp.concatenate([token + i * (period // group) for i in range(rows // period)], axis=0)
        position = lax.broadcasted_iota(jnp.int32, (rows, kv_tokens), 1)
        # Below `first` the difference is a large number without sign.
        behind = position - jnp.concatenate([first] * (kv_tokens // LANES), axis=1)
        if not self.options.has_row_ends:
            return behind.astype(jnp.uint32) < window.astype(jnp.uint32)
        steps = some.num_tokens // ROW_ALIGNMENT
        ahead_rx = self.scratch.ahead[rem(item.number, BUFFERS), pl.ds(some.number * steps, steps)]
        span = window + ahead_rx.reshape(rows, LANES)
        return behind.astype(jnp.uint32) < jnp.concatenate([span] * (kv_tokens // LANES), axis=1).astype(jnp.uint32)

    def _keep_chosen(self, tile: Tile[QueryTile], some: _Rows, kv_tokens: int) -> Array:
        """Return the mask of some tokens' rows of one head: no bit is past its row's own position."""
        steps, kv_tile = some.num_tokens // ROW_ALIGNMENT, self.options.kv_tile
        lanes = pl.ds(pl.multiple_of(chosen.row_of(tile.tile, kv_tile) * LANES, LANES), LANES)
        buffer = rem(tile.item.number, BUFFERS)
        words = self.scratch.chosen[buffer, pl.ds(some.number * steps, steps), :, lanes]
        bits = chosen.unpack(words.reshape(some.num_tokens, LANES), tile.tile, kv_tile, kv_tokens)
        return chosen.repeat(bits, self.options.group)

    def end(self, item: QueryTile) -> None:
        earlier = item.number - BUFFERS
        pl.when(earlier >= 0)(lambda: self.out_copy(self.describe(earlier)).wait())
        out, steps = self.scratch.out, self.cut.part_tokens // ROW_ALIGNMENT
        index = rem(item.number, BUFFERS)

        def store(rows: _Rows) -> None:
            result = softmax.result(self.state(rows), self.options).astype(out.dtype)
            out[index, rows.head, pl.ds(rows.number * steps, steps)] = result.reshape(steps, -1, result.shape[-1])

        self.for_each_part(item, store)
        self.out_copy(item).start()
