"""Choices of positions as bits: what the indexer returns, and what attention over latents takes.

A row's choice is [w] words of int32: bit i of word j says whether the row attends to position 32 j + i of its sequence.
So a choice of any size takes one bit for each position that a block table has room for.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.paged_attention import AttentionBatch

WORD_BITS = 32


def num_words(batch: AttentionBatch, block_size: int) -> int:
    """Return the number of words of a row's choice: a bit for each position in a block table."""
    return -(-batch.block_tables_sm.shape[1] * block_size // WORD_BITS)


def to_bits(positions: Array, words: int) -> Array:
    """Return the choices [..., w] of different positions [..., k]; -1 stands for none, anywhere."""
    *rows, k = positions.shape
    flat_rk = positions.reshape(-1, k)
    # Bits of one word differ, so that their sum is their union. Words beyond the last are dropped.
    words_rk = jnp.where(flat_rk < 0, words, flat_rk // WORD_BITS)
    bits_rk = jnp.left_shift(jnp.int32(1), flat_rk % WORD_BITS)
    chosen_rw = jnp.zeros((len(flat_rk), words), jnp.int32)
    chosen_rw = chosen_rw.at[jnp.arange(len(flat_rk))[:, None], words_rk].add(bits_rk, mode="drop")
    return chosen_rw.reshape(*rows, words)


def spans_to_bits(first: Array, last: Array, words: int) -> Array:
    """Return the choices [..., w] of all positions from `first` [...] to `last` [...]."""
    start_w = jnp.arange(words, dtype=jnp.int32) * WORD_BITS
    return _ones_below(last[..., None] + 1 - start_w) & ~_ones_below(first[..., None] - start_w)


def to_positions(chosen: Array, count: int) -> Array:
    """Return the first `count` positions [..., k] of choices [..., w], ascending, with -1 behind them.

    Nothing in it is a loop: a GPU runs it within one graph.
    """
    *rows, w = chosen.shape
    words_rw = lax.bitcast_convert_type(chosen.reshape(-1, w), jnp.uint32)
    counts_rw = lax.population_count(words_rw).astype(jnp.int32)
    ends_rw = jnp.cumsum(counts_rw, axis=1)
    starts_rw = ends_rw - counts_rw
    # Each word that has bits marks the first of its places; the places after it belong to it until the next mark.
    marks_rw = jnp.where(counts_rw > 0, starts_rw, count)
    row_r1 = jnp.arange(len(words_rw))[:, None]
    of_rk = jnp.zeros((len(words_rw), count), jnp.int32).at[row_r1, marks_rw].set(jnp.arange(w), mode="drop")
    of_rk = lax.cummax(of_rk, axis=1)
    words_rk = jnp.take_along_axis(words_rw, of_rk, axis=1)
    places_k = jnp.arange(count, dtype=jnp.int32)
    bits_rk = _find_bit(words_rk, places_k - jnp.take_along_axis(starts_rw, of_rk, axis=1))
    positions_rk = jnp.where(places_k < ends_rw[:, -1:], of_rk * WORD_BITS + bits_rk, -1)
    return positions_rk.reshape(*rows, count)


def to_array(positions: list[np.ndarray], words: int) -> np.ndarray:
    """Return the choices [t, w] of lists of positions, with a plain loop."""
    chosen_tw = np.zeros((len(positions), words), np.uint32)
    for row, some in enumerate(positions):
        for position in some:
            chosen_tw[row, position // WORD_BITS] |= np.uint32(1 << position % WORD_BITS)
    return chosen_tw.view(np.int32)


def to_lists(chosen_tw: np.ndarray) -> list[np.ndarray]:
    """Return the positions of each row's choice, ascending."""
    words_tw = np.ascontiguousarray(chosen_tw).view(np.uint32).astype("<u4")
    bits_tc = np.unpackbits(words_tw.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(bits_c) for bits_c in bits_tc]


def _ones_below(count: Array) -> Array:
    """Return words with the bits below `count` set; none if it is negative, and all from 32 on."""
    ones = jnp.left_shift(jnp.uint32(1), jnp.clip(count, 0, WORD_BITS - 1).astype(jnp.uint32)) - 1
    ones = jnp.where(count >= WORD_BITS, jnp.uint32(0xFFFFFFFF), ones)
    return lax.bitcast_convert_type(ones, jnp.int32)


def _find_bit(words: Array, rank: Array) -> Array:
    """Return the number of the bit of a word below which `rank` others are set."""
    number = jnp.zeros(words.shape, jnp.int32)
    for width in (16, 8, 4, 2, 1):
        low = lax.population_count(words & jnp.uint32((1 << width) - 1)).astype(jnp.int32)
        is_above = rank >= low
        rank = jnp.where(is_above, rank - low, rank)
        words = jnp.where(is_above, jnp.right_shift(words, jnp.uint32(width)), words)
        number = jnp.where(is_above, number + width, number)
    return number
