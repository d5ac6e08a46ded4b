"""A unit of work on a processor with AMX, whose instruction multiplies matrices of bfloat16.

One matrix is 16 rows of w times 32 numbers, loaded from where they lie, or from where packed ones are unpacked to. The
other is 16 rows of x, whose pairs of numbers the instruction takes transposed: those of a unit are laid out so before.
Sums of 16 columns by 16 rows stay in one register, and are transposed when they are complete. Any number of rows goes
this one way, so that a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.native.emitter import (
    CACHE_LINE,
    F32,
    I1,
    I8,
    I16,
    I32,
    I64,
    LANES,
    POINTER,
    VOID,
    Emitter,
    add_function,
    vector,
)
from pallas_kernels.native.number_formats import FORMATS
from pallas_kernels.weights.format import CHUNK

from .operands import NULL, Operands, Range
from .unpack import Plain, Unpacker

SIDE = 16
"""How many rows a register holds, of 64 bytes each; and as many columns of sums."""
STEP = 32
"""How many numbers of a row are multiplied at a time."""
MATRIX_BYTES = SIDE * CACHE_LINE
PIECE = 1024
"""About how many numbers of longer rows are taken at a time, for all rows of a unit."""
SUMS, WEIGHTS, ROWS = (0, 1, 2, 3), (4, 5), (6, 7)
"""Which registers hold what: two matrices of w by two of x make four of sums."""
CONFIG_BYTES, WIDTHS_AT, HEIGHTS_AT = 64, 16, 48
"""What registers are to be is told in so many bytes: from where on how many bytes their rows have, and how many rows."""


class MatrixUnit:
    """Writes the function that multiplies a unit's rows of x by a unit's rows of w."""

    def __init__(
        self,
        module: ir.Module,
        weights: Plain,
        out_dtype: Any,
        activate: Callable[[Emitter, Any], Any] | None,
        unit_rows: int,
        max_columns: int,
        *,
        is_gated: bool,
    ) -> None:
        self.module, self.weights, self.activate, self.is_gated = module, weights, activate, is_gated
        self.out_format, self.storage = FORMATS[jnp.dtype(out_dtype)], FORMATS[jnp.dtype(jnp.bfloat16)].storage
        self.packed = weights if isinstance(weights, Unpacker) else None
        self.num_row_matrices = unit_rows // SIDE
        self.width = SIDE if is_gated else 2 * SIDE
        """How many columns of y come of two matrices of w: half of them where the others are gates."""
        self.num_blocks = -(-max_columns // self.width)
        whole = max([CHUNK] + [each for each in (self.form.group, self.form.factor_group) if each] if self.form else [1])
        self.piece = -(-PIECE // whole) * whole
        """How much of a row is taken at a time: whole groups, if weights have any."""

    @property
    def form(self) -> Any:
        return None if self.packed is None else self.packed.form

    def add_unit(self) -> ir.Function:
        """Define the function of a range of rows, a range of columns, and the operands."""
        e, (first, last, column, end, *operands) = add_function(
            self.module, "unit", VOID, *[I64] * 4, *[POINTER] * 5, *[I64] * 3, *[POINTER] * len(self.weights.parts)
        )
        of, rows, columns = Operands(*operands[:8], operands[8:]), Range(first, last), Range(column, end)
        num_rows = e.ir.sub(last, first)
        with e.ir.if_then(e.ir.icmp_signed("<=", num_rows, I64(0))):
            e.ir.ret_void()
        is_one = e.ir.icmp_signed("==", num_rows, I64(1))
        lanes = e.least(of.n, SIDE)
        self._configure(e, lanes, is_one)
        packed = e.array(I8, self.num_row_matrices * self.piece // STEP * MATRIX_BYTES)
        unpacked = e.array(self.storage, 2 * SIDE * self.piece) if self.packed else NULL
        kept = e.array(I8, self.num_blocks * 2 * self.num_row_matrices * MATRIX_BYTES)
        matrices = e.ceil_div(num_rows, SIDE)
        multiply, finish = self._add_multiply(), self._add_finish()
        with e.range(0, of.k, self.piece) as start:
            stop = e.least(e.sum(start, self.piece), of.k)
            steps = e.ir.udiv(e.ir.sub(stop, start), I64(STEP))
            x = e.at(of.x, self.storage, e.product(first, of.k), start)
            with e.ir.if_then(e.ir.not_(is_one)):
                self._pack(e, x, of.k, num_rows, steps, packed)
            x = e.ir.select(is_one, x, packed)
            with e.range(*columns, self.width) as begin:
                places = [self._place(e, of, begin, part, lanes) for part in (0, 1)]
                w = [e.at(of.w, self.storage, e.product(place, of.k), start) for place in places]
                stride = e.product(of.k, self.weights.dtype.itemsize)
                ahead = self._ahead(e, of, begin, columns, places, start)
                if self.packed:
                    w = self._unpack(e, of, places, lanes, Range(start, stop), unpacked)
                    stride = e.product(e.ir.sub(stop, start), self.weights.dtype.itemsize)
                block = e.ir.sdiv(e.ir.sub(begin, column), I64(self.width))
                block = e.ir.select(e.ir.icmp_signed("<", of.k, I64(self.piece + 1)), I64(0), block)
                sums = e.at(kept, I8, e.product(block, 2 * self.num_row_matrices * MATRIX_BYTES))
                is_first = e.ir.icmp_signed("==", start, I64(0))
                e.ir.call(multiply, [x, *w, stride, sums, matrices, steps, is_one, is_first, *ahead])
                with e.ir.if_then(e.ir.icmp_signed("==", stop, of.k)):
                    y = e.at(of.y, self.out_format.storage, e.product(first, of.n))
                    plus = self._offset(e, of.plus, e.product(first, of.n))
                    scales = [of.parts[0]] if self.packed and self.packed.scales_sums else []
                    e.ir.call(finish, [sums, num_rows, *places, lanes, of.n, y, plus, of.bias, is_one, *scales])
        e.call_named("llvm.x86.tilerelease", result=VOID)
        e.ir.ret_void()
        return e.function

    def _place(self, e: Emitter, of: Operands, begin: Any, part: int, lanes: Any) -> Any:
        """Return the first row of w of a matrix. What would reach beyond the end begins earlier instead."""
        most = e.ir.sub(of.n, lanes)
        if self.is_gated:
            return e.sum(e.least(begin, most), e.product(of.n, part))
        return e.least(e.sum(begin, part * SIDE), most)

    def _offset(self, e: Emitter, base: Any, *index: Any) -> Any:
        """Return the address of what is added, NULL if there is nothing to add."""
        return e.ir.select(
            e.ir.icmp_unsigned("==", base, NULL), NULL, e.at(base, self.out_format.storage, *index)
        )

    def _configure(self, e: Emitter, lanes: Any, is_one: Any) -> None:
        """Tell the processor what registers hold. A single row of x is a matrix as it lies, of one column."""
        config = e.array(I8, CONFIG_BYTES)
        e.clear(config, CONFIG_BYTES)
        e.store(I8(1), config, 0)
        width = e.ir.select(is_one, I16(4), I16(CACHE_LINE))
        height = e.ir.trunc(lanes, I8)
        for register in (*SUMS, *WEIGHTS, *ROWS):
            of_weights = register in WEIGHTS
            e.ir.store(I16(CACHE_LINE) if of_weights else width, e.at(config, I8, WIDTHS_AT + 2 * register))
            e.store(I8(SIDE) if register in ROWS else height, config, HEIGHTS_AT + register)
        e.call_named("llvm.x86.ldtilecfg", config, result=VOID)

    def _pack(self, e: Emitter, x: Any, k: Any, num_rows: Any, steps: Any, packed: Any) -> None:
        """Lay out rows of x as the instruction takes them: pairs of 16 rows side by side, the next pairs below them.

        The last row stands in for those that a matrix lacks.
        """
        last = e.ir.sub(num_rows, I64(1))
        with e.range(0, e.ceil_div(num_rows, SIDE)) as matrix:
            starts = [e.product(e.least(e.sum(e.product(matrix, SIDE), row), last), k) for row in range(SIDE)]
            base = e.at(packed, I8, e.product(matrix, steps, MATRIX_BYTES))
            with e.range(0, steps) as step:
                number = e.product(step, STEP)
                rows = [e.load_vector(e.at(x, self.storage, start, number), I32, 0) for start in starts]
                for place, pairs in enumerate(transpose(e, rows)):
                    e.store_vector(pairs, e.at(base, I8, e.product(step, MATRIX_BYTES)), place * LANES)

    def _unpack(
        self, e: Emitter, of: Operands, places: Sequence[Any], lanes: Any, numbers: Range, target: Any
    ) -> list[Any]:
        """Write a piece of the rows of two matrices, and return where each is."""
        assert self.packed is not None
        found = []
        for part, place in enumerate(places):
            base = e.at(target, self.storage, part * SIDE * self.piece)
            self.packed.write(e, of.w, of.parts, Range(place, e.sum(place, lanes)), of.k, base, numbers)
            found.append(base)
        return found

    def _ahead(
        self, e: Emitter, of: Operands, begin: Any, columns: Range, places: Sequence[Any], start: Any
    ) -> list[Any]:
        """Return where the rows of the next two matrices begin, and how many bytes each is behind another."""
        bits = self.weights.bits
        following = e.sum(begin, self.width)
        has_next = e.ir.icmp_signed("<", following, columns.stop)
        found = []
        for part, place in enumerate(places):
            after = e.sum(following, e.product(of.n, part) if self.is_gated else part * SIDE)
            row = e.ir.select(has_next, after, place)
            number = e.ir.lshr(e.product(e.sum(e.product(row, of.k), start), bits), I64(3))
            found.append(e.at(of.w, I8, number))
        return [*found, e.ir.lshr(e.product(of.k, bits), I64(3))]

    def _add_multiply(self) -> ir.Function:
        """Multiply two matrices' rows of w by all rows of x of a unit, and leave the sums in memory."""
        e, (x, early, late, stride, sums, matrices, steps, is_one, is_first, *ahead) = add_function(
            self.module, "multiply", VOID, *[POINTER] * 3, I64, POINTER, *[I64] * 2, *[I1] * 2, *[POINTER] * 2, I64
        )
        x_stride = e.ir.select(is_one, I64(4), I64(CACHE_LINE))
        x_bytes = e.ir.select(is_one, I64(CACHE_LINE), I64(MATRIX_BYTES))

        def multiply(matrix: Any, count: int) -> None:
            places = [e.at(sums, I8, e.product(e.sum(e.product(matrix, 2), i), MATRIX_BYTES)) for i in range(2 * count)]
            with e.ir.if_else(is_first) as (at_first, later):
                with at_first:
                    for register in range(2 * count):
                        self._tile(e, "tilezero", register)
                with later:
                    for register, place in enumerate(places):
                        self._tile(e, "tileloadd64", register, place, x_stride)
            with e.range(0, steps) as step:
                for number in range(count):
                    base = e.at(x, I8, e.product(e.sum(e.product(e.sum(matrix, number), steps), step), x_bytes))
                    self._tile(e, "tileloadd64", ROWS[number], base, x_stride)
                for part, base in enumerate((early, late)):
                    self._tile(e, "tileloadd64", WEIGHTS[part], e.at(base, I8, e.product(step, CACHE_LINE)), stride)
                    for number in range(count):
                        self._tile(e, "tdpbf16ps", 2 * number + part, I8(WEIGHTS[part]), I8(ROWS[number]))
                self._fetch(e, ahead, e.sum(e.product(matrix, steps), e.product(step, count)), matrices)
            for register, place in enumerate(places):
                self._tile(e, "tilestored64", register, place, x_stride)

        with e.range(0, matrices, 2) as matrix:
            has_two = e.ir.icmp_signed("<", e.sum(matrix, 1), matrices)
            with e.ir.if_else(has_two) as (by_two, by_one):
                with by_two:
                    multiply(matrix, 2)
                with by_one:
                    multiply(matrix, 1)
        e.ir.ret_void()
        return e.function

    def _fetch(self, e: Emitter, ahead: Sequence[Any], done: Any, matrices: Any) -> None:
        """Begin to read what comes next, as far into it as what is done is into all steps of all matrices of x."""
        *bases, distance = ahead
        bytes_each = STEP * self.weights.bits // 8
        offset = e.ir.udiv(e.product(done, bytes_each), matrices)
        for base in bases:
            for row in range(SIDE):
                e.prefetch(base, I8, offset, e.product(distance, row), cache=2)

    def _add_finish(self) -> ir.Function:
        """Store what comes of two matrices' sums."""
        scales = [POINTER] if self.packed and self.packed.scales_sums else []
        e, (sums, num_rows, early, late, lanes, n, y, plus, bias, is_one, *parts) = add_function(
            self.module, "finish", VOID, POINTER, *[I64] * 5, *[POINTER] * 3, I1, *scales
        )
        places = early, late
        mask = e.ir.icmp_unsigned("<", ir.Constant(vector(I32), [*range(LANES)]), e.splat(e.ir.trunc(lanes, I32)))
        rows = [e.array(F32, SIDE * SIDE) for _ in places]
        factors = [self._load_scales(e, parts[0], place, lanes) for place in places] if parts else [None, None]
        biases = [self._load_added(e, bias, place, mask) for place in places]
        with e.range(0, num_rows, SIDE) as first:
            for part, target in enumerate(rows):
                place = e.at(sums, I8, e.product(e.sum(e.ir.sdiv(first, I64(SIDE // 2)), part), MATRIX_BYTES))
                with e.ir.if_else(is_one) as (by_one, by_all):
                    with by_one:
                        e.store_vector(e.load_vector(place, F32, 0), target, 0)
                    with by_all:
                        columns = [e.load_vector(place, F32, column * LANES) for column in range(SIDE)]
                        for row, found in enumerate(transpose(e, columns)):
                            e.store_vector(found, target, row * LANES)
            with e.range(0, e.least(e.ir.sub(num_rows, first), SIDE)) as row:
                found = [e.load_vector(target, F32, e.product(row, LANES)) for target in rows]
                found = [x if f is None else e.ir.fmul(x, f) for x, f in zip(found, factors, strict=True)]
                index = e.product(e.sum(first, row), n)
                if self.is_gated:
                    assert self.activate is not None
                    gated = e.ir.fmul(self.activate(e, found[0]), found[1])
                    self._store(e, gated, y, e.sum(index, early), mask)
                else:
                    for x, place, added in zip(found, places, biases, strict=True):
                        total = e.ir.fadd(self._load_added(e, plus, e.sum(index, place), mask), x)
                        total = e.ir.fadd(added, total)
                        total = self.activate(e, total) if self.activate else total
                        self._store(e, total, y, e.sum(index, place), mask)
        e.ir.ret_void()
        return e.function

    def _load_scales(self, e: Emitter, scales: Any, place: Any, lanes: Any) -> Any:
        """Return the scales of 16 rows of w, or of fewer."""
        assert self.packed is not None
        held = e.array(F32, LANES)
        e.clear(held, 4 * LANES)
        with e.range(0, lanes) as lane:
            one = self.packed.load_part(e, "scales", scales, e.sum(place, lane), 1)
            e.store_vector(one, held, lane)
        return e.load_vector(held, F32, 0)

    def _load_added(self, e: Emitter, base: Any, place: Any, mask: Any) -> Any:
        """Return 16 numbers of what is added, or fewer, and zeros if there is nothing to add."""
        kind = vector(self.out_format.storage)
        is_there = e.ir.icmp_unsigned("!=", base, NULL)
        some = e.ir.and_(mask, e.splat(is_there))
        name = f"llvm.masked.load.v{LANES}{_suffix(self.out_format.storage)}.p0"
        address, nothing = e.at(base, self.out_format.storage, place), ir.Constant(kind, None)
        return self.out_format.widen(e, e.call_named(name, address, I32(1), some, nothing, result=kind))

    def _store(self, e: Emitter, numbers: Any, base: Any, place: Any, mask: Any) -> None:
        assert self.out_format.narrow is not None
        name = f"llvm.masked.store.v{LANES}{_suffix(self.out_format.storage)}.p0"
        address = e.at(base, self.out_format.storage, place)
        e.call_named(name, self.out_format.narrow(e, numbers), address, I32(1), mask, result=VOID)

    def _tile(self, e: Emitter, name: str, register: int, *arguments: Any) -> None:
        e.call_named(f"llvm.x86.{name}", I8(register), *arguments, result=VOID)


def transpose(e: Emitter, rows: Sequence[Any]) -> list[Any]:
    """Return the columns of 16 vectors of 16."""
    rows = list(rows)
    size = SIDE // 2
    while size:
        low = [lane if lane & size == 0 else LANES + lane - size for lane in range(LANES)]
        high = [lane + size for lane in low]
        for first in range(SIDE):
            if first & size == 0:
                a, b = rows[first], rows[first + size]
                rows[first], rows[first + size] = e.shuffle(a, b, low), e.shuffle(a, b, high)
        size //= 2
    return rows


def _suffix(element: ir.Type) -> str:
    return "f32" if element == F32 else str(element)
