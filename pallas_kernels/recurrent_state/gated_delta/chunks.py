"""The gated delta rule for tiles of tokens: the corrections of a tile's values solve a triangular system.

With the tile's keys in rows and each product shrunk by the decays between its tokens, A = beta * K K^T below the
diagonal. The corrections are (I + A)^-1 beta (V - K S) for the state S before the tile; U = (I + A)^-1 beta V and W =
(I + A)^-1 beta K need no state. The inverse is built from the inverses of its diagonal blocks, from one row to all. So
all of its numbers stay small, unlike powers of A for tokens with similar keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.recurrent_state import StateBatch
from pallas_kernels.recurrent_state.chunks import (
    TILES_BYTES,
    Dot,
    Run,
    as_column,
    as_row,
    count_at_once,
    decays_between,
    decays_of,
    decays_of_keys,
    exact_dot,
    ones,
    prepare_and_advance,
    take_tiles,
    tile_indices,
)

from .norm import norm


class _Prepared(NamedTuple):
    """The results of a tile's tokens before a state is known, for one value head, in float32."""

    u_cd: Array
    """The corrections of values, if the state were zeros."""
    w_ck: Array
    """The matrix that the state is multiplied by, and subtracted from them."""
    q_ck: Array
    """Queries of the state before the tile, in any dtype."""
    q_factor_c1: Array
    """The factors of the queries."""
    scores_cc: Array
    """How much of each correction a token reads."""
    k_ck: Array
    """The keys under which corrections are added to the state after the tile, in any dtype."""
    k_factor_c1: Array
    """The factors of these keys."""
    decay_k1: Array
    """The factors by which the state shrinks."""


class Related(NamedTuple):
    """The relations between the tokens of a tile. Corrections are solved for with the first three; the others stay."""

    a_cc: Array
    """The A of this module."""
    k_until_factor_1c: Array
    """The factors of the columns of (I + A)^-1, before its product with these keys:"""
    k_until_ck: Array
    q_ck: Array
    q_factor_c1: Array
    scores_cc: Array
    k_ck: Array
    k_factor_c1: Array
    decay_k1: Array


def take_chunks(
    pool: Array,
    batch: StateBatch,
    first_slot: Array | int,
    inputs: tuple[Array, ...],
    out_tvd: Array,
    run: Run | None = None,
    most_bytes: int = TILES_BYTES,
) -> tuple[Array, Array]:
    """Return the pool after the longer chunks of a step, and `out_tvd` with their rows' outputs.

    The inputs are those of `GatedDelta`, from queries to beta. `run` takes states past tiles, with value heads by key
    heads, [n, c, key heads, value heads of each, ...], and saves the states of `copies_n`; None runs plain XLA.
    `most_bytes` is the memory that the inputs of all tiles taken at once may use.
    """
    q_tkd, k_tkd, v_tvd, log_decay_tvd, beta_tv = inputs
    t, num_key_heads = q_tkd.shape[:2]
    v, log_decay, beta = (x.reshape(t, num_key_heads, -1, *x.shape[2:]) for x in (v_tvd, log_decay_tvd, beta_tv))

    def advance_heads(prepared: _Prepared, state_vkd: Array) -> tuple[Array, Array]:
        state_vkd, read_vcd = jax.vmap(advance)(prepared, state_vkd)
        return state_vkd, read_vcd.swapaxes(0, 1)

    taken = q_tkd, k_tkd, v, log_decay, beta
    own_run = run or prepare_and_advance(by_heads(prepare), advance_heads, out_tvd.dtype)
    at_once = count_at_once(taken, jnp.float32, most_bytes)
    return take_tiles(pool, batch, first_slot, taken, out_tvd, own_run, at_once=at_once, saves_copies=run is not None)


def by_heads(function: Callable[..., Any]) -> Callable[..., Any]:
    """Map a function with the inputs of `prepare` over tiles and heads; it then returns arrays [n, v, ...]."""

    def of_head(q_ck: Array, k_ck: Array, v_cd: Array, log_decay_ck: Array, beta_c: Array) -> Any:
        log_decay = log_decay_ck if log_decay_ck.shape[1] > 1 else log_decay_ck.T
        return function(q_ck, k_ck, v_cd, log_decay, beta_c[None])

    of_group = jax.vmap(of_head, in_axes=(None, None, 1, 1, 1))
    of_tiles = jax.vmap(jax.vmap(of_group, in_axes=1))
    return lambda *inputs: jax.tree.map(lambda x: x.reshape(len(x), -1, *x.shape[3:]), of_tiles(*inputs))


