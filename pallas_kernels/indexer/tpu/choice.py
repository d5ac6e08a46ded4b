"""Choose the `top_k` highest scores of each of eight rows, exactly, and pack the choice into bits.

Scores lie in VMEM as integers of the same order, [chunks, 8, 128]: chunk c holds positions [128 c, 128 c + 128) of all
rows. The lowest score that is chosen is found bit by bit: a pass counts the scores that are at least a candidate. The
passes end early once all rows have exactly `top_k`. Among equal scores the lowest positions win: where more than
`top_k` are left, the last position of the equal ones is found bit by bit, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu.options import LANES, SUBLANES

ROWS = SUBLANES
"""The rows whose positions are chosen together."""
WORD = 32
"""The bits of a word."""
WORD_CHUNKS = WORD
"""The chunks whose bits are the words of one row of lanes, 4,096 positions."""
UNROLL = 8
"""The chunks that one step of a pass counts; passes go over a multiple of it."""
_LOWEST = -(2**31)
"""A score below all others, which stands for positions that a row does not see."""
_MOST = 2**31 - 1


class Rows(NamedTuple):
    """Eight rows: int32 [8, 128], the same in all lanes."""

    last: Array
    """Each row's own position, the last that it sees; -1 for rows of padding."""
    is_all: Array
    """Whether a row sees at most `top_k` positions, and gets them all."""
    most: Array
    """The last position that any row sees, a scalar."""
    num_steps: Array
    """The chunks of scores that passes go over, divided by `UNROLL`: none if all rows get all."""


class _Search(NamedTuple):
    """The state of the search for the lowest score that is chosen, [8, 128] each."""

    bit: Array
    """The next bit to settle, a scalar."""
    threshold: Array
    """`top_k` scores or more are at least this."""
    num_reached: Array
    """The number of scores that are at least the threshold, float32."""
    is_open: Array
    """A scalar: 1.0 while a row has more than `top_k`."""


def rows_of(last: Array, most: Array, top_k: int) -> Rows:
    """Return eight rows by their own positions [8, 128], and the largest of these."""
    return Rows(last, last < top_k, most, jnp.where(most < top_k, 0, lax.div(most, UNROLL * LANES) + 1))


def num_chunks(words: int) -> int:
    """Return the chunks of scores of eight rows with this number of words, a multiple of 128."""
    return words // LANES * WORD_CHUNKS


def sortable(scores: Array) -> Array:
    """Return integers of the same order as float32 scores; zeros of both signs are equal."""
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    return jnp.where(bits < 0, bits ^ _MOST, bits)


def choose(scores: Any, first_chunk: Array | int, rows: Rows, top_k: int, write: _Write) -> None:
    """Call `write(i, words [8, 128])` for the words [128 i, 128 i + 128) of each row that may have bits.

    Args:
      scores: a ref [chunks, 8, 128] of sortable scores; those that a row does not see may be anything.
      first_chunk: the chunk of position 0.
      rows: the eight rows.
      top_k: the most bits of a row.
      write: a function that stores words.
    """
    _hide(scores, first_chunk, rows)
    threshold, limit = _bounds(scores, first_chunk, rows, top_k)

    def pack(i: Array, _: None) -> None:
        bits = jnp.zeros((ROWS, LANES), jnp.int32)
        for j in range(WORD_CHUNKS):
            chunk = i * WORD_CHUNKS + j
            position, score = _positions(chunk), scores[first_chunk + chunk]
            is_chosen = (score > threshold) | ((score == threshold) & (position <= limit)) | (rows.is_all)
            bits |= jnp.where(is_chosen & (position <= rows.last), jnp.int32(1), 0) << j
        write(i, _words(bits))

    lax.fori_loop(0, lax.div(rows.most, WORD_CHUNKS * LANES) + 1, pack, None)


type _Write = Callable[[Array, Array], None]


def _positions(chunk: Array) -> Array:
    return chunk * LANES + lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1)


