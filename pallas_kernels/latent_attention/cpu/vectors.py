"""Attend with vectors: a few lanes and a few registers of sums at a time.

Scores are summed up along a latent, 16 or 32 products at a time; values are added one token after the other. In
bfloat16 scores are sums of pairs of products, if the numbers of a key are a multiple of 32; otherwise numbers of the
pool are widened to float32. Probabilities are float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.native import pairs
from pallas_kernels.native.compiling import num_registers
from pallas_kernels.native.emitter import CACHE_LINE, F32, I32, I64, LANES, POINTER, Emitter, vector
from pallas_kernels.native.number_formats import FORMATS

from ..layout import LatentShape
from .unit import MASKED, PIECE, Tile, Unit, each_group

_MOST_LANES, _LEAST_LANES = 6, 4
"""The most and the fewest lanes of a group. Between them, the number with the fewest lanes computed in vain is taken,
or the largest such number.
"""
_MAX_TOKENS = 4
"""The number of tokens whose scores are summed up at a time."""
_TILE = 32
"""The number of tokens of a tile; their latents stay in a core's first cache."""


class Vectors:
    """The way to attend that all processors have; see `Way`."""

    tile, acc_step = _TILE, LANES

    def __init__(self, shape: LatentShape) -> None:
        self.shape = shape
        self.format, self.kv_format = FORMATS[shape.dtype], FORMATS[shape.kv_dtype]
        is_bfloat16 = shape.dtype == shape.kv_dtype == jnp.bfloat16
        self.has_pairs = is_bfloat16 and shape.key_dim % (2 * LANES) == 0
        """True if scores are sums of pairs of products."""
        n = shape.num_heads
        self.lanes = (
            n if n < _LEAST_LANES else min(range(_MOST_LANES, _LEAST_LANES - 1, -1), key=lambda count: -n % count)
        )
        most_sums = max(1, num_registers() * 3 // 4 // self.lanes)
        self.num_tokens = 1 << (min(_MAX_TOKENS, most_sums).bit_length() - 1)
        self.vectors = next(count for count in range(most_sums, 0, -1) if shape.latent_dim // LANES % count == 0)
        """The number of vectors of sums of each lane at a time: of tokens' scores, and of its latents."""

    def make(self, e: Emitter, num_groups: int) -> tuple[Any, Any]:
        """Make room for a unit's queries and sums of latents, and for a group's scores."""
        shape, count = self.shape, num_groups * self.lanes
        self._scores = e.array(F32, self.lanes * _TILE)
        return e.array(self._query_storage, count * shape.key_dim), e.array(F32, count * shape.latent_dim)

    @property
    def _query_storage(self) -> ir.Type:
        return self.format.storage if self.has_pairs else F32

    def begin(self, e: Emitter, unit: Unit, group: Any, queries: Sequence[Any]) -> None:
        """Copy a group's queries, widened if they are multiplied so, and clear its sums of latents."""
        h, rank, zeros = self.shape.key_dim, self.shape.latent_dim, e.splat(F32(0.0))
        for r, query in enumerate(queries):
            index = e.sum(e.product(group, self.lanes), r)
            with e.range(0, h, LANES) as i:
                numbers = e.load_vector(query, self.format.storage, i)
                numbers = numbers if self.has_pairs else self.format.widen(e, numbers)
                e.store_vector(numbers, unit.queries, e.product(index, h), i)
            with e.range(0, rank, LANES) as i:
                e.store_vector(zeros, unit.acc, e.product(index, rank), i)

    def end(self, e: Emitter) -> None:
        """Leave everything unchanged."""

    def numbers(self, e: Emitter, unit: Unit, group: Any, lane: Any, start: Any) -> list[Any]:
        """Return a vector of a lane's sums of latents."""
        index = e.sum(e.product(group, self.lanes), lane)
        return [e.load_vector(unit.acc, F32, e.product(index, self.shape.latent_dim), start)]

    def attend(self, e: Emitter, unit: Unit, tile: Tile) -> None:
        """Attend a tile with all groups. While the first group does, the next tile is fetched."""
        with each_group(e, unit, self.lanes, tile) as (group, live):
            first = e.product(group, self.lanes)
            queries = e.at(unit.queries, self._query_storage, e.product(first, self.shape.key_dim))
            fetches = e.ir.and_(tile.has_next, e.ir.icmp_signed("==", group, I64(0)))
            with e.range(0, live, PIECE) as start:
                self._score(e, queries, tile, start, fetches)
            decays = self._softmax(e, unit, first, tile.start, live)
            self._add_values(e, e.at(unit.acc, F32, e.product(first, self.shape.latent_dim)), tile, live, decays)

    def _score(self, e: Emitter, queries: Any, tile: Tile, start: Any, fetches: Any) -> None:
        """Multiply queries and the latents of a piece; scores beyond the live tokens may be anything."""
        h, count, tokens, storage = self.shape.key_dim, self.lanes, self.num_tokens, self.kv_format.storage
        width = 2 if self.has_pairs else 1
        line = CACHE_LINE // self.kv_format.num_bytes // width
        piece = e.ir.udiv(start, I64(PIECE))
        base, following = (e.load(places, POINTER, piece) for places in (tile.places, tile.following))
        with e.range(0, PIECE, tokens) as token:
            sums = [[e.variable(vector(F32), e.splat(F32(0.0))) for _ in range(tokens)] for _ in range(count)]
            latents, ahead = (e.at(each, storage, e.product(token, h)) for each in (base, following))
            with e.range(0, h // width, LANES) as i:
                is_line = e.ir.icmp_signed("==", e.ir.urem(i, I64(line)), I64(0))
                with e.ir.if_then(e.ir.and_(fetches, is_line)):
                    for j in range(tokens):
                        e.prefetch(ahead, storage, j * h, e.product(i, width))
                keys = [self._operand(e, latents, j * h, i) for j in range(tokens)]
                for r, row in enumerate(sums):
                    query = e.load_vector(queries, I32 if self.has_pairs else F32, r * h // width, i)
                    for total, key in zip(row, keys, strict=True):
                        if self.has_pairs:
                            total.value = pairs.add_products(e, total.value, query, key)
                        else:
                            total.value = e.fma(query, key, total.value)
            for r, row in enumerate(sums):
                e.store_vector(_add_up(e, [each.value for each in row]), self._scores, r * _TILE, start, token)

    def _operand(self, e: Emitter, base: Any, offset: int, i: Any) -> Any:
        """Return a vector of the pool's numbers, or of pairs."""
        if self.has_pairs:
            return e.load_vector(base, I32, offset // 2, i)
        return self.kv_format.widen(e, e.load_vector(base, self.kv_format.storage, offset, i))

    def _softmax(self, e: Emitter, unit: Unit, first: Any, start: Any, live: Any) -> list[Any]:
        """Turn a tile's scores into probabilities, not divided by their sums.

        Return the decay of older probabilities, a vector per lane.
        """
        rows = [e.at(self._scores, F32, r * _TILE) for r in range(self.lanes)]
        seen = [e.ir.sub(e.load(unit.seen, I32, first, r), e.ir.trunc(start, I32)) for r in range(self.lanes)]
        lanes = ir.Constant(vector(I32), list(range(LANES)))
        maxima = [e.variable(vector(F32), e.splat(F32(MASKED))) for _ in rows]
        with e.range(0, live, LANES) as i:
            for row, end, most in zip(rows, seen, maxima, strict=True):
                is_seen = e.ir.icmp_signed("<", lanes, e.splat(e.ir.sub(end, e.ir.trunc(i, I32))))
                score = e.ir.fmul(e.load_vector(row, F32, i), unit.scale)
                score = e.ir.select(is_seen, score, e.constant(MASKED, score))
                e.store_vector(score, row, i)
                most.value = e.larger(most.value, score)
        before = [e.load(unit.largest, F32, first, r) for r in range(self.lanes)]
        after = [e.larger(old, e.reduce(e.larger, most.value)) for old, most in zip(before, maxima, strict=True)]
        shifts = [e.splat(largest) for largest in after]
        added = [e.variable(vector(F32), e.splat(F32(0.0))) for _ in rows]
        with e.range(0, live, LANES) as i:
            for row, shift, total in zip(rows, shifts, added, strict=True):
                score = e.load_vector(row, F32, i)
                is_seen = e.ir.fcmp_ordered(">", score, e.constant(MASKED, score))
                prob = e.ir.select(is_seen, e.exp(e.ir.fsub(score, shift)), e.splat(F32(0.0)))
                e.store_vector(prob, row, i)
                total.value = e.ir.fadd(total.value, prob)
        decays = []
        for r, (old, largest, some) in enumerate(zip(before, after, added, strict=True)):
            decay = e.exp(e.ir.fsub(old, largest))
            total = e.fma(e.load(unit.sums, F32, first, r), decay, e.reduce(e.ir.fadd, some.value))
            e.store(total, unit.sums, first, r)
            e.store(largest, unit.largest, first, r)
            decays.append(e.splat(decay))
        return decays

    def _add_values(self, e: Emitter, acc: Any, tile: Tile, live: Any, decays: list[Any]) -> None:
        """Shrink the sums, and add the latents of a tile times their probabilities, in order."""
        h, rank, count, vectors = self.shape.key_dim, self.shape.latent_dim, self.lanes, self.vectors
        storage = self.kv_format.storage
        with e.range(0, rank, vectors * LANES) as start:
            targets = [[e.at(acc, F32, r * rank, start, j * LANES) for j in range(vectors)] for r in range(count)]
            sums = [
                [e.variable(vector(F32), e.ir.fmul(e.load_vector(target, F32), decay)) for target in row]
                for row, decay in zip(targets, decays, strict=True)
            ]
            with e.range(0, live, PIECE) as first:
                piece = e.at(e.load(tile.places, POINTER, e.ir.udiv(first, I64(PIECE))), storage, start)
                with e.range(0, e.least(e.ir.sub(live, first), PIECE)) as token:
                    base = e.at(piece, storage, e.product(token, h))
                    values = [self.kv_format.widen(e, e.load_vector(base, storage, j * LANES)) for j in range(vectors)]
                    for r, row in enumerate(sums):
                        factor = e.splat(e.load(self._scores, F32, r * _TILE, first, token))
                        for total, value in zip(row, values, strict=True):
                            total.value = e.fma(factor, value, total.value)
            for total, target in zip(itertools.chain(*sums), itertools.chain(*targets), strict=True):
                e.store_vector(total.value, target)


def _add_up(e: Emitter, sums: list[Any]) -> Any:
    """Return the sum of each vector's numbers, all in one vector. The number of vectors is a power of two."""
    width = LANES
    while width > 1:
        width //= 2
        others = sums[1::2] or sums[:1]
        count = sums[0].type.count
        end = 2 * count if len(sums) > 1 else count
        low = [first + lane for first in range(0, end, 2 * width) for lane in range(width)]
        high = [lane + width for lane in low]
        sums = [e.ir.fadd(e.shuffle(a, b, low), e.shuffle(a, b, high)) for a, b in zip(sums[::2], others, strict=True)]
    return sums[0]
