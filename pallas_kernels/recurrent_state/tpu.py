"""Take states past their tokens on a TPU: they are read once and written once, in place.

Of decodes a program of the grid is one sequence, whose state comes whole: Pallas' pipeline brings the next one
meanwhile, and sends the last one back. Rows of padding stay at the null slot, which moves nothing.

Of longer chunks a program is one tile, all heads, one tile after the other; the state stays in VMEM until it is kept.
Before, the rows of tiles are moved to places where a kernel may read them, each tile's from a multiple of 16 on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .batch import StateBatch
from .chunks import TILE_ROWS, Tiles, copy_saved, copy_states, cut_into_tiles, tile_rows

VMEM_LIMIT = 56 * 2**20
MOST_STATE_BYTES = 8 << 20
"""The largest state that a kernel takes: VMEM has two that come and two that go, and one that stays."""
PIECE = 16
"""How many rows lie together in memory: those of two bytes an element, and of four twice."""


def refuse_state(num_bytes: int, dtype: Any) -> str | None:
    """Say why a TPU's kernel cannot have states of a size and inputs of a dtype, None if it can."""
    if num_bytes > MOST_STATE_BYTES:
        return f"a state of {num_bytes >> 20} MiB does not fit in VMEM several times"
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype must be bfloat16 or float32, not {jnp.dtype(dtype).name}"
    return None


