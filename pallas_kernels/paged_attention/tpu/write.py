"""Write chunks of K and V into the pool, before anything attends to them, and decoded tokens while they are attended.

A tile of new rows lands at any offset in a block, but a DMA moves whole slabs. So the rows are shifted in VMEM to where
slabs begin, and the slabs at the two ends of a chunk are completed with the pool's rows. A slab that two tiles share is
left to the second tile, which has the rows of the first before its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .options import LANES, ROW_ALIGNMENT, Options, ceil_div, div, rem

BUFFERS = 2


class NewToken(Protocol):
    """The fields of a decoded sequence that its writer reads."""

    @property
    def number(self) -> Array:
        """Return the sequence's index in a list."""
        ...

    @property
    def end(self) -> Array:
        """Return one past the token's position."""
        ...

    @property
    def slot(self) -> Array: ...


@dataclass(frozen=True)
class TokenWriter:
    """Writes the new tokens of decoded sequences, one after the other, by way of several slabs."""

    buffers: Any
    """[n, k, o / slab, slab, c]: fetched blocks."""
    new: Any
    """[m, k, c] in VMEM: the new row of sequence i is at i modulo m."""
    slabs: Any
    """[num_slabs, k, slab, c] in VMEM."""
    semaphores: Any
    written: Any
    """The pool [l * b, k, o / slab, slab, c] in HBM."""
    first_block: Array

    def copy(self, token: NewToken) -> Any:
        """Return the copy of the slab of rows around the new token to the pool."""
        _, _, slabs, slab, _ = self.written.shape
        buffer = rem(token.number, self.slabs.shape[0])
        block, offset = div(token.slot, slabs * slab), rem(token.slot, slabs * slab)
        target = self.written.at[self.first_block + block, :, div(offset, slab)]
        return pltpu.make_async_copy(self.slabs.at[buffer], target, self.semaphores.at[buffer])

    def write(self, token: NewToken, first_block: Array, exists: Array | bool = True) -> None:
        """Put the new token into the fetched tile, and its slab on the way to the pool.

        `first_block` is the buffer of position 0's block if all blocks were there. In the tile the rows after the token
        become 0; in the pool they are unchanged. A token that does not exist is not sent to the pool.
        """
        num_slabs = self.slabs.shape[0]
        pl.when(token.number >= num_slabs)(lambda: self.copy(token).wait())
        _, k, per_block, slab, columns = self.buffers.shape
        position, buffer = token.end - 1, rem(token.number, num_slabs)
        block, index = first_block + div(position, per_block * slab), rem(div(position, slab), per_block)
        row = lax.broadcasted_iota(jnp.int32, (slab, columns), 0)
        is_new, is_later = row == rem(position, slab), row > rem(position, slab)
        new_kc = self.new[rem(token.number, self.new.shape[0])].astype(jnp.float32)
        for head in range(k):
            new = jnp.broadcast_to(new_kc[head : head + 1], (slab, columns)).astype(self.slabs.dtype)
            rows = jnp.where(is_new, new, self.buffers[block, head, index])
            self.slabs[buffer, head] = rows
            self.buffers[block, head, index] = jnp.where(is_later, jnp.zeros_like(rows), rows)
        pl.when(exists)(lambda: self.copy(token).start())


class QueryTile(NamedTuple):
    """A tile of query rows of one sequence."""

    number: Array
    sequence: Array
    first: Array
    """The first position that any of its rows attends to."""
    end: Array
    """One past the last position that any of them attends to."""
    row: Array
    """Its first row in t."""
    num_rows: Array
    position: Array
    """The position of its first row in the sequence."""
    is_first: Array
    """True for the first tile of its chunk."""
    is_last: Array


