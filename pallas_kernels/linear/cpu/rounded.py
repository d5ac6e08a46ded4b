"""Multiply rows of x, rounded to 8 bits, by quantized weights, and add up the products as integers.

The products of a group, of up to 32 inputs, are added up exactly. The group's sum is then scaled in float32, and added
to that of the groups before it, in the same order for any number of rows: a row's result depends neither on the rows
beside it nor on which instructions multiply integers.

A few rows are multiplied by codes that are in registers only. For more rows, the codes of 16 rows of w are first
written to memory in the layout that instructions take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from llvmlite import ir

from pallas_kernels.native.compiling import num_cores, num_registers
from pallas_kernels.native.emitter import (
    F32,
    I1,
    I8,
    I32,
    I64,
    LANES,
    NULL,
    POINTER,
    VOID,
    Emitter,
    Variable,
    add_function,
    vector,
)
from pallas_kernels.weights.format import CHUNK

from .byte_products import BYTES, Sum
from .kind import Kind
from .multiplier import UNIT_ROWS, Multiplier
from .operands import Operands, Range
from .panels import CODES_TYPES, STEPS, Codes, Panels, Scales
from .rounded_inputs import NUM_SCALES, Inputs, RoundedInputs

_MAX_CHUNK, UNITS_PER_CORE = 256, 8
"""The most columns of y in a unit, and the approximate number of units for each core."""
_FEW = (1, 2, 4)
"""The number of rows that are multiplied by codes in registers only."""
_MANY = (4, 8)
"""The numbers of rows that are multiplied at a time by codes in memory. A tile of rows has as many as the last, 4 with
16 registers."""
_CHAINS = {1: 4, 2: 4, 4: 2, 8: 1}
"""The number of independent sums of each number of y, by the number of rows. They hide an instruction's latency."""


