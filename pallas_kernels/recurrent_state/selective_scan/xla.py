"""The scan of Mamba in plain jnp, on all platforms: on a CPU by tokens, elsewhere by tiles of tokens."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.recurrent_state import StateBatch
from pallas_kernels.recurrent_state.chunks import count_at_once, prepare_and_advance, take_tiles
from pallas_kernels.recurrent_state.xla import scan_tokens


def xla_selective_scan(
    x_tc: Array,
    dt_tc: Array,
    a_cn: Array,
    b_tn: Array,
    c_tn: Array,
    d_c: Array,
    pool: Array,
    batch: StateBatch,
    *,
    layer: Array | int,
    num_layers: int,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `SelectiveScan`; there is nothing to interpret."""
    del interpret
    t, num_parts, lanes = len(x_tc), pool.shape[1], pool.shape[3]
    x_til, dt_til = (each.reshape(t, num_parts, lanes) for each in (x_tc, dt_tc))
    a_inl, d_il = a_cn.reshape(num_parts, lanes, -1).swapaxes(1, 2), d_c.reshape(num_parts, lanes)
    first_slot = layer * (len(pool) // num_layers)
    step, by_tiles = partial(_step, a_inl, d_il), partial(_take_chunks, a_inl, d_il)
    inputs = x_til, dt_til, b_tn, c_tn
    pool, out_til = scan_tokens(pool, batch, first_slot, inputs, jnp.zeros_like(x_til), step, by_tiles)
    return out_til.reshape(x_tc.shape), pool


def _step(a_inl: Array, d_il: Array, states_sinl: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
    """Update each sequence's state by one token."""
    decay_sinl, added_sinl = _changes(a_inl, inputs)
    states_sinl = states_sinl * decay_sinl + added_sinl
    return states_sinl, _read(states_sinl, d_il, inputs).astype(inputs[0].dtype)


def _changes(a_inl: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
    """Return the factors by which tokens shrink a state, and what they add to it."""
    x_til, dt_til, b_tn, _ = (each.astype(jnp.float32) for each in inputs)
    return jnp.exp(dt_til[:, :, None] * a_inl), (dt_til * x_til)[:, :, None] * b_tn[:, None, :, None]


def _read(states_tinl: Array, d_il: Array, inputs: tuple[Array, ...]) -> Array:
    """Return tokens' outputs [t, parts, lanes] of the states after them, in float32."""
    x_til, _, _, c_tn = (each.astype(jnp.float32) for each in inputs)
    return jnp.sum(states_tinl * c_tn[:, None, :, None], axis=2) + d_il * x_til


def _take_chunks(
    a_inl: Array,
    d_il: Array,
    pool: Array,
    batch: StateBatch,
    first_slot: Array | int,
    inputs: tuple[Array, ...],
    out_til: Array,
) -> tuple[Array, Array]:
    """Return the pool after the longer chunks of a step, and `out_til` with their rows' outputs.

    The states after all tokens of a tile are computed at once.
    """

    def follow(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        return first[0] * second[0], first[1] * second[0] + second[1]

    def advance(inputs: tuple[Array, ...], state_inl: Array) -> tuple[Array, Array]:
        decay_tinl, added_tinl = lax.associative_scan(follow, _changes(a_inl, inputs))
        states_tinl = state_inl * decay_tinl + added_tinl
        return states_tinl[-1], _read(states_tinl, d_il, inputs)

    run = prepare_and_advance(lambda *inputs: inputs, advance, out_til.dtype)
    return take_tiles(pool, batch, first_slot, inputs, out_til, run, at_once=count_at_once(inputs, jnp.float32))
