"""Stream a kernel's KV tiles through a ring of VMEM buffers.

A kernel has a list of items (sequences, or tiles of query rows). Each item attends to a range of positions. The tiles
of all items, one after the other, are fetched `num_buffers - 1` tiles before they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .options import LANES, ceil_div, div, rem

_MOST_TABLES = 16
_UNROLL = 8
_TABLE_BYTES = 256 * 2**10
"""Bytes of block tables in SMEM, which has 1 MiB."""


class Item(Protocol):
    """The fields of an item that the stream reads. An item is a NamedTuple of scalars."""

    @property
    def number(self) -> Array:
        """Return the item's index in the list."""
        ...

    @property
    def sequence(self) -> Array: ...

    @property
    def first(self) -> Array:
        """Return the first position that it attends to."""
        ...

    @property
    def end(self) -> Array:
        """Return one past the last position that it attends to."""
        ...


class Tile[T: Item](NamedTuple):
    """One KV tile of an item."""

    item: T
    tile: Array
    """The tile's number, counted from position 0."""
    buffer: Array
    """The buffer that holds it."""


class _Cursor(NamedTuple):
    """The next tile to fetch, and the number of tiles fetched before it."""

    item: Any
    tile: Array
    num_before: Array


class Ring(NamedTuple):
    """The scratch of a stream: refs in a kernel, their shapes outside."""

    buffers: Any
    """[num_buffers * tile / o, k, o / slab, slab, c] in VMEM: blocks as in the pool, so that a copy is one stretch."""
    semaphores: Any
    tables: Any
    """[num_tables, m / 128, 128] in SMEM: block tables are fetched further ahead than tiles."""
    table_semaphores: Any

    @property
    def tile_blocks(self) -> int:
        """Return the number of blocks of a tile."""
        return self.buffers.shape[0] // self.semaphores.shape[0]

    def read(self, buffer: Array, head: Array | int, num_tokens: int) -> Array:
        """Return the first tokens [num_tokens, c] of a head in the tile of a buffer."""
        return read_blocks(self.buffers, buffer * self.tile_blocks, head, num_tokens)


