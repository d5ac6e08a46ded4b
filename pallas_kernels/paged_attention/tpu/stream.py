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

from .options import LANES, ceil_div

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
    """[num_buffers, k, tile / slab, slab, c] in VMEM."""
    semaphores: Any
    tables: Any
    """[num_tables, m / 128, 128] in SMEM: block tables are fetched further ahead than tiles."""
    table_semaphores: Any


def ring_scratch(num_buffers: int, tile: int, pool: Array, tables: Array) -> Ring:
    """Return the shapes of a ring; it holds as many block tables as fit in SMEM."""
    _, k, _, slab, c = pool.shape
    num_tables = _MOST_TABLES  # a power of two, for cheap remainders
    while num_tables > 2 and 4 * num_tables * tables.size // tables.shape[0] > _TABLE_BYTES:
        num_tables //= 2
    return Ring(
        pltpu.VMEM((num_buffers, k, tile // slab, slab, c), pool.dtype),
        pltpu.SemaphoreType.DMA((num_buffers,)),
        pltpu.SMEM((num_tables, *tables.shape[1:]), jnp.int32),
        pltpu.SemaphoreType.DMA((num_tables,)),
    )


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
        return self.ring.buffers.shape[2]

    def run(
        self, on_start: Callable[[T], None], on_tile: Callable[[Tile[T]], None], on_end: Callable[[T], None]
    ) -> None:
        """Call, for each item, `on_start(item)`, `on_tile` for its tiles in order, and `on_end(item)`."""
        num_buffers, num_tables = self.ring.buffers.shape[0], self.ring.tables.shape[0]

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
                tile = Tile(item, i, lax.rem(count, num_buffers))
                self._wait(tile)
                on_tile(tile)
                return cursor, count + 1

            carry = lax.fori_loop(*self._tiles(item), run_tile, carry)
            on_end(item)
            return carry

        lax.fori_loop(0, self.num_items, run_item, (cursor, jnp.int32(0)))

    def for_last(self, count: int, body: Callable[[T], None]) -> None:
        """Call `body` for the last `count` items, or for all if there are fewer; the last one first."""
        for back in range(1, count + 1):
            index = self.num_items - back
            pl.when(index >= 0)(lambda index=index: body(self.describe(index)))

    def slabs(self, item: T, tile: Array) -> tuple[Array, Array]:
        """Return the first slab of the tile that is fetched, where a block begins, and one past the last."""
        first_block = lax.div(item.first, self._slabs_per_block * self._slab)
        first = jnp.maximum(first_block * self._slabs_per_block - tile * self._slabs_per_tile, 0)
        end = jnp.minimum(ceil_div(item.end, self._slab) - tile * self._slabs_per_tile, self._slabs_per_tile)
        return first, end

    def _tiles(self, item: T) -> tuple[Array, Array]:
        """Return the item's first tile and one past its last."""
        rows = self._slabs_per_tile * self._slab
        return lax.div(item.first, rows), ceil_div(item.end, rows)

    def _fetch(self, cursor: _Cursor) -> _Cursor:
        """Start the copies of a tile; return the next one."""
        item, tile, num_before = cursor
        first_tile, end_tile = self._tiles(item)

        @pl.when(item.number < self.num_items)
        def _() -> None:
            pl.when(tile == first_tile)(lambda: self._enter(item))
            self._fetch_tile(Tile(item, tile, lax.rem(num_before, self.ring.buffers.shape[0])))

        # After the last item comes the last once more, not fetched.
        following: Any = self.describe(jnp.minimum(item.number + 1, self.num_items - 1))
        following = following._replace(number=item.number + 1)
        is_last = tile + 1 >= end_tile
        chosen = type(item)(*(jnp.where(is_last, a, b) for a, b in zip(following, item, strict=True)))
        return _Cursor(chosen, jnp.where(is_last, self._tiles(following)[0], tile + 1), num_before + 1)

    def _fetch_tile(self, tile: Tile[T]) -> None:
        """Start one copy per block, of the slabs in use."""
        per_block, blocks_per_tile = self._slabs_per_block, self._slabs_per_tile // self._slabs_per_block
        first, end = self.slabs(tile.item, tile.tile)
        table = lax.rem(tile.item.number, self.ring.tables.shape[0])

        def fetch_block(i: Array | int, num_slabs: Array | int) -> None:
            entry = tile.tile * blocks_per_tile + i
            block = self.first_block + self.ring.tables[table, lax.div(entry, LANES), lax.rem(entry, LANES)]
            pltpu.make_async_copy(
                self.pool.at[block, :, pl.ds(0, num_slabs)],
                self.ring.buffers.at[tile.buffer, :, pl.ds(i * per_block, num_slabs)],
                self.ring.semaphores.at[tile.buffer],
            ).start()

        def fetch_some(i: Array, _: None) -> None:
            for j in range(unroll):
                fetch_block(i * unroll + j, per_block)

        def fetch_used(i: Array, _: None) -> None:
            fetch_block(i, jnp.minimum(end - i * per_block, per_block))

        # The starts of a whole tile's copies are one stretch of code, where each hides the latencies of the next.
        unroll = min(blocks_per_tile, _UNROLL)
        is_whole = (first == 0) & (end == self._slabs_per_tile)
        pl.when(is_whole)(lambda: lax.fori_loop(0, blocks_per_tile // unroll, fetch_some, None))
        used = lax.div(first, per_block), ceil_div(end, per_block)
        pl.when(~is_whole)(lambda: lax.fori_loop(*used, fetch_used, None))

    def _enter(self, item: T) -> None:
        """Fetch an item's other data, and the block table of a later item."""
        self._table_copy(item.number, item.sequence).wait()
        later = item.number + self.ring.tables.shape[0] - 1
        pl.when(later < self.num_items)(lambda: self._table_copy(later, self.describe(later).sequence).start())
        if self.on_fetch is not None:
            self.on_fetch(item)

    def _table_copy(self, index: Array, sequence: Array) -> Any:
        buffer = lax.rem(index, self.ring.tables.shape[0])
        return pltpu.make_async_copy(
            self.tables.at[sequence], self.ring.tables.at[buffer], self.ring.table_semaphores.at[buffer]
        )

    def _wait(self, tile: Tile[T]) -> None:
        """Wait for all copies of a tile at once."""
        first, end = self.slabs(tile.item, tile.tile)
        copied = self.ring.buffers.at[tile.buffer, :, pl.ds(0, end - first)]
        pltpu.make_async_copy(copied, copied, self.ring.semaphores.at[tile.buffer]).wait()


def clear_slabs(buffers: Any, buffer: Array, first: Array, end: Array) -> None:
    """Zero the slabs [first, end) of a buffer in all heads."""
    _, k, _, slab, columns = buffers.shape

    def clear(i: Array, _: None) -> None:
        buffers[buffer, :, i] = jnp.zeros((k, slab, columns), buffers.dtype)

    lax.fori_loop(first, end, clear, None)
