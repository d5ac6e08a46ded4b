"""The loops over tokens of recurrent state in plain jnp: decodes side by side, chunks token by token.

On other platforms than a CPU longer chunks go by tiles instead, see `chunks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array, lax

from .batch import StateBatch

_MAX_DECODES = 32
"""The number of decodes that are computed at a time: their states are copied out of the pool and back."""

type _TakeChunks = Callable[..., tuple[Array, Array]]
"""Takes the pool, the batch, the layer's first slot, inputs and `out`, and returns the pool and `out`."""

type _Step = Callable[[Array, tuple[Array, ...]], tuple[Array, Array]]
"""Takes states of sequences and their tokens' inputs, and returns the states and the outputs."""


def scan_tokens(
    pool: Array,
    batch: StateBatch,
    first_slot: Array | int,
    inputs: tuple[Array, ...],
    out: Array,
    step: _Step,
    take_chunks: _TakeChunks,
) -> tuple[Array, Array]:
    """Return the pool after the step, and `out` with the outputs of live rows in it."""
    first_slot = jnp.asarray(first_slot, jnp.int32)
    pool, out = _decode(pool, batch, first_slot, inputs, out, step)
    if not batch.has_chunks:
        return pool, out
    # On a CPU tokens one by one are faster, and a row's bits do not depend on how a prompt is cut.
    by_tokens, by_tiles = partial(_scan_chunks, step), take_chunks
    return lax.platform_dependent(pool, batch, first_slot, inputs, out, cpu=by_tokens, default=by_tiles)


def _decode(
    pool: Array, batch: StateBatch, first_slot: Array | int, inputs: tuple[Array, ...], out: Array, step: _Step
) -> tuple[Array, Array]:
    num_sequences = len(batch.query_starts_s)
    group = min(_MAX_DECODES, num_sequences)

    def body(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        pool, out = carry
        seqs = i * group + jnp.arange(group, dtype=jnp.int32)
        is_live = seqs < batch.num_decodes
        rows = jnp.where(is_live, seqs, len(out))
        reads, writes, saves = (
            x.at[seqs].get(mode="fill", fill_value=0)
            for x in (batch.read_slots_s, batch.write_slots_s, batch.save_slots_s)
        )
        states = pool[first_slot + jnp.where(is_live, reads, 0)]
        states = jnp.where((reads > 0).reshape(-1, *[1] * (pool.ndim - 1)), states, 0)
        taken = tuple(x.at[rows].get(mode="fill", fill_value=0) for x in inputs)
        # Otherwise a fusion that reads the pool may come after what writes it, and that would copy the pool.
        states = lax.optimization_barrier(states)
        states, read = step(states, taken)
        states, read = lax.optimization_barrier((states, read))
        beyond = len(pool)
        for slots in (writes, saves):
            pool = pool.at[jnp.where(is_live & (slots > 0), first_slot + slots, beyond)].set(states, mode="drop")
        return pool, out.at[rows].set(read, mode="drop")

    return lax.fori_loop(0, (batch.num_decodes + group - 1) // group, body, (pool, out))


def _scan_chunks(
    step: _Step, pool: Array, batch: StateBatch, first_slot: Array, inputs: tuple[Array, ...], out: Array
) -> tuple[Array, Array]:

    def advance(row: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        state, out = carry
        taken = tuple(lax.dynamic_slice_in_dim(x, row, 1) for x in inputs)
        state, read = step(state, taken)
        return state, lax.dynamic_update_slice_in_dim(out, read, row, 0)

    def advance_and_keep(row: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        pool, *rest = carry
        state, out = advance(row, (rest[0], rest[1]))
        assert batch.row_slots_t is not None
        # The state after a chunk's last row goes to the null slot.
        return lax.dynamic_update_slice_in_dim(pool, state, first_slot + batch.row_slots_t[row], 0), state, out

    def body(seq: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        pool, out = carry
        start, end, read, write, save_end, save = (
            x[seq]
            for x in (
                batch.query_starts_s,
                batch.query_ends_s,
                batch.read_slots_s,
                batch.write_slots_s,
                batch.all_save_ends_s,
                batch.save_slots_s,
            )
        )
        state = jnp.where(read > 0, lax.dynamic_slice_in_dim(pool, first_slot + read, 1), 0)
        state = lax.optimization_barrier(state)
        if batch.row_slots_t is not None:
            kept_end = jnp.where(batch.row_slots_t[start] > 0, end, start)
            pool, state, out = lax.fori_loop(start, kept_end, advance_and_keep, (pool, state, out))
            start = kept_end
        middle = jnp.where(save > 0, save_end, end)
        state, out = lax.fori_loop(start, middle, advance, (state, out))
        # States that are not to be saved go to the null slot.
        pool = lax.dynamic_update_slice_in_dim(pool, state, first_slot + save, 0)
        state, out = lax.fori_loop(middle, end, advance, (state, out))
        return lax.dynamic_update_slice_in_dim(pool, state, first_slot + write, 0), out

    num_sequences = len(batch.query_starts_s)
    is_live = batch.query_ends_s > batch.query_starts_s
    count = jnp.max(jnp.where(is_live, jnp.arange(1, num_sequences + 1, dtype=jnp.int32), 0))
    return lax.fori_loop(batch.num_decodes, count, body, (pool, out))