def take_decodes(
    body: Callable[..., None],
    name: str,
    rows: Sequence[Array],
    fixed: Sequence[Array],
    pool: Array,
    batch: StateBatch,
    first_slot: Array,
    out: Array,
    *,
    interpret: bool,
) -> tuple[Array, Array]:
    """Return `out` with what decodes read in their rows, and the pool after them.

    `body` gets whether the sequence goes on, so that there is a state before it, then refs: of the sequence's own of
    `rows`, of `fixed`, the state before, what it reads, and the state after. The first rows are those of sequences.
    """
    count = min(len(batch.query_starts_s), len(out))
    is_decode_s = lax.iota(jnp.int32, count) < batch.num_decodes
    reads_s, writes_s, saves_s = (
        jnp.where(is_decode_s, x[:count], 0) for x in (batch.read_slots_s, batch.write_slots_s, batch.save_slots_s)
    )
    rows = [x[:count] for x in rows]
    state = (None, *pool.shape[1:])
    options: dict[str, Any] = {"compiler_params": pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT)}
    if interpret:
        options = {"interpret": pltpu.InterpretParams()}
    scalars = (first_slot + reads_s, first_slot + writes_s, jnp.sign(reads_s), batch.num_decodes.reshape(1))
    read, pool = pl.pallas_call(
        partial(_kernel, body),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(count,),
            in_specs=[
                *map(_own, rows),
                *map(_whole, fixed),
                pl.BlockSpec(state, lambda i, reads, *_: (reads[i], 0, 0, 0)),
            ],
            out_specs=[_own(out), pl.BlockSpec(state, lambda i, _, writes, *__: (writes[i], 0, 0, 0))],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((count, *out.shape[1:]), out.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={len(scalars) + len(rows) + len(fixed): 1},
        name=name,
        **options,
    )(*scalars, *rows, *fixed, pool)
    pool = copy_states(pool, first_slot + writes_s, first_slot + saves_s, saves_s > 0)
    # Rows that the kernel did not compute hold whatever the memory held.
    is_decode = is_decode_s.reshape(-1, *[1] * (out.ndim - 1))
    return out.at[:count].set(jnp.where(is_decode, read, out[:count])), pool


def _own(x: Array) -> pl.BlockSpec:
    return pl.BlockSpec((None, *x.shape[1:]), lambda i, *_: (i, *[0] * (x.ndim - 1)))


def _whole(x: Array) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def _kernel(body: Callable[..., None], *refs: Any) -> None:
    _, _, goes_on, num_decodes, *others = refs
    sequence = pl.program_id(0)
    pl.when(sequence < num_decodes[0])(lambda: body(goes_on[sequence] > 0, *others))


def take_tiles(
    body: Callable[..., None],
    name: str,
    rows: Sequence[Array],
    numbers: Sequence[Array],
    fixed: Sequence[Array],
    pool: Array,
    batch: StateBatch,
    first_slot: Array,
    out: Array,
    *,
    interpret: bool,
) -> tuple[Array, Array]:
    """Return the pool after the longer chunks of a step, and `out` [t, columns] with what their rows read.

    `rows` are [t, columns], `numbers` [t, heads] in float32. `body` gets how many rows a tile has, then refs: of
    `rows` [TILE_ROWS, columns], with any finite numbers behind the tile's rows; of `numbers` [heads, TILE_ROWS] with
    zeros there; of `fixed`; of what is read; and of the state, which it brings up to date.
    """
    tiles, num_tiles = cut_into_tiles(batch, first_slot, len(out))
    run = partial(_run_tiles, body, name, interpret)
    own = tiles, num_tiles, tuple(rows), tuple(numbers), tuple(fixed)
    pool, out = lax.cond(num_tiles > 0, run, lambda pool, out, *_: (pool, out), pool, out, *own)
    return copy_saved(pool, batch, first_slot), out


def _run_tiles(
    body: Callable[..., None],
    name: str,
    interpret: bool,
    pool: Array,
    out: Array,
    tiles: Tiles,
    num_tiles: Array,
    rows: tuple[Array, ...],
    numbers: tuple[Array, ...],
    fixed: tuple[Array, ...],
) -> tuple[Array, Array]:
    room = len(tiles.starts_n)
    # Each part of a chunk, of which there are at most `room`, ends in less than a piece of rows.
    places = _Places.of(tiles, len(out) + PIECE * min(room, len(out)) + TILE_ROWS)
    rows = tuple(places.move(x) for x in rows)
    rows_nc = tile_rows(tiles.starts_n, tiles.ends_n, len(out))
    numbers = tuple(x.at[rows_nc].get(mode="fill", fill_value=0).swapaxes(1, 2) for x in numbers)
    # The state before a chunk stays until the next chunk; behind the last tile nothing moves.
    tiles_n = lax.iota(jnp.int32, room)
    firsts_n = lax.cummax(jnp.where(tiles.is_first_n > 0, tiles_n, 0))
    last = num_tiles - 1
    slots = (jnp.where(tiles_n <= last, x, x[last]) for x in (tiles.reads_n[firsts_n], tiles.writes_n))
    pieces_n = jnp.where(tiles_n <= last, places.starts_n // PIECE, places.starts_n[last] // PIECE)
    flags = tiles.begins_n, tiles.is_first_n, tiles.is_kept_n
    scalars = (pieces_n, tiles.ends_n - tiles.starts_n, *slots, *flags, num_tiles.reshape(1))
    state = pool.shape[1:]
    options: dict[str, Any] = {"compiler_params": pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT)}
    if interpret:
        options = {"interpret": pltpu.InterpretParams()}
    num_inputs = len(rows) + len(numbers) + len(fixed)
    read, pool = pl.pallas_call(
        partial(_tile_kernel, body, num_inputs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(room,),
            in_specs=[
                *(pl.BlockSpec((pl.Element(TILE_ROWS), pl.Element(x.shape[1])), _tile_place) for x in rows),
                *(pl.BlockSpec((None, *x.shape[1:]), _tile_number) for x in numbers),
                *map(_whole, fixed),
                pl.BlockSpec((None, *state), lambda i, _p, _c, reads, *_: (reads[i], 0, 0, 0)),
            ],
            out_specs=[
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec((None, *state), lambda i, _p, _c, _r, writes, *_: (writes[i], 0, 0, 0)),
            ],
            scratch_shapes=[
                pltpu.VMEM(state, pool.dtype),
                pltpu.VMEM((TILE_ROWS, out.shape[1]), out.dtype),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((places.num_rows, out.shape[1]), out.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={len(scalars) + num_inputs: 1},
        name=name,
        **options,
    )(*scalars, *rows, *numbers, *fixed, pool)
    return pool, places.move_back(read, out)


class _Places(NamedTuple):
    """Where the rows of tiles are moved to."""

    tiles: Tiles
    starts_n: Array
    """The first row of each tile there."""
    num_rows: int

    @classmethod
    def of(cls, tiles: Tiles, num_rows: int) -> _Places:
        """Return the places of tiles, each from a multiple of PIECE on."""
        sizes_n = (tiles.ends_n - tiles.starts_n + PIECE - 1) // PIECE * PIECE
        return cls(tiles, jnp.cumsum(sizes_n, dtype=jnp.int32) - sizes_n, -(-num_rows // PIECE) * PIECE)

    def move(self, x_tc: Array) -> Array:
        """Return the rows of tiles at their places, zeros between."""
        pieces_i = lax.iota(jnp.int32, self.num_rows // PIECE) * PIECE
        # An empty tile begins where the next one does.
        tiles_i = jnp.sum(self.starts_n[None] <= pieces_i[:, None], axis=1, dtype=jnp.int32) - 1
        sources_ir = (pieces_i - self.starts_n[tiles_i] + self.tiles.starts_n[tiles_i])[:, None]
        sources_ir += lax.iota(jnp.int32, PIECE)
        sources_ir = jnp.where(sources_ir < self.tiles.ends_n[tiles_i][:, None], sources_ir, len(x_tc))
        return x_tc.at[sources_ir.reshape(-1)].get(mode="fill", fill_value=0)

    def move_back(self, x_rc: Array, out_tc: Array) -> Array:
        """Return `out_tc` with what lies at the places of its rows in `x_rc`."""
        rows_t1 = lax.iota(jnp.int32, len(out_tc))[:, None]
        is_in_tn = (self.tiles.starts_n <= rows_t1) & (rows_t1 < self.tiles.ends_n)
        moved_t = jnp.sum(jnp.where(is_in_tn, self.starts_n - self.tiles.starts_n, 0), axis=1, dtype=jnp.int32)
        return jnp.where(jnp.any(is_in_tn, axis=1)[:, None], x_rc[rows_t1[:, 0] + moved_t], out_tc)


def _tile_place(i: Array, pieces: Any, *_: Any) -> tuple[Array, int]:
    return pieces[i] * PIECE, 0


def _tile_number(i: Array, *scalars: Any) -> tuple[Array, int, int]:
    return jnp.minimum(i, scalars[7][0] - 1), 0, 0


def _tile_kernel(body: Callable[..., None], num_inputs: int, *refs: Any) -> None:
    pieces, counts, _, _, begins, is_first, is_kept, num_tiles, *others = refs
    inputs, (before, out, after, state, read, semaphore) = others[:num_inputs], others[num_inputs:]
    tile, num_heads = pl.program_id(0), state.shape[0]

    def take_over() -> None:
        def copy(head: Array, _: None) -> None:
            # What the null slot holds may be NaN.
            state[head] = jnp.where(begins[tile] > 0, 0.0, before[head])

        lax.fori_loop(0, num_heads, copy, None)

    def keep() -> None:
        def copy(head: Array, _: None) -> None:
            after[head] = state[head]

        lax.fori_loop(0, num_heads, copy, None)

    @pl.when(tile < num_tiles[0])
    def _() -> None:
        pl.when(is_first[tile] > 0)(take_over)
        body(counts[tile], *inputs, read, state)
        pl.when(is_kept[tile] > 0)(keep)
        copies = []
        for first in range(0, TILE_ROWS, PIECE):
            place = pl.multiple_of(pieces[tile] * PIECE + first, PIECE)
            rows = pl.ds(first, PIECE)
            copies.append(pltpu.make_async_copy(read.at[rows], out.at[pl.ds(place, PIECE)], semaphore))
        # A piece without rows of this tile may be the next one's.
        for first, copy in zip(range(0, TILE_ROWS, PIECE), copies, strict=True):
            pl.when(first < counts[tile])(copy.start)
        for first, copy in zip(range(0, TILE_ROWS, PIECE), copies, strict=True):
            pl.when(first < counts[tile])(copy.wait)