def _hide(scores: Any, first_chunk: Array | int, rows: Rows) -> None:
    """Give the lowest score to all positions that a row does not see."""

    def step(i: Array, _: None) -> None:
        for j in range(UNROLL):
            chunk = i * UNROLL + j
            is_seen = _positions(chunk) <= rows.last
            scores[first_chunk + chunk] = jnp.where(is_seen, scores[first_chunk + chunk], _LOWEST)

    lax.fori_loop(0, rows.num_steps, step, None)


def _bounds(scores: Any, first_chunk: Array | int, rows: Rows, top_k: int) -> tuple[Array, Array]:
    """Return the lowest score that is chosen, and the last position that is chosen with it."""

    def count(is_counted: Callable[[Array, Array], Array]) -> Array:
        """Return the number of scores for which a function of chunk and score holds, [8, 128] float32."""

        def step(i: Array, counts: tuple[Array, ...]) -> tuple[Array, ...]:
            for j in range(UNROLL):
                chunk = i * UNROLL + j
                one = jnp.where(is_counted(chunk, scores[first_chunk + chunk]), jnp.int32(1), 0)
                counts = (*counts[1:], counts[0] + one)
            return counts

        zeros = jnp.zeros((ROWS, LANES), jnp.int32)
        counts = lax.fori_loop(0, rows.num_steps, step, (zeros,) * 4)
        total = jnp.sum(functools.reduce(jnp.add, counts).astype(jnp.float32), axis=1, keepdims=True)
        return jnp.broadcast_to(total, (ROWS, LANES))

    def is_open(counted: Array) -> Array:
        return jnp.max(jnp.where((rows.is_all) | (counted <= top_k), 0.0, 1.0))

    def settle_score(search: _Search) -> _Search:
        # The highest bit is the sign's: adding it to the lowest number gives 0.
        candidate = search.threshold + (jnp.int32(1) << search.bit)
        counted = count(lambda _, score: score >= candidate)
        is_low = counted >= top_k
        counted = jnp.where(is_low, counted, search.num_reached)
        threshold = jnp.where(is_low, candidate, search.threshold)
        return _Search(search.bit - 1, threshold, counted, is_open(counted))

    lowest = jnp.full((ROWS, LANES), _LOWEST, jnp.int32)
    seen = (rows.last + 1).astype(jnp.float32)
    begin = _Search(jnp.int32(WORD - 1), lowest, seen, is_open(seen))
    ended = lax.while_loop(lambda search: (search.bit >= 0) & (search.is_open > 0), settle_score, begin)
    threshold = ended.threshold

    def settle_ties() -> Array:
        wanted = top_k - count(lambda _, score: score > threshold)

        def settle_position(i: Array, limit: Array) -> Array:
            candidate = limit + (jnp.int32(1) << (num_bits - 1 - i))
            counted = count(lambda chunk, score: (score == threshold) & (_positions(chunk) < candidate))
            return jnp.where(counted < wanted, candidate, limit)

        num_bits = (scores.shape[0] * LANES - 1).bit_length()
        return lax.fori_loop(0, num_bits, settle_position, jnp.zeros((ROWS, LANES), jnp.int32))

    limit = lax.cond(ended.is_open > 0, settle_ties, lambda: jnp.full((ROWS, LANES), _MOST, jnp.int32))
    return threshold, jnp.where(ended.num_reached > top_k, limit, _MOST)


def _words(bits: Array) -> Array:
    """Return the words of 4,096 positions in order; bit j of lane i is that of position 128 j + i."""
    lane = lax.broadcasted_iota(jnp.int32, bits.shape, 1)
    # In each quarter of the lanes a 32 x 32 matrix of bits is transposed, by halves of it, then of these, and so on.
    for size in (16, 8, 4, 2, 1):
        low = jnp.int32(sum(1 << i for i in range(WORD) if not i & size))
        above, below = pltpu.roll(bits, LANES - size, 1), pltpu.roll(bits, size, 1)
        of_low = (bits & low) | ((above & low) << size)
        of_high = (lax.shift_right_logical(below, jnp.int32(size)) & low) | (bits & ~low)
        bits = jnp.where((lane & size) == 0, of_low, of_high)
    # Lane 32 i + j now has word 4 j + i.
    return jnp.take_along_axis(bits, (lane & 3) * WORD + (lane >> 2), axis=1)
