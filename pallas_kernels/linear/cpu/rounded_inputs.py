"""Round rows of x to 8 bits. 32 numbers share a scale: the largest magnitude among them, divided by 127.

Rows lie in tiles of a few rows each. A tile has the first 64 numbers of each of its rows, then the next 64 of each.
Their scales, offsets and sums lie in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pallas_kernels.native.emitter import F32, I8, I32, I64, LANES, Emitter, vector
from pallas_kernels.native.handler import wait
from pallas_kernels.native.number_formats import Format
from pallas_kernels.weights.format import CHUNK

from .operands import Operands
from .rounding import INPUT_GROUP, MAX_NUMBER, Integers

_LEAST = 1e-30
"""Numbers that share a scale become zeros if all are smaller than this."""
_SHIFT = 1.5 * 2**23
"""Adding this to a number puts its integer, rounded half to even, into its lowest bits."""
_ALL_BUT_SIGN = 2**31 - 1
_NUM_BYTES = 4
"""The number of bytes of a float32 or int32."""
_NEXT, _DONE, _HEADER_BYTES = 0, 64, 128
"""The offsets of the counts of tiles that are taken and that are rounded, and of the first tile."""


NUM_SCALES = CHUNK // INPUT_GROUP
"""The number of scales of 64 numbers."""


class Inputs(NamedTuple):
    """The addresses of a tile's rows, from one of their stretches of 64 numbers on."""

    numbers: Any
    scales: Any
    offsets: Any
    """int32 for each group of numbers: added to the sum of products, as codes are too large by an offset."""
    sums: Any
    """The float32 sum of each group of numbers, which mins of weights are multiplied by."""


