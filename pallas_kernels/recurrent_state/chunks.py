"""Take longer chunks many tokens at a time, as matrix products: the common part of the ops of recurrent state.

A chunk is cut into tiles of up to 64 rows. Products of a tile's own tokens need no state and are computed for several
tiles at once; states then pass from tile to tile. A tile also ends where a state is saved, so that states are kept only
at the ends of tiles. Logarithms of decays are only summed up, never subtracted, and no decay is divided by another:
however strong they are, every factor is at most 1 and as exact as float32 allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .batch import StateBatch

TILE_ROWS = 64
"""The most rows of a tile, a power of two: the cost of solving for them grows with it, the number of passes shrinks."""
MOST_TILES = 32
"""The most tiles that are taken at once."""
TILES_BYTES = 16 << 20
"""The most bytes of the inputs of tiles that are taken at once; copies in other forms, and outputs, come on top."""

type Dot = Callable[..., Array]
"""Returns the float32 product of two matrices, over the axes that a third argument may name."""

type Run = Callable[[Array, Tiles, tuple[Array, ...]], tuple[Array, Array]]
"""Takes states in the pool past several tiles, one after the other, and returns the pool and the outputs [n, c, ...].
The inputs [n, c, ...] are zeros where tiles lack rows. The states after the last tile are kept too."""


class Tiles(NamedTuple):
    """The tiles of a step's longer chunks, in the order of their rows; int32. Tiles behind the last one are empty.

    Slots are counted in the pool of all layers.
    """

    starts_n: Array
    """Each tile's first row."""
    ends_n: Array
    """One past each tile's last row."""
    begins_n: Array
    """1 where a tile begins a sequence, from zeros; 0 where there is a state before it."""
    is_first_n: Array
    """1 where a tile is its chunk's first."""
    is_kept_n: Array
    """1 where the state after a tile is kept: the tile is its chunk's last, or the state is to be saved."""
    reads_n: Array
    """The slot of the state before a tile: the sequence's slot, then the slot that the tile before wrote."""
    writes_n: Array
    """The slot of the next state that is kept: until then the state after a tile may lie there."""
    copies_n: Array
    """The slot where the state after a chunk's last tile is saved too; 0 for none."""


