"""The gated delta rule for tiles of tokens: the corrections of a tile's values solve a triangular system.

With the tile's keys in rows and each product shrunk by the decays between its tokens, A = beta * K K^T below the
diagonal. The corrections are (I + A)^-1 beta (V - K S) for the state S before the tile, of which U = (I + A)^-1 beta V
and W = (I + A)^-1 beta K need no state. The inverse grows out of those of its diagonal blocks, from one row to all: all
of its numbers stay small, where powers of A would not, for tokens with alike keys.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.recurrent_state import StateBatch
from pallas_kernels.recurrent_state.chunks import (
    count_at_once,
    decays_between,
    decays_of,
    decays_of_keys,
    dot,
    ones,
    prepare_and_advance,
    take_tiles,
    tile_indices,
)

from .norm import normed


class Prepared(NamedTuple):
    """What the tokens of a tile come to before a state is known, for one value head, in float32."""

    u_cd: Array
    """The corrections of values, had the state been zeros."""
    w_ck: Array
    """What the state is multiplied by, to be subtracted from them."""
    q_ck: Array
    """Queries of the state before the tile."""
    scores_cc: Array
    """How much of each correction a token reads."""
    k_ck: Array
    """Keys that corrections are added at in the state after the tile."""
    decay_k1: Array
    """By what the state shrinks."""


def take_chunks(
    pool: Array,
    batch: StateBatch,
    first_slot: Array | int,
    inputs: tuple[Array, ...],
    out_tvd: Array,
) -> tuple[Array, Array]:
    """Return the pool after the longer chunks of a step, and `out_tvd` with what their rows read.

    The inputs are those of `GatedDelta`, from queries to beta.
    """
    q_tkd, k_tkd, v_tvd, log_decay_tvd, beta_tv = inputs
    t, num_key_heads = q_tkd.shape[:2]
    # [t, key heads, value heads of each, ...]
    v, log_decay, beta = (x.reshape(t, num_key_heads, -1, *x.shape[2:]) for x in (v_tvd, log_decay_tvd, beta_tv))
    has_key_decay = log_decay.shape[3] > 1

    def of_head(q_ck: Array, k_ck: Array, v_cd: Array, log_decay_ck: Array, beta_c1: Array) -> Prepared:
        return prepare(q_ck, k_ck, v_cd, log_decay_ck if has_key_decay else log_decay_ck.T, beta_c1)

    of_group = jax.vmap(of_head, in_axes=(None, None, 1, 1, 1))
    of_tile = jax.vmap(of_group, in_axes=1)

    def prepare_tiles(*inputs: Array) -> Prepared:
        return jax.tree.map(lambda x: x.reshape(len(x), -1, *x.shape[3:]), jax.vmap(of_tile)(*inputs))

    def advance_heads(prepared: Prepared, state_vkd: Array) -> tuple[Array, Array]:
        state_vkd, read_vcd = jax.vmap(advance)(prepared, state_vkd)
        return state_vkd, read_vcd.swapaxes(0, 1)

    taken = q_tkd, k_tkd, v, log_decay, beta[..., None]
    run = prepare_and_advance(prepare_tiles, advance_heads, out_tvd.dtype)
    at_once = count_at_once(taken, jnp.float32)
    return take_tiles(pool, batch, first_slot, taken, out_tvd, run, at_once=at_once)


def prepare(q_ck: Array, k_ck: Array, v_cd: Array, log_decay: Array, beta_c1: Array) -> Prepared:
    """Return what a tile comes to without a state. Rows without beta and decay change nothing.

    The logarithms of decays are [1, c], or [c, key_dim] with decays of keys.
    """
    q_ck, k_ck = normed(q_ck) * q_ck.shape[1] ** -0.5, normed(k_ck)
    has_key_decay = len(log_decay) > 1
    decays = (decays_of_keys if has_key_decay else decays_of)(log_decay)
    products = products_with_key_decay if has_key_decay else products_with_decay
    scores_cc, overlaps_cc = products(q_ck, k_ck, log_decay)
    inverse_cc = inverted(overlaps_cc * beta_c1)
    # One product for both.
    right_cx = jnp.concatenate([v_cd.astype(jnp.float32), k_ck * decays.until_ck], axis=1) * beta_c1
    solved_cx = dot(inverse_cc, right_cx)
    u_cd, w_ck = solved_cx[:, : v_cd.shape[1]], solved_cx[:, v_cd.shape[1] :]
    return Prepared(u_cd, w_ck, q_ck * decays.until_ck, scores_cc, k_ck * decays.after_ck, decays.whole_k1)


def advance(prepared: Prepared, state_kd: Array) -> tuple[Array, Array]:
    """Return the state after a tile by the one before it, and what its rows read [c, value_dim]."""
    found_cd = dot(jnp.concatenate([prepared.w_ck, prepared.q_ck]), state_kd)
    size = len(prepared.w_ck)
    delta_cd = prepared.u_cd - found_cd[:size]
    read_cd = found_cd[size:] + dot(prepared.scores_cc, delta_cd)
    return state_kd * prepared.decay_k1 + dot(prepared.k_ck, delta_cd, contract=(0, 0)), read_cd


def products_with_decay(q_ck: Array, k_ck: Array, log_decay_1c: Array) -> tuple[Array, Array]:
    """Return the products of queries [c, c] and of keys with each key before, shrunk by the decays between."""
    row_cc, column_cc = tile_indices(len(q_ck))
    decay_cc = decays_between(log_decay_1c)
    both = dot(jnp.concatenate([q_ck, k_ck]), k_ck, contract=(1, 1))
    scores_cc, overlaps_cc = both[: len(q_ck)], both[len(q_ck) :]
    return scores_cc * decay_cc, jnp.where(row_cc > column_cc, overlaps_cc * decay_cc, 0.0)


def products_with_key_decay(q_ck: Array, k_ck: Array, log_decay_ck: Array) -> tuple[Array, Array]:
    """Return the products of queries [c, c] and of keys with each key before, where each of its numbers decays.

    A token and an earlier one lie in neighbouring blocks of one of six sizes, of the same block twice as large. There
    the decays between them are those up to the border between the blocks, times those from there on: both factors are
    at most 1, and rows are multiplied by theirs once for each size of blocks.
    """
    size = len(q_ck)
    row_cc, column_cc = tile_indices(size)
    scores_cc = jnp.where(row_cc == column_cc, jnp.sum(q_ck * k_ck, axis=1, keepdims=True), 0.0)
    overlaps_cc = jnp.zeros((size, size), jnp.float32)
    for level in range(_num_levels(size)):
        is_in_block = row_cc >> level == column_cc >> level
        is_second = (row_cc >> level) % 2 == 1
        is_between = is_in_block & (is_second & (column_cc <= row_cc) | ~is_second & (column_cc > row_cc))
        decay_ck = jnp.exp(dot(ones(is_between), log_decay_ck))
        both = dot(jnp.concatenate([q_ck * decay_ck, k_ck * decay_ck]), k_ck * decay_ck, contract=(1, 1))
        are_neighbours = _are_neighbours(row_cc, column_cc, level)
        scores_cc += jnp.where(are_neighbours, both[:size], 0.0)
        overlaps_cc += jnp.where(are_neighbours, both[size:], 0.0)
    return scores_cc, overlaps_cc


def inverted(a_cc: Array) -> Array:
    """Return (I + a)^-1 for a matrix that is zero on its diagonal and above."""
    row_cc, column_cc = tile_indices(len(a_cc))

    def border(level: int) -> Array:
        return jnp.where(_are_neighbours(row_cc, column_cc, level), a_cc, 0.0)

    inverse_cc = ones(row_cc == column_cc) - border(0)
    for level in range(1, _num_levels(len(a_cc))):
        inverse_cc -= dot(dot(inverse_cc, border(level)), inverse_cc)
    return inverse_cc


def _num_levels(size: int) -> int:
    return (size - 1).bit_length()


def _are_neighbours(row_cc: Array, column_cc: Array, level: int) -> Array:
    """Say of which elements the row is in the second and the column in the first block of 2 ** level of a pair."""
    row_cc, column_cc = row_cc >> level, column_cc >> level
    return (row_cc % 2 == 1) & (column_cc == row_cc - 1)