class RoundedInputs:
    """Rounds rows, and defines their layout."""

    def __init__(self, tile: int, num_groups: int, integers: Integers, *, has_sums: bool) -> None:
        self.tile = tile
        """The number of rows of a tile."""
        self.num_groups = num_groups
        """The number of groups of 64 numbers."""
        self.offset, self.unit = integers.offset, integers.unit
        """The offset by which codes are too large, and the factor of the scales of sums of their products."""
        self.has_sums = has_sums

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Return the bytes that 64 numbers of a row take as numbers, scales, offsets and sums."""
        of_groups = _NUM_BYTES * self.num_groups
        return CHUNK, _NUM_BYTES * NUM_SCALES, of_groups * bool(self.offset), of_groups * self.has_sums

    def num_bytes(self, num_rows: int, k: int) -> int:
        """Return the bytes that `num_rows` rows of k numbers take."""
        return _HEADER_BYTES + -(-num_rows // self.tile) * self.tile * k // CHUNK * sum(self._sizes)

    def at(self, e: Emitter, of: Operands, tile: Any, block: Any) -> Inputs:
        """Return the addresses of a tile's rows, from a stretch of 64 numbers on."""
        blocks = e.ir.udiv(of.k, I64(CHUNK))
        count = e.product(e.ceil_div(of.t, self.tile), blocks, self.tile)
        index = e.product(e.sum(e.product(tile, blocks), block), self.tile)
        addresses, start = [], e.at(of.scratch, I8, _HEADER_BYTES)
        for size in self._sizes:
            addresses.append(e.at(start, I8, e.product(index, size)))
            start = e.at(start, I8, e.product(count, size))
        return Inputs(*addresses)

    def begin(self, e: Emitter, scratch: Any) -> None:
        """Record that nothing is rounded yet."""
        e.clear(scratch, _HEADER_BYTES)

    def round(self, e: Emitter, of: Operands, storage: Format, num_rows: Any) -> None:
        """Round tiles of rows until none is left, and wait for the tiles that other threads took."""
        taken, done = (e.at(of.scratch, I8, place) for place in (_NEXT, _DONE))
        num_tiles = e.ceil_div(num_rows, self.tile)
        take, work, rest, after = (e.function.append_basic_block() for _ in range(4))
        is_done = e.ir.icmp_signed(">=", e.ir.load_atomic(done, "acquire", 8, typ=I64), num_tiles)
        e.ir.cbranch(is_done, after, take)
        e.ir.position_at_end(take)
        tile = e.ir.atomic_rmw("add", taken, I64(1), "monotonic")
        e.ir.cbranch(e.ir.icmp_signed("<", tile, num_tiles), work, rest)
        e.ir.position_at_end(work)
        first = e.product(tile, self.tile)
        count = e.least(e.ir.sub(num_rows, first), self.tile)
        with e.range(0, count) as row, e.range(0, e.ir.udiv(of.k, I64(CHUNK))) as block:
            start = e.sum(e.product(e.sum(first, row), of.k), e.product(block, CHUNK))
            for part in range(NUM_SCALES):
                lanes = range(part * INPUT_GROUP, (part + 1) * INPUT_GROUP, LANES)
                loaded = [e.load_vector(of.x, storage.storage, start, lane) for lane in lanes]
                numbers = [storage.widen(e, each) for each in loaded]
                self._round(e, numbers, part, self.at(e, of, tile, block), row)
        e.ir.atomic_rmw("add", done, I64(1), "release")
        e.ir.branch(take)
        e.ir.position_at_end(rest)
        wait(e, done, num_tiles)
        e.ir.branch(after)
        e.ir.position_at_end(after)

    def _round(self, e: Emitter, numbers: Sequence[Any], part: int, to: Inputs, row: Any) -> None:
        """Round numbers that share a scale, and store them as a part of a tile's row."""
        scale, grow = self._scale(e, numbers)
        e.store(e.ir.fmul(scale, F32(self.unit)), to.scales, row, part * self.tile)
        bits = [e.ir.bitcast(e.fma(value, grow, e.constant(_SHIFT, value)), vector(I32)) for value in numbers]
        for index, value in enumerate(bits):
            target = e.sum(e.product(row, CHUNK), part * INPUT_GROUP + index * LANES)
            e.store_vector(e.ir.trunc(value, vector(I8)), to.numbers, target)
        if not (self.offset or self.has_sums):
            return
        signed = [e.ir.ashr(e.ir.shl(value, e.constant(24, value)), e.constant(24, value)) for value in bits]
        num_groups = self.num_groups // NUM_SCALES
        per_group = len(signed) // num_groups
        for group in range(num_groups):
            first, *others = signed[group * per_group : (group + 1) * per_group]
            for value in others:
                first = e.ir.add(first, value)
            total, target = e.reduce(e.ir.add, first), e.sum(row, (part * num_groups + group) * self.tile)
            if self.offset:
                e.store(e.ir.mul(total, I32(-self.offset)), to.offsets, target)
            if self.has_sums:
                e.store(e.ir.fmul(e.ir.sitofp(total, F32), scale), to.sums, target)

    def _scale(self, e: Emitter, numbers: Sequence[Any]) -> tuple[Any, Any]:
        """Return the scale of some numbers, and a vector of the factor that they are multiplied by first."""

        def larger(a: Any, b: Any) -> Any:
            return e.ir.select(e.ir.icmp_unsigned(">", a, b), a, b)

        # Magnitudes have the same order as integers. A NaN is the largest, and makes the scale a NaN.
        sizes = [e.ir.and_(e.ir.bitcast(other, vector(I32)), e.splat(I32(_ALL_BUT_SIGN))) for other in numbers]
        first, *others = sizes
        for other in others:
            first = larger(first, other)
        largest = e.ir.bitcast(e.reduce(larger, first), F32)
        is_tiny = e.ir.fcmp_ordered("<", largest, F32(_LEAST))
        grow = e.ir.select(is_tiny, F32(0.0), e.ir.fdiv(F32(MAX_NUMBER), largest))
        return e.ir.fmul(largest, F32(1.0 / MAX_NUMBER)), e.splat(grow)
