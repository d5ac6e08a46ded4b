"""Masks of chosen positions, from the bits of `pallas_kernels.chosen`."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from .options import LANES, SUBLANES, div, rem

_WORD = 32
_POSITIONS = LANES * _WORD
"""The positions of one row of lanes of words."""


def row_of(tile: Array, kv_tile: int) -> Array:
    """Return the number of the row of lanes that has the words of a KV tile; a row is whole tiles."""
    return div(tile * kv_tile, _POSITIONS)


def unpack(words_rx: Array, tile: Array, kv_tile: int, num_tokens: int) -> Array:
    """Return the bits [r, num_tokens], as 0 and 1, of a KV tile's first tokens, from its row of lanes [r, 128]."""
    first = rem(tile * kv_tile, _POSITIONS) // _WORD
    lane = lax.broadcasted_iota(jnp.int32, words_rx.shape, 1)
    parts = []
    for i in range(0, num_tokens, LANES):
        words = jnp.take_along_axis(words_rx, first + i // _WORD + (lane >> 5), axis=1)
        parts.append((words >> (lane & (_WORD - 1))) & 1)
    return jnp.concatenate(parts, axis=1)


def repeat(bits_tc: Array, group: int) -> Array:
    """Return the mask [t * group, c] of all heads of tokens, one token after the other."""
    t, c = bits_tc.shape
    if group % SUBLANES == 0:
        return jnp.broadcast_to(bits_tc[:, None], (t, group, c)).reshape(t * group, c) != 0
    # Rows of several tokens share a register: a matmul puts them there.
    first = lax.broadcasted_iota(jnp.int32, (t * group, t), 1) * group
    row = lax.broadcasted_iota(jnp.int32, (t * group, t), 0)
    is_of_token = ((row >= first) & (row < first + group)).astype(jnp.float32)
    return jnp.dot(is_of_token, bits_tc.astype(jnp.float32), preferred_element_type=jnp.float32) > 0.5