class RoundedMultiplier(Multiplier[ir.Function]):
    """Multiplies the integers of x's rounded rows by codes."""

    has_scratch = True
    weights: Panels

    def __init__(self, kind: Kind) -> None:
        assert kind.form is not None
        panels = Panels(kind.form)
        super().__init__(kind, panels)
        self.many = _MANY if num_registers() == 32 else _MANY[:1]
        self.inputs = RoundedInputs(self.many[-1], panels.num_groups, panels.integers, has_sums=panels.has_mins)

    def scratch_bytes(self, num_rows: int, k: int) -> int:
        """Return the bytes of memory that a call needs besides its operands."""
        return self.inputs.num_bytes(num_rows, k)

    def begin(self, e: Emitter, scratch: Any) -> None:
        """Do what must come before all units."""
        self.inputs.begin(e, scratch)

    def chunk(self, e: Emitter, n: Any, num_parts: Any) -> Any:
        """Return the number of columns of a unit, where each of `num_parts` ranges of n is divided."""
        wanted = LANES * UNITS_PER_CORE * num_cores()
        return e.least(e.product(e.ceil_div(e.product(n, num_parts), wanted), LANES), _MAX_CHUNK)

    def multiply(
        self, e: Emitter, tiles: ir.Function, of: Operands, num_rows: Any, rows: Range, columns: Range
    ) -> None:
        """Multiply a unit's rows of x by a unit's rows of w; `num_rows` is the number of all rows of x."""
        self.inputs.round(e, of, self.in_format, e.least(num_rows, of.t))
        e.ir.call(tiles, [*rows, *columns, *of.own, of.scratch, *of.parts])

    def add_tiles(self) -> ir.Function:
        """Define the function that `multiply` calls with ranges of rows and columns, and the operands."""
        few = {rows: self._add_multiply(rows, is_few=True) for rows in _FEW}
        many = {rows: self._add_multiply(rows, is_few=False) for rows in self.many}
        finish = self._add_finish()
        panels, num_parts = self.weights, len(self.weights.parts)
        e, (first, last, start, stop, x, w, plus, bias, y, t, n, k, scratch, *parts) = add_function(
            self.module, "unit", VOID, *[I64] * 4, *[POINTER] * 5, *[I64] * 3, *[POINTER] * (1 + num_parts)
        )
        of, rows = Operands(x, w, plus, bias, y, t, n, k, parts, scratch), Range(first, last)
        with e.ir.if_then(e.ir.icmp_signed(">=", first, last)):
            e.ir.ret_void()
        is_few = e.ir.icmp_signed("<=", e.ir.sub(last, first), I64(_FEW[-1]))
        written, scales = e.array(I8, panels.piece * LANES), panels.make_scales(e)
        sums = e.array(F32, self.parts * UNIT_ROWS * LANES)
        with e.range(start, stop, LANES) as column:
            # A vector that would reach beyond the end begins earlier: two units may store the same numbers, to the bit.
            column = e.least(column, e.ir.sub(n, I64(LANES)))
            for part in range(self.parts):
                part_column, own_sums = e.sum(column, e.product(n, part)), e.at(sums, F32, part * UNIT_ROWS * LANES)
                with e.range(0, k, panels.piece) as begin:
                    piece = Range(begin, e.least(e.sum(begin, panels.piece), k))
                    panels.write_scales(e, of, part_column, piece, scales)
                    codes = panels.codes(e, of, part_column, begin)
                    with e.ir.if_else(is_few) as (by_few, by_many):
                        with by_few:
                            self._multiply_piece(e, few, of, rows, piece, codes, scales, own_sums)
                        with by_many:
                            panels.write_codes(e, codes, self._blocks(e, piece), written)
                            codes = codes._replace(base=written)
                            self._multiply_piece(e, many, of, rows, piece, codes, scales, own_sums)
            scale = parts[:1] if panels.scales_sums else [NULL]
            e.ir.call(finish, [sums, first, last, column, n, y, plus, bias, *scale])
        e.ir.ret_void()
        return e.function

    def _blocks(self, e: Emitter, numbers: Range) -> Any:
        return e.ir.udiv(e.ir.sub(numbers.stop, numbers.start), I64(CHUNK))

    def _multiply_piece(
        self,
        e: Emitter,
        functions: Mapping[int, ir.Function],
        of: Operands,
        rows: Range,
        piece: Range,
        codes: Codes,
        scales: Scales,
        sums: Any,
    ) -> None:
        """Multiply all rows of a unit by a piece of 16 rows of w, a tile of rows at a time.

        With each tile a share of the next weights is fetched: fetched at once, they would be waited for.
        """
        *fewer, most = functions
        is_first, tile = e.ir.icmp_signed("==", piece.start, I64(0)), self.inputs.tile
        num_blocks, num_tiles = self._blocks(e, piece), e.ceil_div(e.ir.sub(rows.stop, rows.start), tile)
        with e.range(0, num_tiles) as index:
            row = e.sum(rows.start, e.product(index, tile))
            left, function = e.ir.sub(rows.stop, row), functions[most]
            for count in reversed(fewer):
                function = e.ir.select(e.ir.icmp_signed("<=", left, I64(count)), functions[count], function)
            x = self.inputs.at(e, of, e.ir.udiv(row, I64(tile)), e.ir.udiv(piece.start, I64(CHUNK)))
            tile_sums = e.at(sums, F32, e.product(index, tile * LANES))
            share = self.weights.share(e, codes, num_blocks, index, num_tiles)
            e.ir.call(function, [*x, *share, *_addresses(scales), num_blocks, tile_sums, is_first])

    def _add_multiply(self, num_rows: int, *, is_few: bool) -> ir.Function:
        """Multiply the first rows of a tile by a piece of 16 rows of w, and add the products to their sums."""
        panels = self.weights
        name = f"multiply_{'few' if is_few else 'many'}_{num_rows}"
        types = [*[POINTER] * 4, *CODES_TYPES, *[POINTER] * 2, I64, POINTER, I1]
        e, arguments = add_function(self.module, name, VOID, *types)
        x, codes, scales = Inputs(*arguments[:4]), Codes(*arguments[4:8]), Scales(*arguments[8:10])
        num_blocks, sums, is_first = arguments[10:]
        totals = [e.variable(vector(F32), e.splat(F32(0.0))) for _ in range(num_rows)]
        with e.ir.if_then(e.ir.not_(is_first)):
            for row, total in enumerate(totals):
                total.value = e.load_vector(sums, F32, row * LANES)
        with e.range(0, num_blocks) as block:
            panels.fetch_next(e, codes, block)
            if is_few:
                codes_of = panels.vectors(e, codes, block)
            else:
                address = e.at(codes.base, I8, e.product(block, STEPS * BYTES))
                codes_of = partial(_load_codes, e, address)
            self._multiply_block(e, x, codes_of, scales.scales, block, totals)
            for group in range(panels.num_groups if panels.has_mins else 0):
                mins = e.load_vector(scales.mins, F32, self._place_of_scales(e, block, group))
                for row, total in enumerate(totals):
                    added = e.splat(e.load(x.sums, F32, self._place_of_group(e, block, group), row))
                    total.value = e.fma(mins, added, total.value)
        for row, total in enumerate(totals):
            e.store_vector(total.value, sums, row * LANES)
        e.ir.ret_void()
        return e.function

    def _multiply_block(
        self, e: Emitter, x: Inputs, codes_of: Callable[[int], Any], scales: Any, block: Any, totals: Sequence[Variable]
    ) -> None:
        """Add the products of 64 inputs to the total of each row."""
        panels, tile = self.weights, self.inputs.tile
        num_groups = panels.num_groups // NUM_SCALES
        for part in range(NUM_SCALES):
            numbers: list[Any] = [None] * len(totals)
            for group in range(part * num_groups, (part + 1) * num_groups):
                sums = self._multiply_group(e, x, codes_of, block, group, len(totals))
                scale = None
                if not panels.scales_sums:
                    scale = e.load_vector(scales, F32, self._place_of_scales(e, block, group))
                for row, (total, before) in enumerate(zip(sums, numbers, strict=True)):
                    number = e.ir.sitofp(total.total(), vector(F32))
                    if scale is not None:
                        number = e.ir.fmul(number, scale) if before is None else e.fma(number, scale, before)
                    numbers[row] = number
            for row, total in enumerate(totals):
                index = e.product(e.sum(e.product(block, NUM_SCALES), part), tile)
                scale = e.splat(e.load(x.scales, F32, index, row))
                total.value = e.fma(numbers[row], scale, total.value)

    def _multiply_group(
        self, e: Emitter, x: Inputs, codes_of: Callable[[int], Any], block: Any, group: int, num_rows: int
    ) -> list[Sum]:
        """Return the sums of products of a group of the 64 inputs."""
        integers, index = self.weights.integers, self._place_of_group(e, block, group)
        starts = [e.splat(e.load(x.offsets, I32, index, row)) if integers.offset else None for row in range(num_rows)]
        sums = [Sum(e, integers.pairs_in_words, _CHAINS[num_rows], start) for start in starts]
        numbers = e.at(x.numbers, I8, e.product(block, CHUNK * self.inputs.tile))
        per_group = STEPS // self.weights.num_groups
        for step in range(group * per_group, (group + 1) * per_group):
            codes = codes_of(step)
            for row, total in enumerate(sums):
                total.add(codes, e.splat(e.load(e.at(numbers, I8, row * CHUNK + 4 * step), I32)))
        return sums

    def _place_of_group(self, e: Emitter, block: Any, group: int) -> Any:
        """Return the index of a tile's entries for a group of their numbers."""
        return e.product(e.sum(e.product(block, self.weights.num_groups), group), self.inputs.tile)

    def _place_of_scales(self, e: Emitter, block: Any, group: int) -> Any:
        """Return the index of 16 rows' scales of a group, or of the larger group that contains it."""
        size = self.weights.form.group
        assert size is not None
        if size >= CHUNK:
            return e.product(e.ir.udiv(block, I64(size // CHUNK)), LANES)
        per_block = CHUNK // size
        return e.product(e.sum(e.product(block, per_block), group * per_block // self.weights.num_groups), LANES)

    def _add_finish(self) -> ir.Function:
        """Store the results of a unit's sums: 16 columns of y."""
        assert self.out_format.narrow is not None
        e, (sums, first, last, column, n, y, plus, bias, scales) = add_function(
            self.module, "finish", VOID, POINTER, *[I64] * 4, *[POINTER] * 4
        )
        places = [e.sum(column, e.product(n, part)) for part in range(self.parts)]
        factors = [
            self.weights.load_part(e, "scales", scales, part_column, LANES) if self.weights.scales_sums else None
            for part_column in places
        ]
        with e.range(first, last) as row:
            results = []
            for part, (part_column, factor) in enumerate(zip(places, factors, strict=True)):
                at = e.product(e.ir.sub(row, first), LANES)
                number = e.load_vector(sums, F32, at, part * UNIT_ROWS * LANES)
                number = number if factor is None else e.ir.fmul(number, factor)
                number = self._plus(e, number, plus, e.sum(e.product(row, n, self.parts), part_column))
                results.append(self._plus(e, number, bias, part_column))
            result = self.activate(e, results[0]) if self.activate else results[0]
            if self.is_gated:
                result = e.ir.fmul(result, results[1])
            e.store_vector(self.out_format.narrow(e, result), y, e.product(row, n), column)
        e.ir.ret_void()
        return e.function

    def _plus(self, e: Emitter, number: Any, base: Any, index: Any) -> Any:
        """Add the number at an index, if there is an addend."""
        total = e.variable(number.type, number)
        with e.ir.if_then(e.ir.icmp_unsigned("!=", base, NULL)):
            added = e.load_vector(base, self.out_format.storage, index)
            total.value = e.ir.fadd(self.out_format.widen(e, added), total.value)
        return total.value


def _load_codes(e: Emitter, base: Any, step: int) -> Any:
    return e.load_vector(base, I8, step * BYTES, lanes=BYTES)


def _addresses(scales: Scales) -> list[Any]:
    return [NULL if base is None else base for base in scales]