def prepare(
    q_ck: Array, k_ck: Array, v_cd: Array, log_decay: Array, beta_1c: Array, *, dot: Dot = exact_dot
) -> _Prepared:
    """Return the results of a tile without a state. Rows without beta and decay change nothing.

    The logarithms of decays are [1, c], or [c, key_dim] with decays of keys.
    """
    related = relate(q_ck, k_ck, log_decay, beta_1c, dot=dot)
    inverse_cc = _inverted(related.a_cc, dot=dot)
    u_cd = dot(inverse_cc * beta_1c, v_cd)
    w_ck = dot(inverse_cc * related.k_until_factor_1c, related.k_until_ck)
    return _Prepared(u_cd, w_ck, *related[3:])


def relate(q_ck: Array, k_ck: Array, log_decay: Array, beta_1c: Array, *, dot: Dot) -> Related:
    """Return the part of `prepare` before the corrections are solved for."""
    q_norm_c1, k_norm_c1 = (norm(x) for x in (q_ck, k_ck))
    q_norm_c1 *= q_ck.shape[1] ** -0.5
    if len(log_decay) > 1:
        decays = decays_of_keys(log_decay, dot=dot)
        q_ck, k_ck = q_ck * q_norm_c1, k_ck * k_norm_c1
        scores_cc, overlaps_cc = _products_with_key_decay(q_ck, k_ck, log_decay, dot=dot)
        # Each number has a decay, so that rows have no factor that could be applied after a product.
        k_until = beta_1c, k_ck * decays.until_ck
        queries = q_ck * decays.until_ck, jnp.ones_like(q_norm_c1)
        keys = k_ck * decays.after_ck, jnp.ones_like(k_norm_c1)
    else:
        decays = decays_of(log_decay)
        scores_cc, overlaps_cc = _products_with_decay(q_ck, k_ck, log_decay, dot=dot)
        scores_cc *= q_norm_c1 * as_row(k_norm_c1)
        overlaps_cc *= k_norm_c1 * as_row(k_norm_c1)
        k_until = beta_1c * as_row(decays.until_ck * k_norm_c1), k_ck
        queries, keys = (q_ck, decays.until_ck * q_norm_c1), (k_ck, decays.after_ck * k_norm_c1)
    a_cc = overlaps_cc * as_column(beta_1c)
    return Related(a_cc, *k_until, *queries, scores_cc, *keys, decays.whole_k1)


def advance(prepared: _Prepared, state_kd: Array, *, dot: Dot = exact_dot) -> tuple[Array, Array]:
    """Return the state after a tile, from the one before it, and its rows' outputs [c, value_dim]."""
    delta_cd = prepared.u_cd - dot(prepared.w_ck, state_kd)
    read_cd = dot(prepared.q_ck, state_kd) * prepared.q_factor_c1 + dot(prepared.scores_cc, delta_cd)
    added_kd = dot(prepared.k_ck, delta_cd * prepared.k_factor_c1, (0, 0))
    return state_kd * prepared.decay_k1 + added_kd, read_cd


def _products_with_decay(q_ck: Array, k_ck: Array, log_decay_1c: Array, *, dot: Dot) -> tuple[Array, Array]:
    """Return the products [c, c] of queries and of keys with each key before, shrunk by the decays between."""
    row_cc, column_cc = tile_indices(len(q_ck))
    decay_cc = decays_between(log_decay_1c, dot=dot)
    both = dot(jnp.concatenate([q_ck, k_ck]), k_ck, (1, 1))
    scores_cc, overlaps_cc = both[: len(q_ck)], both[len(q_ck) :]
    return scores_cc * decay_cc, jnp.where(row_cc > column_cc, overlaps_cc * decay_cc, 0.0)


def _products_with_key_decay(q_ck: Array, k_ck: Array, log_decay_ck: Array, *, dot: Dot) -> tuple[Array, Array]:
    """Return the products [c, c] of queries and of keys with each key before, where each of its numbers decays.

    A token and an earlier one lie in neighbouring blocks, of one of six sizes, in the same block of twice the size. The
    decays between them are the decays up to the border between the blocks, times those after it: both factors are at
    most 1, and rows are multiplied by theirs once for each size of blocks.
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
        both = dot(jnp.concatenate([q_ck * decay_ck, k_ck * decay_ck]), k_ck * decay_ck, (1, 1))
        are_neighbours = _are_neighbours(row_cc, column_cc, level)
        scores_cc += jnp.where(are_neighbours, both[:size], 0.0)
        overlaps_cc += jnp.where(are_neighbours, both[size:], 0.0)
    return scores_cc, overlaps_cc


def _inverted(a_cc: Array, *, dot: Dot) -> Array:
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
    """Return where the row is in the second and the column in the first block of 2 ** level of a pair of blocks."""
    row_cc, column_cc = row_cc >> level, column_cc >> level
    return (row_cc % 2 == 1) & (column_cc == row_cc - 1)