class WriteScratch(NamedTuple):
    """Scratch of the writing, in VMEM."""

    new: Any
    """[2, k, (lead + query) / 16, 16, c]: rows of the step, a tile's own rows after those before it."""
    old: Any
    """[2, 2, k, slab, c]: the pool's rows in the chunk's first and last slab."""
    read_semaphores: Any
    shifted: Any
    """[c / 128, lead + query + slab, 128] float32: one row of lanes, 32 bits wide, can be read from any row."""
    slabs: Any
    """[2, k, query / slab + 1, slab, c], on the way to the pool."""
    write_semaphores: Any


def write_scratch(new: Array, pool: Array, options: Options) -> WriteScratch:
    """Return the scratch shapes; `new` is [k, t / 16, 16, c]."""
    _, k, _, slab, columns = pool.shape
    query, rows = options.tiles.query, _lead(slab) + options.tiles.query
    return WriteScratch(
        pltpu.VMEM((BUFFERS, k, rows // ROW_ALIGNMENT, ROW_ALIGNMENT, columns), new.dtype),
        pltpu.VMEM((BUFFERS, 2, k, slab, columns), pool.dtype),
        pltpu.SemaphoreType.DMA((BUFFERS,)),
        pltpu.VMEM((pl.cdiv(columns, LANES), rows + slab, min(columns, LANES)), jnp.float32),
        pltpu.VMEM((BUFFERS, k, query // slab + 1, slab, columns), pool.dtype),
        pltpu.SemaphoreType.DMA((BUFFERS,)),
    )


def _lead(slab: int) -> int:
    """Return the number of rows before a tile's first that may share its first slab, rounded up to the alignment."""
    return pl.cdiv(slab, ROW_ALIGNMENT) * ROW_ALIGNMENT


@dataclass(frozen=True)
class ChunkWriter:
    """Writes all tiles of the step; tile i + 1 is read while tile i is shifted."""

    new: Any
    """[k, t / 16, 16, c] in HBM."""
    pool: Any
    written: Any
    """The pool again, to write."""
    slots_t: Any
    first_block: Array
    num_tiles: Array
    describe: Callable[[Array], QueryTile]
    scratch: WriteScratch

    @property
    def _slab(self) -> int:
        return self.pool.shape[3]

    def run(self) -> None:
        self._start_reads(jnp.int32(0))

        def write(i: Array, _: None) -> None:
            pl.when(i + 1 < self.num_tiles)(lambda: self._start_reads(i + 1))
            tile = self.describe(i)
            self._each_read(tile, lambda copy: copy.wait())
            pl.when(i >= BUFFERS)(lambda: self._wait_writes(i - BUFFERS))
            self._shift(tile)
            self._fill_ends(tile)
            self._start_writes(tile)

        lax.fori_loop(0, self.num_tiles, write, None)
        for back in range(1, BUFFERS + 1):
            index = self.num_tiles - back
            pl.when(index >= 0)(lambda index=index: self._wait_writes(index))

    def _start_reads(self, index: Array) -> None:
        self._each_read(self.describe(index), lambda copy: copy.start())

    def _each_read(self, tile: QueryTile, do: Callable[[Any], None]) -> None:
        buffer = rem(tile.number, BUFFERS)
        semaphore = self.scratch.read_semaphores.at[buffer]
        most = _lead(self._slab) // ROW_ALIGNMENT
        lead = jnp.where(tile.is_first, 0, most)
        num_rows = ceil_div(tile.num_rows, ROW_ALIGNMENT) + lead
        source = self.new.at[:, pl.ds(div(tile.row, ROW_ALIGNMENT) - lead, num_rows)]
        do(pltpu.make_async_copy(source, self.scratch.new.at[buffer, :, pl.ds(most - lead, num_rows)], semaphore))

        def read_old(end: int, offset: Array) -> None:
            block, slab = self._place_of(tile, tile.position + offset)
            do(pltpu.make_async_copy(self.pool.at[block, :, slab], self.scratch.old.at[buffer, end], semaphore))

        pl.when(tile.is_first)(lambda: read_old(0, jnp.int32(0)))
        pl.when(tile.is_last)(lambda: read_old(1, tile.num_rows - 1))

    def _place_of(self, tile: QueryTile, position: Array) -> tuple[Array, Array]:
        """Return the block and slab of a position of the tile, from the slot of its row."""
        slot = self.slots_t[tile.row + position - tile.position]
        block_size = self.pool.shape[2] * self._slab
        return self.first_block + div(slot, block_size), div(rem(slot, block_size), self._slab)

    def _shift(self, tile: QueryTile) -> None:
        """Move the rows to where the first slab begins, and cast them."""
        buffer = rem(tile.number, BUFFERS)
        scratch = self.scratch
        _, k, num_slabs, slab, columns = scratch.slabs.shape
        start = _lead(slab) - rem(tile.position, slab)

        def shift_head(head: Array, _: None) -> None:
            new = scratch.new[buffer, head].reshape(-1, columns).astype(jnp.float32)
            for i in range(scratch.shifted.shape[0]):
                scratch.shifted[i, : new.shape[0]] = new[:, i * LANES : (i + 1) * LANES]
            parts = [scratch.shifted[i, pl.ds(start, num_slabs * slab)] for i in range(scratch.shifted.shape[0])]
            rows = jnp.concatenate(parts, axis=1).reshape(num_slabs, slab, columns)
            scratch.slabs[buffer, head] = rows.astype(scratch.slabs.dtype)

        lax.fori_loop(0, k, shift_head, None)

    def _fill_ends(self, tile: QueryTile) -> None:
        """Keep the pool's rows before the chunk's first row and after its last."""
        buffer = rem(tile.number, BUFFERS)
        slabs, old = self.scratch.slabs, self.scratch.old
        _, k, _, slab, columns = slabs.shape
        row = lax.broadcasted_iota(jnp.int32, (slab, columns), 0)

        def fill(end: int, index: Array, is_old: Array) -> None:
            def fill_head(head: Array, _: None) -> None:
                slabs[buffer, head, index] = jnp.where(is_old, old[buffer, end, head], slabs[buffer, head, index])

            lax.fori_loop(0, k, fill_head, None)

        last = rem(tile.position + tile.num_rows - 1, slab)
        pl.when(tile.is_first)(lambda: fill(0, jnp.int32(0), row < rem(tile.position, slab)))
        pl.when(tile.is_last)(lambda: fill(1, self._slabs(tile)[1] - 1, row > last))

    def _slabs(self, tile: QueryTile) -> tuple[Array, Array]:
        """Return the first slab that a tile writes, counted from position 0, and how many."""
        end = tile.position + tile.num_rows
        first = div(tile.position, self._slab)
        return first, jnp.where(tile.is_last, ceil_div(end, self._slab), div(end, self._slab)) - first

    def _start_writes(self, tile: QueryTile) -> None:
        """Copy the slabs, block by block."""
        buffer = rem(tile.number, BUFFERS)
        first, num_slabs = self._slabs(tile)
        per_block = self.pool.shape[2]

        def write_block(i: Array, _: None) -> None:
            begin = jnp.maximum(i * per_block, first)
            count = jnp.minimum((i + 1) * per_block, first + num_slabs) - begin
            block, slab = self._place_of(tile, jnp.maximum(begin * self._slab, tile.position))
            pltpu.make_async_copy(
                self.scratch.slabs.at[buffer, :, pl.ds(begin - first, count)],
                self.written.at[block, :, pl.ds(slab, count)],
                self.scratch.write_semaphores.at[buffer],
            ).start()

        lax.fori_loop(div(first, per_block), ceil_div(first + num_slabs, per_block), write_block, None)

    def _wait_writes(self, index: Array) -> None:
        buffer = rem(index, BUFFERS)
        copied = self.scratch.slabs.at[buffer, :, pl.ds(0, self._slabs(self.describe(index))[1])]
        pltpu.make_async_copy(copied, copied, self.scratch.write_semaphores.at[buffer]).wait()
