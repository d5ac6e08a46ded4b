"""The exact choice of the positions with the highest scores on Hopper: a warpgroup for each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.common import MMA_ROWS, WARPGROUP_LANES, compiler_params, interpret_params

WORD_BITS = 32
# The scores that a thread loads at a time, and the loads that are in flight together.
_VECTOR, _LOADS = 4, 4
_WIDTH = WARPGROUP_LANES * _VECTOR
SPAN = _WIDTH * _LOADS
"""The scores that are counted at a time, and those whose bits are packed at a time: a row of scores has whole spans."""
_DIGIT = 3
"""The bits that a pass over the scores decides, by the counts of 7 candidates."""
_FIRST_SHIFT = 29
_LEAST = -(2**31)

type _Test = Callable[[Array, Array, Array], Array]
"""A function of scores, their positions and a candidate that returns which scores count."""


class _Search(NamedTuple):
    """The search of the lowest chosen score; int32 scalars."""

    passes: Array
    """The number of passes so far."""
    low: Array
    """A score that at least `top_k` scores reach, the highest known one."""
    reach: Array
    """The number of scores that reach it."""
    beyond: Array
    """The number of scores that reach the lowest score known to be too high."""


def select(scores_rc: Array, seen_r: Array, *, top_k: int, words: int, interpret: bool) -> Array:
    """Return the bits [r, w] of the `top_k` highest scores of each row, the first of equal ones.

    Args:
      scores_rc: int32 scores; their number is a multiple of `SPAN`.
      seen_r: the number of scores of each row that count, its first ones. Other scores may be anything.
      top_k: the number of positions that a row chooses; a row that sees no more chooses all of them.
      words: the number of words w of a row, a multiple of 64 that scores suffice for.
      interpret: run in the interpreter.
    """
    r, columns = scores_rc.shape
    kernel = plgpu.kernel(
        partial(_select_kernel, top_k=top_k),
        out_type=jax.ShapeDtypeStruct((r, words), jnp.int32),
        grid=(r,),
        grid_names=("row",),
        kernel_name="indexer_select",
        compiler_params=compiler_params(),
        interpret=interpret_params(interpret),
    )
    # The same scores twice: in a line to count them, and by words to pack bits.
    return kernel(scores_rc, scores_rc.reshape(r, columns // WORD_BITS, WORD_BITS), seen_r)


def _select_kernel(scores_rc, scores_rwb, seen_r, chosen_rw, *, top_k: int):
    row = lax.axis_index("row")
    seen = seen_r[row]
    count = partial(_count, scores_rc, row, seen)

    def narrow(search: _Search) -> _Search:
        shift = lax.max(_FIRST_SHIFT - _DIGIT * search.passes, 0)
        candidates = _candidates(search.low, shift)
        counts = count(lambda scores, _, candidate: scores >= candidate, candidates)
        low, reach, beyond = search.low, search.reach, search.beyond
        for candidate, number in zip(candidates, counts, strict=True):
            low = jnp.where(number >= top_k, candidate, low)
            reach = jnp.where(number >= top_k, number, reach)
            beyond = jnp.where(number >= top_k, beyond, lax.max(beyond, number))
        return _Search(search.passes + 1, low, reach, beyond)

    most_passes = -(-_FIRST_SHIFT // _DIGIT) + 1
    nothing = _Search(jnp.int32(0), jnp.int32(_LEAST), seen, jnp.int32(0))
    search = lax.while_loop(lambda x: (x.passes < most_passes) & (x.reach > top_k), narrow, nothing)
    lowest = search.low

    def widen(index: Array, end: Array) -> Array:
        candidates = _candidates(end, _DIGIT * (end_passes - 1 - index))
        counts = count(lambda scores, at, candidate: (scores == lowest) & (at < candidate), candidates)
        for candidate, number in zip(candidates, counts, strict=True):
            end = jnp.where(number <= top_k - search.beyond, candidate, end)
        return end

    # Of the scores that equal the lowest, those before `end` are chosen.
    end_passes = -(-scores_rc.shape[1].bit_length() // _DIGIT)
    is_tied = search.reach > top_k
    end = lax.fori_loop(0, jnp.where(is_tied, end_passes, 0), widen, jnp.int32(0))
    end = jnp.where(is_tied, end, seen)
    _pack(scores_rwb, chosen_rw, row, seen, lowest, end)


def _candidates(low: Array, shift: Array | int) -> list[Array]:
    """Return 7 numbers above `low`, `1 << shift` apart, none beyond the highest of all."""
    sums = [low + jnp.left_shift(jnp.int32(i), shift) for i in range(1, 2**_DIGIT)]
    return [jnp.where(x < low, jnp.int32(2**31 - 1), x) for x in sums]


def _count(scores_rc: Any, row: Array, seen: Array, test: _Test, candidates: Sequence[Array]) -> list[Array]:
    """Return the number of a row's scores that count for each candidate."""
    layout = plgpu.Layout.WG_STRIDED((_WIDTH,), vec_size=_VECTOR)

    def add(span: Array, counts: tuple[Array, ...], *, is_last: bool) -> tuple[Array, ...]:
        starts = [pl.multiple_of(span * SPAN + i * _WIDTH, _WIDTH) for i in range(_LOADS)]
        for start, scores in [(x, plgpu.load(scores_rc.at[row, pl.ds(x, _WIDTH)], layout=layout)) for x in starts]:
            at = plgpu.broadcasted_iota(jnp.int32, (_WIDTH,), 0, layout=layout) + start
            are_counted = [test(scores, at, candidate) for candidate in candidates]
            if is_last:
                are_counted = [x & (at < seen) for x in are_counted]
            counts = tuple(y + jnp.where(x, 1, 0) for x, y in zip(are_counted, counts, strict=True))
        return counts

    zeros = plgpu.layout_cast(jnp.zeros((_WIDTH,), jnp.int32), layout)
    last = lax.div(seen - 1, SPAN)
    counts = lax.fori_loop(0, last, partial(add, is_last=False), (zeros,) * len(candidates))
    return [x.sum() for x in add(last, counts, is_last=True)]


def _pack(scores_rwb: Any, chosen_rw: Any, row: Array, seen: Array, lowest: Array, end: Array) -> None:
    """Store the bits of a row's scores above the lowest, and of those that equal it and come before `end`."""
    layout = plgpu.Layout.WGMMA

    @pl.loop(0, chosen_rw.shape[1] // MMA_ROWS)
    def _(i: Array) -> None:
        words = pl.ds(pl.multiple_of(i * MMA_ROWS, MMA_ROWS), MMA_ROWS)
        first = i * (MMA_ROWS * WORD_BITS)

        def pack() -> Array:
            scores_wb = plgpu.load(scores_rwb.at[row, words], layout=layout, optimized=False)
            bit = plgpu.broadcasted_iota(jnp.int32, scores_wb.shape, 1, layout=layout)
            word = plgpu.broadcasted_iota(jnp.int32, scores_wb.shape, 0, layout=layout)
            at = word * WORD_BITS + bit + first
            is_chosen = (at < seen) & ((scores_wb > lowest) | ((scores_wb == lowest) & (at < end)))
            return jnp.where(is_chosen, jnp.left_shift(jnp.ones_like(bit), bit), 0).sum(axis=1)

        def clear() -> Array:
            return plgpu.layout_cast(jnp.zeros((MMA_ROWS,), jnp.int32), layout.reduce(1))

        chosen_rw[row, words] = lax.cond(first < seen, pack, clear)