def _cut_into_tiles(
    batch: StateBatch, first_slot: Array | int, num_rows: int, multiple: int = 1
) -> tuple[Tiles, Array]:
    """Return the tiles of a step of `num_rows` rows, in arrays with a multiple of `multiple` entries, and their number.

    A state to be saved after a chunk's last row is in `copies_n`; `_copy_saved` does the same afterwards.
    """
    num_sequences = len(batch.query_starts_s)
    is_long_s = lax.iota(jnp.int32, num_sequences) >= batch.num_decodes
    starts_s, ends_s = batch.query_starts_s, jnp.where(is_long_s, batch.query_ends_s, batch.query_starts_s)
    save_ends_s = jnp.where(batch.save_slots_s > 0, batch.all_save_ends_s, 0)
    rows_t = lax.iota(jnp.int32, num_rows)
    is_own_ts = (rows_t[:, None] >= starts_s) & (rows_t[:, None] < ends_s)
    seqs_t, is_live_t = jnp.argmax(is_own_ts, axis=1), is_own_ts.any(axis=1)
    is_first_t, is_last_t = (is_live_t & (x == y[seqs_t]) for x, y in ((rows_t, starts_s), (rows_t + 1, ends_s)))
    is_saved_t = is_live_t & (rows_t + 1 == save_ends_s[seqs_t])
    # A part of a sequence ends with a row after which the state is kept, and tiles are parts of these.
    slots_t = jnp.where(is_saved_t, batch.save_slots_s[seqs_t], 0)
    if batch.row_slots_t is not None:
        slots_t = jnp.where(is_saved_t, slots_t, jnp.where(is_live_t, batch.row_slots_t, 0))
    slots_t = jnp.where(is_last_t, batch.write_slots_s[seqs_t], slots_t)
    is_kept_t = is_last_t | (slots_t > 0)
    starts_part_t = is_live_t & (is_first_t | jnp.roll(is_kept_t, 1))
    part_starts_t = lax.cummax(jnp.where(starts_part_t, rows_t, 0))
    part_ends_t = lax.cummin(jnp.where(is_kept_t, rows_t + 1, num_rows), reverse=True)
    before_t = jnp.where(is_first_t, batch.read_slots_s[seqs_t], jnp.roll(slots_t, 1))
    is_tile_t = is_live_t & ((rows_t - part_starts_t) % TILE_ROWS == 0)
    room = num_rows // TILE_ROWS + 2 * num_sequences if batch.row_slots_t is None else num_rows
    room = -(-min(num_rows, room) // multiple) * multiple
    (starts_n,) = jnp.nonzero(is_tile_t, size=room, fill_value=num_rows)
    starts_n = starts_n.astype(jnp.int32)

    def of_rows(x_t: Array, rows_n: Array) -> Array:
        return x_t.at[rows_n].get(mode="fill", fill_value=0)

    part_ends_n = of_rows(part_ends_t, starts_n)
    slots_n, is_first_n = of_rows(slots_t, part_ends_n - 1), of_rows(is_first_t, starts_n)
    is_live_n = starts_n < num_rows
    ends_n = jnp.where(is_live_n, jnp.minimum(starts_n + TILE_ROWS, part_ends_n), num_rows)
    reads_n = jnp.where(of_rows(starts_part_t, starts_n), of_rows(before_t, starts_n), slots_n)
    is_copied_n = of_rows(is_last_t & is_saved_t, ends_n - 1) & is_live_n
    saves_n = of_rows(batch.save_slots_s[seqs_t], starts_n)
    tiles = Tiles(
        starts_n,
        ends_n,
        (is_first_n & (reads_n == 0)).astype(jnp.int32),
        is_first_n.astype(jnp.int32),
        (is_live_n & (ends_n == part_ends_n)).astype(jnp.int32),
        first_slot + jnp.where(is_live_n, reads_n, 0),
        first_slot + jnp.where(is_live_n, slots_n, 0),
        jnp.where(is_copied_n, first_slot + saves_n, 0),
    )
    return tiles, jnp.sum(is_tile_t, dtype=jnp.int32)


def _copy_saved(pool: Array, batch: StateBatch, first_slot: Array | int) -> Array:
    """Copy the states that are to be saved after longer chunks' last rows, one after the other."""
    is_long_s = lax.iota(jnp.int32, len(batch.query_starts_s)) >= batch.num_decodes
    is_copied_s = is_long_s & (batch.save_slots_s > 0) & (batch.all_save_ends_s == batch.query_ends_s)
    return copy_states(pool, first_slot + batch.write_slots_s, first_slot + batch.save_slots_s, is_copied_s)


def copy_states(pool: Array, sources_s: Array, targets_s: Array, is_copied_s: Array) -> Array:
    """Copy the states of some sequences from slot to slot, one after the other."""
    order_s = jnp.argsort(is_copied_s, descending=True)

    def copy(i: Array, pool: Array) -> Array:
        state = lax.dynamic_slice_in_dim(pool, sources_s[order_s[i]], 1)
        return lax.dynamic_update_slice_in_dim(pool, state, targets_s[order_s[i]], 0)

    return lax.fori_loop(0, jnp.sum(is_copied_s, dtype=jnp.int32), copy, pool)


def take_tiles(
    pool: Array,
    batch: StateBatch,
    first_slot: Array | int,
    inputs: Sequence[Array],
    out: Array,
    run: Run,
    *,
    at_once: int,
    saves_copies: bool = False,
) -> tuple[Array, Array]:
    """Return the pool after the longer chunks of a step, and `out` with their rows' outputs, `at_once` tiles at a time.

    With `saves_copies`, `run` saves the states of `copies_n` itself; otherwise they are copied afterwards.
    """
    if not batch.has_chunks:
        return pool, out
    tiles, num_tiles = _cut_into_tiles(batch, first_slot, len(out), multiple=at_once)

    def body(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        pool, out = carry
        taken = Tiles(*(lax.dynamic_slice_in_dim(x, i * at_once, at_once) for x in tiles))
        rows_nc = taken.starts_n[:, None] + lax.iota(jnp.int32, TILE_ROWS)
        is_row_nc = rows_nc < taken.ends_n[:, None]
        # Rows that a tile lacks are beyond the last one, each with another number.
        beyond_nc = len(out) + lax.iota(jnp.int32, rows_nc.size).reshape(rows_nc.shape)
        rows_nc = jnp.where(is_row_nc, rows_nc, beyond_nc)
        pool, read = run(pool, taken, tuple(x.at[rows_nc].get(mode="fill", fill_value=0) for x in inputs))
        return pool, out.at[rows_nc].set(read, mode="drop", unique_indices=True)

    pool, out = lax.fori_loop(0, (num_tiles + at_once - 1) // at_once, body, (pool, out))
    return pool if saves_copies else _copy_saved(pool, batch, first_slot), out


def count_at_once(inputs: Sequence[Array], dtype: Any = None, most_bytes: int = TILES_BYTES) -> int:
    """Return the number of tiles to take at once, by the memory of their inputs, all in `dtype` if that is not None.

    It is at most the number of tiles of a single chunk with as many rows as the step.
    """
    row_bytes = sum(x[0].size * jnp.dtype(dtype or x.dtype).itemsize for x in inputs)
    in_step = -(-len(inputs[0]) // TILE_ROWS)
    return max(1, min(MOST_TILES, in_step, most_bytes // (TILE_ROWS * row_bytes)))


def prepare_and_advance(
    prepare: Callable[..., Any], advance: Callable[[Any, Array], tuple[Array, Array]], dtype: Any
) -> Run:
    """Return a `Run` in plain XLA.

    `prepare` gets the inputs of several tiles, and returns a tree of arrays [n, ...]; `advance` gets one tile's part of
    it and the state before, and returns the state after and the outputs.
    """

    def step(taken: tuple[Tiles, Any], pool: Array, index: Array) -> tuple[Array, Array]:
        tile, prepared = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), taken)
        state = lax.dynamic_index_in_dim(pool, tile.reads_n, keepdims=False)
        # Otherwise a fusion that reads the pool may come after what writes it, and that would copy the pool.
        state = lax.optimization_barrier(jnp.where(tile.begins_n > 0, 0, state))
        state, read = lax.optimization_barrier(advance(prepared, state))
        return lax.dynamic_update_index_in_dim(pool, state, tile.writes_n, 0), read.astype(dtype)

    def run(pool: Array, tiles: Tiles, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        # Slices that XLA:GPU knows to be those of a counted loop are copied outside of CUDA graphs.
        order_n = lax.optimization_barrier(lax.iota(jnp.int32, len(tiles.starts_n)))
        return lax.scan(partial(step, (tiles, prepare(*inputs))), pool, order_n)

    return run


def exact_dot(x: Array, y: Array, contract: tuple[int, int] = (1, 0)) -> Array:
    """Return the product of two matrices in float32, over the axes `contract`, as exact as float32 allows."""
    x, y = (each.astype(jnp.float32) for each in (x, y))
    return _dot(x, y, contract, lax.Precision.HIGHEST)


def dot_in_halves(x: Array, y: Array, contract: tuple[int, int] = (1, 0)) -> Array:
    """Return the product of two matrices in float32, with 16 bits of float32 numbers and all of bfloat16 ones.

    A float32 number is taken as two bfloat16 numbers, and the product of their lower parts is left out. It is one
    product of matrices that are two or three times as deep.
    """
    return _dot_of(_halves(x), _halves(y), contract)


def rounded_dot_in_halves(x: Array, y: Array, contract: tuple[int, int] = (1, 0)) -> Array:
    """Return the same as `dot_in_halves` outside of kernels, where XLA may remove a rounding."""
    return _dot_of(rounded_halves(x), rounded_halves(y), contract)


def rounded_halves(x: Array) -> list[Array]:
    """Return a float32 array as two bfloat16 arrays that sum up to it, except for its last bits.

    A bfloat16 array is returned alone. XLA may remove a conversion back and forth, but not an explicit loss of
    precision.
    """
    if x.dtype == jnp.bfloat16:
        return [x]
    upper = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return [upper.astype(jnp.bfloat16), (x - upper).astype(jnp.bfloat16)]


def _dot_of(xs: list[Array], ys: list[Array], contract: tuple[int, int]) -> Array:
    pairs = [(a, b) for i, a in enumerate(xs) for j, b in enumerate(ys) if i + j < max(len(xs), len(ys))]
    lefts, rights = zip(*pairs, strict=True)
    deep_x, deep_y = jnp.concatenate(lefts, axis=contract[0]), jnp.concatenate(rights, axis=contract[1])
    return _dot(deep_x, deep_y, contract, lax.Precision.DEFAULT)


def _halves(x: Array) -> list[Array]:
    if x.dtype == jnp.bfloat16:
        return [x]
    upper = x.astype(jnp.bfloat16)
    return [upper, (x - upper.astype(jnp.float32)).astype(jnp.bfloat16)]


def _dot(x: Array, y: Array, contract: tuple[int, int], precision: lax.Precision) -> Array:
    numbers = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(x, y, numbers, precision=precision, preferred_element_type=jnp.float32)


def tile_indices(size: int) -> tuple[Array, Array]:
    """Return the row and column numbers [c, c] of a tile's square matrices."""
    return lax.broadcasted_iota(jnp.int32, (size, size), 0), lax.broadcasted_iota(jnp.int32, (size, size), 1)


class Decays(NamedTuple):
    """The factors by which a state shrinks over parts of a tile: one factor, or one for each number of a key."""

    until_ck: Array
    """From the tile's start to after each token; [c, 1] for one factor, as below."""
    after_ck: Array
    """From after each token to the tile's end."""
    whole_k1: Array
    """Over the whole tile, one for each row."""


def decays_of(log_decay_1c: Array) -> Decays:
    """Return the decays of a tile, from the logarithms of its tokens' decays."""
    row_cc, column_cc = tile_indices(log_decay_1c.shape[1])

    def sums(is_summed_cc: Array) -> Array:
        return jnp.exp(jnp.sum(jnp.where(is_summed_cc, log_decay_1c, 0.0), axis=1, keepdims=True))

    whole_11 = jnp.exp(jnp.sum(log_decay_1c, axis=1, keepdims=True))
    return Decays(sums(column_cc <= row_cc), sums(column_cc > row_cc), whole_11)


def decays_of_keys(log_decay_ck: Array, *, dot: Dot) -> Decays:
    """Return the decays of a tile with a decay for each number of a key."""
    row_cc, column_cc = tile_indices(len(log_decay_ck))
    whole_k1 = jnp.exp(jnp.sum(log_decay_ck.T, axis=1, keepdims=True))
    until_ck, after_ck = (jnp.exp(dot(ones(x), log_decay_ck)) for x in (column_cc <= row_cc, column_cc > row_cc))
    return Decays(until_ck, after_ck, whole_k1)


def decays_between(log_decay_1c: Array, *, dot: Dot) -> Array:
    """Return the factors [c, c] of the state after a column's token up to a row's; 0 for later columns."""
    row_cc, column_cc = tile_indices(log_decay_1c.shape[1])
    summed_cc = dot(jnp.where(column_cc <= row_cc, log_decay_1c, 0.0), ones(row_cc > column_cc))
    return jnp.where(column_cc <= row_cc, jnp.exp(summed_cc), 0.0)


def ones(mask: Array) -> Array:
    """Return 1 where a mask is true and else 0."""
    return jnp.where(mask, 1.0, 0.0).astype(jnp.bfloat16)


def as_column(row_1c: Array) -> Array:
    """Return a row's numbers [c, 1]."""
    row_cc, column_cc = tile_indices(row_1c.shape[1])
    return jnp.sum(jnp.where(row_cc == column_cc, row_1c, 0.0), axis=1, keepdims=True)


def as_row(column_c1: Array) -> Array:
    """Return a column's numbers [1, c]."""
    row_cc, column_cc = tile_indices(len(column_c1))
    return jnp.sum(jnp.where(row_cc == column_cc, column_c1, 0.0), axis=0, keepdims=True)