def read_blocks(buffers: Any, block: Array, head: Array | int, num_tokens: int) -> Array:
    """Return the rows [num_tokens, c] of a head from a block's buffer on."""
    _, _, slabs, slab, _ = buffers.shape
    rows = buffers[pl.ds(block, num_tokens // (slabs * slab)), head]
    return rows.reshape(num_tokens, -1)


def ring_scratch(num_buffers: int, tile: int, pool: Array, tables: Array) -> Ring:
    """Return the shapes of a ring; it holds as many block tables as fit in SMEM."""
    _, k, slabs, slab, c = pool.shape
    num_tables = _MOST_TABLES  # a power of two, for cheap remainders
    while num_tables > 2 and 4 * num_tables * tables.size // tables.shape[0] > _TABLE_BYTES:
        num_tables //= 2
    return Ring(
        pltpu.VMEM((num_buffers * (tile // (slabs * slab)), k, slabs, slab, c), pool.dtype),
        pltpu.SemaphoreType.DMA((num_buffers,)),
        pltpu.SMEM((num_tables, *tables.shape[1:]), jnp.int32),
        pltpu.SemaphoreType.DMA((num_tables,)),
    )


class Span(NamedTuple):
    """The slabs of a tile that are fetched: whole blocks, but for the last one, which ends with a slab in use."""

    first: Array
    end: Array

    @staticmethod
    def of(first: Array, end: Array, tile: Array | int, pool: Any, blocks: int) -> Span:
        """Return the slabs of a tile of some blocks that have the positions [first, end)."""
        _, _, per_block, slab, _ = pool.shape
        first_slab = div(first, per_block * slab) * per_block - tile * (blocks * per_block)
        end_slab = ceil_div(end, slab) - tile * (blocks * per_block)
        return Span(jnp.maximum(first_slab, 0), jnp.minimum(end_slab, blocks * per_block))


@dataclass(frozen=True)
class BlockCopies:
    """The copies of a tile's blocks from the pool, one copy per block, which share a semaphore."""

    pool: Any
    buffers: Any
    semaphore: Any
    first: Array
    """The buffer of the tile's first block."""
    num_blocks: int

    @property
    def _slabs_per_block(self) -> int:
        return self.pool.shape[2]

    def start(self, span: Span, block_of: Callable[[Array | int], Array]) -> None:
        """Start the copies of the slabs in use; `block_of` returns the block of the pool."""
        per_block = self._slabs_per_block

        def copy(i: Array | int) -> None:
            source, target = self.pool.at[block_of(i)], self.buffers.at[self.first + i]
            pltpu.make_async_copy(source, target, self.semaphore).start()

        def copy_some(i: Array, _: None) -> None:
            for j in range(unroll):
                copy(i * unroll + j)

        # The starts of a whole tile's copies are one stretch of code, where each hides the latencies of the next.
        unroll = min(self.num_blocks, _UNROLL)
        is_whole = (span.first == 0) & (span.end == self.num_blocks * per_block)
        pl.when(is_whole)(lambda: lax.fori_loop(0, self.num_blocks // unroll, copy_some, None))

        @pl.when(~is_whole)
        def _() -> None:
            whole, rest = div(span.end, per_block), rem(span.end, per_block)
            lax.fori_loop(div(span.first, per_block), whole, lambda i, _: copy(i), None)

            @pl.when(rest > 0)
            def _() -> None:
                source = self.pool.at[block_of(whole), :, pl.ds(0, rest)]
                target = self.buffers.at[self.first + whole, :, pl.ds(0, rest)]
                pltpu.make_async_copy(source, target, self.semaphore).start()

    def wait(self, span: Span) -> None:
        """Wait for all copies."""
        per_block = self._slabs_per_block
        whole, rest = div(span.end, per_block), rem(span.end, per_block)

        def wait_for(copied: Any) -> None:
            pltpu.make_async_copy(copied, copied, self.semaphore).wait()

        num_whole = whole - div(span.first, per_block)
        pl.when(num_whole > 0)(lambda: wait_for(self.buffers.at[pl.ds(self.first, num_whole)]))
        pl.when(rest > 0)(lambda: wait_for(self.buffers.at[self.first, :, pl.ds(0, rest)]))

    def clear(self, span: Span) -> None:
        """Zero the slabs that are not in use: they may hold NaN, and 0 x NaN is NaN."""
        self._clear(jnp.int32(0), span.first)
        self._clear(span.end, jnp.int32(self.num_blocks * self._slabs_per_block))

    def _clear(self, first: Array, end: Array) -> None:
        _, k, per_block, slab, columns = self.buffers.shape

        def clear(i: Array, _: None) -> None:
            zeros = jnp.zeros((k, slab, columns), self.buffers.dtype)
            self.buffers[self.first + div(i, per_block), :, rem(i, per_block)] = zeros

        lax.fori_loop(first, end, clear, None)


@dataclass(frozen=True)
class KVStream[T: Item]:
    """The pool that streams through a ring, and the items that it streams for."""

    pool: Any
    """[l * b, k, o / slab, slab, c] in HBM."""
    tables: Any
    """[s, m / 128, 128] in HBM."""
    ring: Ring
    first_block: Array
    num_items: Array
    describe: Callable[[Array], T]
    """A function that reads an item's scalars."""
    on_fetch: Callable[[T], None] | None = None
    """A function that starts the copies of an item's other data; called before its first tile is fetched."""

    @property
    def _slab(self) -> int:
        return self.pool.shape[3]

    @property
    def _slabs_per_block(self) -> int:
        return self.pool.shape[2]

    @property
    def _slabs_per_tile(self) -> int:
        return self.ring.tile_blocks * self._slabs_per_block

    def run(
        self, on_start: Callable[[T], None], on_tile: Callable[[Tile[T]], None], on_end: Callable[[T], None]
    ) -> None:
        """Call, for each item, `on_start(item)`, `on_tile` for its tiles in order, and `on_end(item)`."""
        num_buffers, num_tables = self.ring.semaphores.shape[0], self.ring.tables.shape[0]

        def fetch_table(i: Array, _: None) -> None:
            self._table_copy(i, self.describe(i).sequence).start()

        lax.fori_loop(0, jnp.minimum(num_tables - 1, self.num_items), fetch_table, None)
        first = self.describe(jnp.int32(0))
        cursor = _Cursor(first, self._tiles(first)[0], jnp.int32(0))
        cursor = lax.fori_loop(0, num_buffers - 1, lambda _, cursor: self._fetch(cursor), cursor)

        def run_item(i: Array, carry: tuple[_Cursor, Array]) -> tuple[_Cursor, Array]:
            item = self.describe(i)
            on_start(item)

            def run_tile(i: Array, carry: tuple[_Cursor, Array]) -> tuple[_Cursor, Array]:
                cursor, count = carry
                cursor = self._fetch(cursor)
                tile = Tile(item, i, rem(count, num_buffers))
                self._wait(tile)
                on_tile(tile)
                return cursor, count + 1

            carry = lax.fori_loop(*self._tiles(item), run_tile, carry)
            on_end(item)
            return carry

        lax.fori_loop(0, self.num_items, run_item, (cursor, jnp.int32(0)))

    def for_last(self, count: int, body: Callable[[T], None]) -> None:
        """Call `body` for the last `count` items, or for all if there are fewer."""
        first = jnp.maximum(self.num_items - count, 0)
        lax.fori_loop(first, self.num_items, lambda i, _: body(self.describe(i)), None)

    def span(self, item: T, tile: Array) -> Span:
        """Return the slabs of the tile that are fetched."""
        return Span.of(item.first, item.end, tile, self.pool, self.ring.tile_blocks)

    def copies(self, tile: Tile[T]) -> BlockCopies:
        """Return the copies of a tile's blocks."""
        blocks = self.ring.tile_blocks
        semaphore = self.ring.semaphores.at[tile.buffer]
        return BlockCopies(self.pool, self.ring.buffers, semaphore, tile.buffer * blocks, blocks)

    def _tiles(self, item: T) -> tuple[Array, Array]:
        """Return the item's first tile and one past its last."""
        rows = self._slabs_per_tile * self._slab
        return div(item.first, rows), ceil_div(item.end, rows)

    def _fetch(self, cursor: _Cursor) -> _Cursor:
        """Start the copies of a tile; return the next one."""
        item, tile, num_before = cursor
        first_tile, end_tile = self._tiles(item)

        @pl.when(item.number < self.num_items)
        def _() -> None:
            pl.when(tile == first_tile)(lambda: self._enter(item))
            self._fetch_tile(Tile(item, tile, rem(num_before, self.ring.semaphores.shape[0])))

        # After the last item comes the last once more, not fetched.
        following: Any = self.describe(jnp.minimum(item.number + 1, self.num_items - 1))
        following = following._replace(number=item.number + 1)
        is_last = tile + 1 >= end_tile
        chosen = type(item)(*(jnp.where(is_last, a, b) for a, b in zip(following, item, strict=True)))
        return _Cursor(chosen, jnp.where(is_last, self._tiles(following)[0], tile + 1), num_before + 1)

    def _fetch_tile(self, tile: Tile[T]) -> None:
        table, blocks = rem(tile.item.number, self.ring.tables.shape[0]), self.ring.tile_blocks

        def block_of(i: Array | int) -> Array:
            entry = tile.tile * blocks + i
            return self.first_block + self.ring.tables[table, div(entry, LANES), rem(entry, LANES)]

        self.copies(tile).start(self.span(tile.item, tile.tile), block_of)

    def _enter(self, item: T) -> None:
        """Fetch an item's other data, and the block table of a later item."""
        self._table_copy(item.number, item.sequence).wait()
        later = item.number + self.ring.tables.shape[0] - 1
        pl.when(later < self.num_items)(lambda: self._table_copy(later, self.describe(later).sequence).start())
        if self.on_fetch is not None:
            self.on_fetch(item)

    def _table_copy(self, index: Array, sequence: Array) -> Any:
        buffer = rem(index, self.ring.tables.shape[0])
        return pltpu.make_async_copy(
            self.tables.at[sequence], self.ring.tables.at[buffer], self.ring.table_semaphores.at[buffer]
        )

    def _wait(self, tile: Tile[T]) -> None:
        self.copies(tile).wait(self.span(tile.item, tile.tile))
