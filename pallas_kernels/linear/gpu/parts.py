"""The parts of weights besides their codes: how a piece's entries come from memory into registers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from .sizes import piece
from .widen import Widening
from .words import WORDS_BY_OUTPUT

_FACTORS_BY_OUTPUT = plgpu.Layout.WGMMA.reduce(1)


class Held(NamedTuple):
    """What a piece is widened with, in registers."""

    words: dict[str, list[Array]]
    """The entries of the parts that numbers are made with, int32 words [64]."""
    sum_scales: list[Array]
    """What multiplies the sums of each accumulator, [64]."""


def as_entries(part: Array, name: str, widening: Widening) -> Array:
    """Return a part that numbers are made with as int32 words, or, where rows are no words, as integers of an entry.

    Parts that multiply sums stay as they are.
    """
    if name not in widening.number_parts:
        return part
    size = widening.entry_bytes(name)
    per_word = 4 // size
    if part.shape[2] % per_word or widening.count(name) % per_word:
        return lax.bitcast_convert_type(part, {1: jnp.uint8, 2: jnp.uint16}[size])
    by_word = part.reshape(*part.shape[:2], -1, per_word) if per_word > 1 else part
    return lax.bitcast_convert_type(by_word, jnp.int32)


class Parts(NamedTuple):
    """The parts of all matrices in global memory, as `as_entries` returns them."""

    refs: Mapping[str, Any]
    """The parts but codes by name, [l, o, entries]."""
    widening: Widening
    overlaps: bool = False
    """Whether the last piece of a row that is no multiple of pieces ends where the row does. Otherwise it begins where
    the piece before it ends."""

    def load(self, matrix: Array, outputs: Any, i: Array) -> Held:
        """Return what a piece of 64 outputs is widened with, and what its sums are multiplied by."""
        widening = self.widening
        words = {name: self._words(name, matrix, outputs, i) for name in widening.number_parts}
        sum_scales = []
        if widening.sum_scales is not None:
            names = [widening.sum_scales] + ["min_factors"] * widening.has_own_min_sums
            for name in names:
                first = self._first_entry(name, i)
                sum_scales += [self.factors(name, matrix, outputs, first + k) for k in range(widening.count(name))]
        return Held(words, sum_scales)

    def factors(self, name: str, matrix: Array, outputs: Any, index: Array | int) -> Array:
        """Return an entry of each of 64 outputs, [64] of float32."""
        ref = self.refs[name]
        ref = ref.at[matrix, outputs, lax.min(index, ref.shape[2] - 1)]
        return plgpu.load(ref, layout=_FACTORS_BY_OUTPUT, optimized=False).astype(jnp.float32)

    def _words(self, name: str, matrix: Array, outputs: Any, i: Array) -> list[Array]:
        """Return words [64] with the entries of a part for a piece."""
        ref, size, count = self.refs[name], self.widening.entry_bytes(name), self.widening.count(name)
        first, per_word = self._first_entry(name, i), 4 // size

        def load(index: Array | int) -> Array:
            # The last piece may reach beyond the inputs: its numbers there are finite, and rows are 0.
            entry = ref.at[matrix, outputs, lax.min(index, ref.shape[2] - 1)]
            return plgpu.load(entry, layout=WORDS_BY_OUTPUT, optimized=False).astype(jnp.int32)

        if ref.dtype == jnp.int32:
            return [load(lax.div(first, jnp.int32(per_word)) + k) for k in range(-(-count // per_word))]
        words = []
        for start in range(0, count, per_word):
            entries = [load(first + k) << 8 * size * (k - start) for k in range(start, min(start + per_word, count))]
            words.append(reduce(jnp.bitwise_or, entries))
        return words

    def _first_entry(self, name: str, i: Array) -> Array:
        """Return the index of a part's first entry for a piece."""
        form, depth = self.widening.form, piece(self.widening.form)
        per_entry = form.factor_group if name.endswith("factors") else form.group
        assert per_entry is not None
        if per_entry > depth:
            return lax.div(i, jnp.int32(per_entry // depth))
        first, ref = i * (depth // per_entry), self.refs[name]
        if not self.overlaps:
            return first
        per_word = 4 // self.widening.entry_bytes(name) if ref.dtype == jnp.int32 else 1
        return lax.min(first, jnp.int32(ref.shape[2] * per_word - depth // per_entry))
