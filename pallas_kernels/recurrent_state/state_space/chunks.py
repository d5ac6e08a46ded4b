"""The scan of Mamba-2 for tiles of tokens: a tile's tokens read each other by a matrix product, as in attention."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.recurrent_state import StateBatch
from pallas_kernels.recurrent_state.chunks import (
    TILES_BYTES,
    Decays,
    Dot,
    Run,
    as_column,
    count_at_once,
    decays_between,
    decays_of,
    exact_dot,
    prepare_and_advance,
    take_tiles,
)


class _Prepared(NamedTuple):
    """The results of a tile's tokens before a state is known, for one head, in float32."""

    read_cp: Array
    """The outputs from the tile's own tokens."""
    decay_c1: Array
    """The factors by which the state before the tile has shrunk after each token."""
    added_cp: Array
    """What each token adds to the state after the tile, before it is multiplied by b."""
    whole_decay_11: Array
    """The factor by which the state shrinks."""


def take_chunks(
    a_h: Array,
    d_h: Array,
    pool: Array,
    batch: StateBatch,
    first_slot: Array | int,
    inputs: tuple[Array, ...],
    out_thp: Array,
    run: Run | None = None,
    most_bytes: int = TILES_BYTES,
) -> tuple[Array, Array]:
    """Return the pool after the longer chunks of a step, and `out_thp` with their rows' outputs.

    The inputs are those of `StateSpace` that have rows: x, dt, b and c. `run` takes states past tiles, with heads by
    groups, [n, c, groups, heads of each, ...], and saves the states of `copies_n`; None runs plain XLA. `most_bytes` is
    the memory that the inputs of all tiles taken at once may use.
    """
    x_thp, dt_th, b_tgn, c_tgn = inputs
    t, num_groups = b_tgn.shape[:2]
    # [t, groups, heads of each, ...]
    x, dt = (each.reshape(t, num_groups, -1, *each.shape[2:]) for each in (x_thp, dt_th))
    a, d = (each.reshape(num_groups, -1) for each in (a_h, d_h))

    def of_head(x_cp: Array, dt_c: Array, *others: Array) -> _Prepared:
        return prepare(x_cp, dt_c[None], *others)

    of_group = jax.vmap(of_head, in_axes=(1, 1, 0, None, None, 0))
    of_tile = jax.vmap(of_group, in_axes=(1, 1, 0, 1, 1, 0))
    of_heads = jax.vmap(jax.vmap(advance, in_axes=(0, None, None, 0)), in_axes=(0, 1, 1, 0))

    def prepare_tiles(x: Array, dt: Array, b: Array, c: Array) -> tuple[_Prepared, Array, Array]:
        return jax.vmap(lambda x, dt, b, c: of_tile(x, dt, a, b, c, d))(x, dt, b, c), b, c

    def advance_heads(prepared: tuple[_Prepared, Array, Array], state_hpn: Array) -> tuple[Array, Array]:
        grouped = state_hpn.reshape(num_groups, -1, *state_hpn.shape[1:])
        state, read = of_heads(*prepared, grouped)
        return state.reshape(state_hpn.shape), jnp.moveaxis(read.reshape(-1, *read.shape[2:]), 0, 1)

    taken = x, dt, b_tgn, c_tgn
    own_run = run or prepare_and_advance(prepare_tiles, advance_heads, out_thp.dtype)
    at_once = count_at_once(taken, jnp.float32, most_bytes)
    return take_tiles(pool, batch, first_slot, taken, out_thp, own_run, at_once=at_once, saves_copies=run is not None)


def prepare(
    x_cp: Array, dt_1c: Array, a: Array, b_cn: Array, c_cn: Array, d: Array, *, dot: Dot = exact_dot
) -> _Prepared:
    """Return the results of a tile without a state. Rows of zeros change nothing."""
    scores_cc, decays = scores_and_decays(dt_1c, a, b_cn, c_cn, dot=dot)
    added_cp = x_cp * (as_column(dt_1c) * decays.after_ck)
    return _Prepared(dot(scores_cc, x_cp) + d * x_cp, decays.until_ck, added_cp, decays.whole_k1)


def scores_and_decays(dt_1c: Array, a: Array, b_cn: Array, c_cn: Array, *, dot: Dot) -> tuple[Array, Decays]:
    """Return how much each token reads of each token's x [c, c], and the decays of a tile."""
    log_decay_1c = dt_1c * a
    scores_cc = dot(c_cn, b_cn, (1, 1)) * decays_between(log_decay_1c, dot=dot) * dt_1c
    return scores_cc, decays_of(log_decay_1c)


def advance(
    prepared: _Prepared, b_cn: Array, c_cn: Array, state_pn: Array, *, dot: Dot = exact_dot
) -> tuple[Array, Array]:
    """Return the state after a tile, from the one before it, and its rows' outputs [c, head_dim]."""
    read_cp = prepared.read_cp + dot(c_cn, state_pn, (1, 1)) * prepared.decay_c1
    return state_pn * prepared.whole_decay_11 + dot(prepared.added_cp, b_cn, (0, 0)), read_cp
