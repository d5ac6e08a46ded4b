"""Attention over latents at chosen positions, in plain jnp: sparse attention.

Latents are gathered through the block table, a tile of chosen positions at a time, with an online softmax in float32.
Every row has positions of its own, so rows share nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.chosen import to_positions
from pallas_kernels.paged_attention import AttentionBatch, Tiles
from pallas_kernels.paged_attention.xla import walk_rows

_MASKED = float(jnp.finfo(jnp.float32).min)
_Read = Callable[[Array, Array], Array]
"""A function that returns the latents [..., h] at blocks [...] and offsets in them, in the queries' dtype."""


class _Softmax(NamedTuple):
    """The running state of the online softmax, per row and head."""

    max_srn: Array
    sum_srn: Array
    acc_srnl: Array


def attend_chosen(
    q_tnh: Array,
    chosen_tw: Array,
    batch: AttentionBatch,
    read: _Read,
    *,
    latent_dim: int,
    block_size: int,
    scale: float,
    top_k: int,
    tiles: Tiles,
) -> Array:
    """Attend each row of a step to its chosen positions, whose latents are in the pool; return [t, n, latent_dim]."""

    def attend(rows: tuple[Array, Array], tables_sm: Array, positions_sr: Array, _: Array | None) -> Array:
        q_srnh, chosen_srw = rows
        chosen_srk = to_positions(jnp.where(positions_sr[..., None] < 0, 0, chosen_srw), top_k)
        settings = {"latent_dim": latent_dim, "block_size": block_size, "scale": scale, "tile": tiles.kv}
        return _attend(q_srnh, chosen_srk, tables_sm, read, **settings)

    nothing = jnp.zeros((q_tnh.shape[1], latent_dim), q_tnh.dtype)
    return walk_rows(attend, (q_tnh, chosen_tw), nothing, batch, tiles)


def _attend(
    q_srnh: Array,
    chosen_srk: Array,
    tables_sm: Array,
    read: _Read,
    *,
    latent_dim: int,
    block_size: int,
    scale: float,
    tile: int,
) -> Array:
    """Attend rows of sequences; a row without a position gives 0."""
    s, r, n, _ = q_srnh.shape
    num_tiles = ((chosen_srk >= 0).sum(axis=-1).max() + tile - 1) // tile
    chosen_srk = jnp.pad(chosen_srk, ((0, 0), (0, 0), (0, -chosen_srk.shape[2] % tile)), constant_values=-1)
    # By default a GPU rounds float32 operands to 11 bits, and a TPU to 8.
    precision = lax.Precision.HIGHEST if q_srnh.dtype == jnp.float32 else None
    multiply = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    def body(i: Array, state: _Softmax) -> _Softmax:
        chosen_src = lax.dynamic_slice_in_dim(chosen_srk, i * tile, tile, axis=2)
        is_live_src = chosen_src >= 0
        at_sc = jnp.maximum(chosen_src, 0).reshape(s, r * tile)
        blocks_sc = jnp.take_along_axis(tables_sm, at_sc // block_size, axis=1)
        latents_srch = read(blocks_sc, at_sc % block_size).reshape(s, r, tile, -1)
        latents_srch = jnp.where(is_live_src[..., None], latents_srch, 0)  # the pool may hold NaN
        scores = multiply("srnh,srch->srnc", q_srnh, latents_srch) * scale
        scores = jnp.where(is_live_src[:, :, None], scores, _MASKED)
        max_srn = jnp.maximum(state.max_srn, scores.max(axis=-1))
        # _MASKED - _MASKED is 0: rows without a position must not count masked entries as exp(0).
        probs = jnp.where(is_live_src[:, :, None], jnp.exp(scores - max_srn[..., None]), 0.0)
        decay_srn = jnp.exp(state.max_srn - max_srn)
        values_srcl = latents_srch[..., :latent_dim]
        acc = multiply("srnc,srcl->srnl", probs.astype(values_srcl.dtype), values_srcl)
        return _Softmax(
            max_srn, state.sum_srn * decay_srn + probs.sum(axis=-1), state.acc_srnl * decay_srn[..., None] + acc
        )

    nothing = _Softmax(jnp.full((s, r, n), _MASKED), jnp.zeros((s, r, n)), jnp.zeros((s, r, n, latent_dim)))
    state = lax.fori_loop(0, num_tiles, body, nothing)
    return (state.acc_srnl / jnp.maximum(state.sum_srn, 1e-30)[..., None]).astype(q_srnh.dtype)
