"""The convolution in plain jnp, on all platforms: all rows at once, each with the rows before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.recurrent_state import StateBatch

type StateBefore = Callable[[Array, Array], Array]
"""Returns states [i, k, c]: the last inputs before rows of sequences, by the rows' and the sequences' numbers [i]."""
_MOST_ROWS = 32
"""The most rows of drafts whose states are copied at a time."""


def xla_causal_conv(
    x_tc: Array,
    weight_kc: Array,
    pool: Array,
    batch: StateBatch,
    *,
    layer: Array | int,
    num_layers: int,
    bias_c: Array | None = None,
    activation: Literal["silu"] | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `CausalConv`; there is nothing to interpret."""
    del interpret
    first_slot = layer * (len(pool) // num_layers)
    # Otherwise a fusion that reads the pool may come after what writes it, and that would copy the pool.
    states_skc = lax.optimization_barrier(pool[first_slot + batch.read_slots_s])
    out_tc, state_before = convolve(x_tc, weight_kc, states_skc, batch, bias_c, activation)

    def write(pool: Array, states_ikc: Array, slots_i: Array) -> Array:
        return pool.at[jnp.where(slots_i > 0, first_slot + slots_i, len(pool))].set(states_ikc, mode="drop")

    seqs_s, is_live_s = jnp.arange(len(states_skc), dtype=jnp.int32), batch.query_ends_s > batch.query_starts_s
    for ends_s, slots_s in ((batch.query_ends_s, batch.write_slots_s), (batch.all_save_ends_s, batch.save_slots_s)):
        pool = write(pool, state_before(ends_s, seqs_s), jnp.where(is_live_s, slots_s, 0))
    return out_tc, keep_rows(pool, batch, state_before, write)


def keep_rows(
    pool: Array, batch: StateBatch, state_before: StateBefore, write: Callable[[Array, Array, Array], Array]
) -> Array:
    """Return the pool with the states after the rows of drafts; `write` writes states to slots but the null slot."""
    slots_t = batch.row_slots_t
    if slots_t is None:
        return pool
    t, count = len(slots_t), jnp.sum(slots_t > 0, dtype=jnp.int32)
    rows_t, at_once = jnp.argsort(slots_t == 0, stable=True).astype(jnp.int32), min(t, _MOST_ROWS)

    def body(i: Array, pool: Array) -> Array:
        rows_i = rows_t.at[i * at_once + jnp.arange(at_once, dtype=jnp.int32)].get(mode="fill", fill_value=t)
        seqs_i = jnp.sum(batch.query_ends_s <= rows_i[:, None], axis=1, dtype=jnp.int32)
        states_ikc = lax.optimization_barrier(state_before(rows_i + 1, seqs_i))
        return write(pool, states_ikc, slots_t.at[rows_i].get(mode="fill", fill_value=0))

    return lax.fori_loop(0, (count + at_once - 1) // at_once, body, pool)


def convolve(
    x_tc: Array,
    weight_kc: Array,
    states_skc: Array,
    batch: StateBatch,
    bias_c: Array | None,
    activation: Literal["silu"] | None,
) -> tuple[Array, StateBefore]:
    """Return the result of `CausalConv` for a step's rows, and a function that returns states.

    `states_skc` are the contents of the slots that sequences read, arbitrary where they begin.
    """
    t, kept = len(x_tc), states_skc.shape[1]
    starts_s, ends_s = batch.query_starts_s, batch.query_ends_s
    states_skc = jnp.where(batch.read_slots_s[:, None, None] > 0, states_skc, 0)

    def inputs(rows_i: Array, seqs_i: Array) -> Array:
        """Return the inputs at rows of sequences; those before the first row are in the state."""
        places_i = rows_i - starts_s[seqs_i]
        new = x_tc.at[rows_i].get(mode="fill", fill_value=0)
        old = states_skc.at[seqs_i, kept + places_i].get(mode="fill", fill_value=0)
        return jnp.where((places_i >= 0)[:, None], new, old)

    def state_before(stops_i: Array, seqs_i: Array) -> Array:
        rows_ik = stops_i[:, None] - kept + jnp.arange(kept, dtype=jnp.int32)
        return inputs(rows_ik.reshape(-1), jnp.repeat(seqs_i, kept)).reshape(-1, *states_skc.shape[1:])

    rows_t = jnp.arange(t, dtype=jnp.int32)
    is_own_ts = (rows_t[:, None] >= starts_s) & (rows_t[:, None] < ends_s)
    seqs_t, is_live_t = jnp.argmax(is_own_ts, axis=1), is_own_ts.any(axis=1)
    sum_tc = jnp.zeros(x_tc.shape, jnp.float32) if bias_c is None else bias_c.astype(jnp.float32)[None]
    for back, weight_c in zip(range(kept, -1, -1), weight_kc.astype(jnp.float32), strict=True):
        sum_tc = sum_tc + inputs(rows_t - back, seqs_t).astype(jnp.float32) * weight_c[None]
    out_tc = jax.nn.silu(sum_tc) if activation == "silu" else sum_tc
    out_tc = jnp.where(is_live_t[:, None], out_tc, 0).astype(x_tc.dtype)
    return out_tc, state_before
