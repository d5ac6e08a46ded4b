"""The convolution in plain jnp, on all platforms: all rows at once, each with the rows before it."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.recurrent_state import StateBatch


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
    out_tc, *states = convolve(x_tc, weight_kc, states_skc, batch, bias_c, activation)
    is_live_s = batch.query_ends_s > batch.query_starts_s
    for after_skc, slots_s in zip(states, (batch.write_slots_s, batch.save_slots_s), strict=True):
        targets_s = jnp.where((slots_s > 0) & is_live_s, first_slot + slots_s, len(pool))
        pool = pool.at[targets_s].set(after_skc, mode="drop")
    return out_tc, pool


def convolve(
    x_tc: Array,
    weight_kc: Array,
    states_skc: Array,
    batch: StateBatch,
    bias_c: Array | None,
    activation: Literal["silu"] | None,
) -> tuple[Array, Array, Array]:
    """Return the result of `CausalConv` for a step's rows, and the states to write and to save of each sequence.

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

    def state_before(stops_s: Array) -> Array:
        rows_sk = stops_s[:, None] - kept + jnp.arange(kept, dtype=jnp.int32)
        seqs_sk = jnp.repeat(jnp.arange(len(stops_s), dtype=jnp.int32), kept)
        return inputs(rows_sk.reshape(-1), seqs_sk).reshape(states_skc.shape)

    rows_t = jnp.arange(t, dtype=jnp.int32)
    is_own_ts = (rows_t[:, None] >= starts_s) & (rows_t[:, None] < ends_s)
    seqs_t, is_live_t = jnp.argmax(is_own_ts, axis=1), is_own_ts.any(axis=1)
    sum_tc = jnp.zeros(x_tc.shape, jnp.float32) if bias_c is None else bias_c.astype(jnp.float32)[None]
    for back, weight_c in zip(range(kept, -1, -1), weight_kc.astype(jnp.float32), strict=True):
        sum_tc = sum_tc + inputs(rows_t - back, seqs_t).astype(jnp.float32) * weight_c[None]
    out_tc = jax.nn.silu(sum_tc) if activation == "silu" else sum_tc
    out_tc = jnp.where(is_live_t[:, None], out_tc, 0).astype(x_tc.dtype)
    return out_tc, state_before(ends_s), state_before(batch.all_save_ends_s)
