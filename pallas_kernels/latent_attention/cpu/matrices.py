"""Attend with the matrix unit of AMX: 16 lanes, by 16 tokens or by 16 numbers of the latents, at a time.

Scores come as [tokens, lanes]: 16 tokens' latents are one operand without a new layout, and queries, with pairs of
numbers laid out once, are the other. So the softmax works on vectors of lanes. Probabilities, rounded to bfloat16, are
transposed to [lanes, tokens], and multiply the latents of pairs of tokens. These are interleaved once for all groups of
a unit, some columns at a time, so that they stay in the first cache. An 8-bit pool's latents are widened to bfloat16
first, which is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.native import amx, pairs
from pallas_kernels.native.amx import MATRIX_BYTES, SIDE, STEP
from pallas_kernels.native.emitter import CACHE_LINE, F32, I8, I16, I32, I64, LANES, POINTER, Emitter, vector
from pallas_kernels.native.number_formats import FORMATS

from ..layout import LatentShape
from .unit import MASKED, PIECE, Tile, Unit, each_group

_TILE = 128
"""The number of tokens of a tile: sums of latents are loaded and stored once for each."""
_AT_ONCE = 4
"""The number of matrices of sums in registers; one operand is for all of them, in `_SHARED`, and the others are in
`_OWN`."""
_SHARED, _OWN = 4, (5, 6, 7)
_CHAINS = 4
"""The number of sums of probabilities of a lane, which do not wait for each other."""
_LOW = [lane for first in range(0, 2 * LANES, 8) for lane in range(first, first + 4)]
"""The columns of the first of the two vectors that the instruction makes of 32 interleaved columns of two tokens."""
_HIGH = [lane + 4 for lane in _LOW]


class Matrices:
    """The way of processors with AMX; see `Way`."""

    lanes, tile, acc_step = SIDE, _TILE, 2 * LANES

    def __init__(self, shape: LatentShape) -> None:
        self.shape = shape
        self.kv_format, self.storage = FORMATS[shape.kv_dtype], FORMATS[jnp.dtype(jnp.bfloat16)].storage
        self.is_narrow = self.kv_format.num_bytes < 2
        """True if the pool has 8 bits."""
        self.columns = shape.latent_dim // SIDE
        """The number of matrices of a group's sums."""
        self.at_once = _AT_ONCE if self.columns % _AT_ONCE == 0 else 2
        """The number of them that are multiplied at a time."""
        self.steps = shape.key_dim // STEP
        """The number of matrices of a group's queries."""

    @staticmethod
    def takes(shape: LatentShape) -> bool:
        """Return whether latents are whole matrices."""
        return shape.key_dim % STEP == 0 and shape.latent_dim % STEP == 0 and shape.kv_dtype.itemsize <= 2

    def make(self, e: Emitter, num_groups: int) -> tuple[Any, Any]:
        """Make room for a unit's queries and sums of latents, and configure the registers."""
        shape = self.shape
        self._scores, self._probs = e.array(F32, _TILE * SIDE), e.array(self.storage, num_groups * _TILE * SIDE)
        self._rows, self._pairs = e.array(POINTER, _TILE), e.array(self.storage, _TILE * SIDE * self.at_once)
        self._widened = e.array(self.storage, _TILE * shape.key_dim) if self.is_narrow else None
        self._zeros = e.array(self.storage, shape.latent_dim)
        e.clear(self._zeros, shape.latent_dim * 2)
        amx.configure(e, [(SIDE, CACHE_LINE)] * amx.NUM_REGISTERS)
        return e.array(I8, num_groups * self.steps * MATRIX_BYTES), e.array(
            I8, num_groups * self.columns * MATRIX_BYTES
        )

    def end(self, e: Emitter) -> None:
        """Release the registers."""
        amx.release(e)

    def _queries(self, e: Emitter, unit: Unit, group: Any) -> Any:
        return e.at(unit.queries, I8, e.product(group, self.steps * MATRIX_BYTES))

    def _acc(self, e: Emitter, unit: Unit, group: Any) -> Any:
        return e.at(unit.acc, I8, e.product(group, self.columns * MATRIX_BYTES))

    def begin(self, e: Emitter, unit: Unit, group: Any, queries: Sequence[Any]) -> None:
        """Lay out pairs of 16 lanes' queries side by side, and clear the sums."""
        target = self._queries(e, unit, group)
        with e.range(0, self.steps) as step:
            rows = [e.load_vector(query, I32, e.product(step, LANES)) for query in queries]
            for i, column in enumerate(e.transpose(rows)):
                e.store_vector(column, e.at(target, I8, e.product(step, MATRIX_BYTES)), i * LANES)
        e.clear(self._acc(e, unit, group), self.columns * MATRIX_BYTES)

    def _widen(self, e: Emitter, tile: Tile) -> Tile:
        h, places = self.shape.key_dim, e.array(POINTER, _TILE // PIECE)
        with e.range(0, _TILE // PIECE) as which:
            source, target = e.load(tile.places, POINTER, which), e.at(self._widened, I16, e.product(which, PIECE * h))
            e.store(target, places, which)
            is_live = e.ir.icmp_signed("<", e.product(which, PIECE), tile.live)
            with e.ir.if_then(is_live), e.range(0, PIECE * h, LANES) as i:
                numbers = self.kv_format.widen(e, e.load_vector(source, self.kv_format.storage, i))
                e.store_vector(pairs.narrow_half(e, numbers), target, i)
        return tile._replace(places=places)

    def attend(self, e: Emitter, unit: Unit, tile: Tile) -> None:
        """Attend a tile with all groups. While the first group does, the next tile is fetched."""
        if self.is_narrow:
            tile = self._widen(e, tile)
        with each_group(e, unit, SIDE, tile) as (group, live):
            fetches = e.ir.and_(tile.has_next, e.ir.icmp_signed("==", group, I64(0)))
            self._score(e, self._queries(e, unit, group), tile, live, fetches)
            before, after = self._softmax(e, unit, group, tile.start, live)
            differs = e.ir.bitcast(e.ir.fcmp_ordered("!=", before, after), ir.IntType(LANES))
            has_sums = e.ir.icmp_signed(">", tile.start, I64(0))
            with e.ir.if_then(e.ir.and_(has_sums, e.ir.icmp_unsigned("!=", differs, differs.type(0)))):
                self._shrink(e, self._acc(e, unit, group), e.exp(e.ir.fsub(before, after)))
        self._find_rows(e, tile)
        with e.range(0, self.columns, self.at_once) as column:
            self._interleave(e, tile, column)
            with each_group(e, unit, SIDE, tile) as (group, live):
                acc = e.at(self._acc(e, unit, group), I8, e.product(column, MATRIX_BYTES))
                self._add_values(e, acc, self._probs_of(e, group), live)

    def _probs_of(self, e: Emitter, group: Any) -> Any:
        return e.at(self._probs, self.storage, e.product(group, _TILE * SIDE))

    def _find_rows(self, e: Emitter, tile: Tile) -> None:
        """Store the address of each token's latents; tokens beyond the live ones get zeros, as 0 x NaN is NaN."""
        with e.range(0, e.product(e.ceil_div(tile.live, STEP), STEP)) as token:
            piece = e.load(tile.places, POINTER, e.ir.udiv(token, I64(PIECE)))
            row = e.at(piece, self.storage, e.product(e.ir.urem(token, I64(PIECE)), self.shape.key_dim))
            e.store(e.ir.select(e.ir.icmp_signed("<", token, tile.live), row, self._zeros), self._rows, token)

    def _interleave(self, e: Emitter, tile: Tile, column: Any) -> None:
        """Lay out some matrices of the latents of each 32 tokens, whose rows are pairs of tokens."""
        first = e.product(column, SIDE)
        with e.range(0, tile.live, STEP) as start, e.range(0, SIDE) as pair:
            token = e.sum(start, e.product(pair, 2))
            rows = [e.at(e.load(self._rows, POINTER, token, which), I16, first) for which in (0, 1)]
            target = e.at(self._pairs, I16, e.product(start, SIDE * self.at_once), e.product(pair, STEP))
            for j in range(self.at_once // 2):
                even, odd = (e.load_vector(row, I16, j * STEP, lanes=STEP) for row in rows)
                for which, columns in enumerate((_LOW, _HIGH)):
                    interleaved = e.shuffle(even, odd, [lane for each in columns for lane in (each, each + STEP)])
                    e.store_vector(interleaved, target, (2 * j + which) * SIDE * STEP)

    def _shrink(self, e: Emitter, acc: Any, decays: Any) -> None:
        """Multiply the sums of each lane by its decay."""
        factors = [e.splat(e.ir.extract_element(decays, I32(r))) for r in range(SIDE)]
        with e.range(0, self.columns) as column:
            for r, factor in enumerate(factors):
                address = e.at(acc, I8, e.product(column, MATRIX_BYTES), r * CACHE_LINE)
                e.store_vector(e.ir.fmul(e.load_vector(address, F32), factor), address)

    def _score(self, e: Emitter, queries: Any, tile: Tile, live: Any, fetches: Any) -> None:
        """Multiply latents and queries; scores of tokens beyond the live ones may be anything."""
        stride = 2 * self.shape.key_dim
        with e.range(0, live, _AT_ONCE * PIECE) as start:
            piece = e.ir.udiv(start, I64(PIECE))
            rows, ahead = (
                [e.load(places, POINTER, e.sum(piece, i)) for i in range(_AT_ONCE)]
                for places in (tile.places, tile.following)
            )
            for register in range(_AT_ONCE):
                amx.clear(e, register)
            with e.range(0, self.steps) as step:
                amx.load(e, _SHARED, e.at(queries, I8, e.product(step, MATRIX_BYTES)), CACHE_LINE)
                for register, row in enumerate(rows):
                    register_of_latents = _OWN[register % len(_OWN)]
                    amx.load(e, register_of_latents, e.at(row, I8, e.product(step, CACHE_LINE)), stride)
                    amx.multiply(e, register, register_of_latents, _SHARED)
                with e.ir.if_then(fetches):
                    self._fetch(e, ahead, step)
            for register in range(_AT_ONCE):
                address = e.at(self._scores, F32, e.product(e.sum(start, register * PIECE), SIDE))
                amx.store(e, register, address, CACHE_LINE)

    def _fetch(self, e: Emitter, pieces: Sequence[Any], step: Any) -> None:
        """Begin to read a step's share of the next tile; each piece is read in order."""
        share = PIECE * STEP * self.kv_format.num_bytes
        for piece in pieces:
            for line in range(0, share, CACHE_LINE):
                e.prefetch(piece, I8, e.product(step, share), line)

    def _softmax(self, e: Emitter, unit: Unit, group: Any, start: Any, live: Any) -> tuple[Any, Any]:
        """Turn a tile's scores into probabilities, not divided by their sums; return each lane's largest score.

        The result has the largest score before the tile, and after it.
        """
        first, whole, probs = e.product(group, SIDE), e.product(e.ceil_div(live, STEP), STEP), self._probs_of(e, group)
        seen = e.ir.sub(e.load_vector(unit.seen, I32, first), e.splat(e.ir.trunc(start, I32)))
        before = e.load_vector(unit.largest, F32, first)
        largest = [e.variable(vector(F32), before) for _ in range(_CHAINS)]
        with e.range(0, whole, _CHAINS) as token:
            for i, most in enumerate(largest):
                address = e.at(self._scores, F32, e.product(token, SIDE), i * SIDE)
                is_seen = e.ir.icmp_signed("<", e.splat(e.ir.trunc(e.sum(token, i), I32)), seen)
                score = e.ir.fmul(e.load_vector(address, F32), unit.scale)
                score = e.ir.select(is_seen, score, e.constant(MASKED, score))
                e.store_vector(score, address)
                most.value = e.larger(most.value, score)
        after = largest[0].value
        for most in largest[1:]:
            after = e.larger(after, most.value)
        added = [e.variable(vector(F32), e.splat(F32(0.0))) for _ in range(_CHAINS)]
        with e.range(0, whole, PIECE) as token:
            rows = []
            for i in range(PIECE):
                score = e.load_vector(self._scores, F32, e.product(token, SIDE), i * SIDE)
                is_seen = e.ir.fcmp_ordered(">", score, e.constant(MASKED, score))
                rows.append(e.ir.select(is_seen, e.exp(e.ir.fsub(score, after)), e.splat(F32(0.0))))
                added[i % _CHAINS].value = e.ir.fadd(added[i % _CHAINS].value, rows[-1])
            # A matrix has the probabilities of 32 tokens; these are one half of each of its rows.
            matrix = e.product(e.ir.udiv(token, I64(STEP)), SIDE * STEP)
            for r, row in enumerate(e.transpose(rows)):
                address = e.sum(matrix, e.ir.urem(token, I64(STEP)), r * STEP)
                e.store_vector(pairs.narrow_half(e, row), probs, address)
        total = added[0].value
        for some in added[1:]:
            total = e.ir.fadd(total, some.value)
        decays = e.exp(e.ir.fsub(before, after))
        e.store_vector(e.fma(e.load_vector(unit.sums, F32, first), decays, total), unit.sums, first)
        e.store_vector(after, unit.largest, first)
        return before, after

    def _add_values(self, e: Emitter, acc: Any, probs: Any, live: Any) -> None:
        """Add some columns of the latents of a tile times their probabilities."""
        places = [e.at(acc, I8, i * MATRIX_BYTES) for i in range(self.at_once)]
        for register, address in enumerate(places):
            amx.load(e, register, address, CACHE_LINE)
        with e.range(0, e.ceil_div(live, STEP)) as step:
            amx.load(e, _SHARED, e.at(probs, I8, e.product(step, MATRIX_BYTES)), CACHE_LINE)
            first = e.at(self._pairs, I8, e.product(step, self.at_once * MATRIX_BYTES))
            for register in range(self.at_once):
                register_of_latents = _OWN[register % len(_OWN)]
                amx.load(e, register_of_latents, e.at(first, I8, register * MATRIX_BYTES), CACHE_LINE)
                amx.multiply(e, register, _SHARED, register_of_latents)
        for register, address in enumerate(places):
            amx.store(e, register, address, CACHE_LINE)

    def numbers(self, e: Emitter, unit: Unit, group: Any, lane: Any, start: Any) -> list[Any]:
        """Return two vectors of a lane's sums, with the columns that were interleaved."""
        address = e.at(self._acc(e, unit, group), I8, e.product(e.ir.udiv(start, I64(SIDE)), MATRIX_BYTES))
        low, high = (e.load_vector(address, F32, i * SIDE * LANES, e.product(lane, LANES)) for i in (0, 1))
        order = [(_LOW + _HIGH).index(column) for column in range(2 * LANES)]
        return [e.shuffle(low, high, order[:LANES]), e.shuffle(low, high, order[LANES:])]
