"""A unit of work on a processor with AMX, which has an instruction that multiplies matrices of bfloat16.

One matrix is 16 rows of w times 32 numbers, loaded in place, or from where packed ones are unpacked to. The other is 16
rows of x with transposed pairs of numbers, and a unit's rows are laid out like that first. Sums of 16 columns by 16
rows stay in one register, and are transposed when they are complete. Any number of rows is multiplied in this one way,
so that a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.native import amx, pairs
from pallas_kernels.native.amx import MATRIX_BYTES, SIDE, STEP
from pallas_kernels.native.emitter import (
    CACHE_LINE,
    F32,
    I1,
    I8,
    I16,
    I32,
    I64,
    LANES,
    NULL,
    POINTER,
    VOID,
    Emitter,
    add_function,
    vector,
)
from pallas_kernels.native.number_formats import FORMATS
from pallas_kernels.weights.format import CHUNK

from .operands import Operands, Range
from .unpack import Plain, Row, Unpacker

PIECE = 2048
"""About how many numbers of longer rows are taken at a time, for all rows of a unit."""
_SUMS, _WEIGHTS, _ROWS = (0, 1, 2, 3), (4, 5), (6, 7)
"""The registers' contents: two matrices of w by two of x give four matrices of sums."""


class Rows(NamedTuple):
    """A unit's rows of x, laid out for the instruction."""

    x: Any
    """The address of their first matrix."""
    matrices: Any
    """The number of their matrices."""
    is_one: Any
    """True if there is one row alone: it is a matrix of one column without a new layout."""


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
        self.dtype = weights.dtype
        self.out_format, self.storage = FORMATS[jnp.dtype(out_dtype)], FORMATS[jnp.dtype(jnp.bfloat16)].storage
        self.packed = weights if isinstance(weights, Unpacker) else None
        self.num_row_matrices = unit_rows // SIDE
        self.width = SIDE if is_gated else 2 * SIDE
        """The number of columns of y that two matrices of w give: half of them if the others are gates."""
        self.num_blocks = -(-max_columns // self.width)
        whole = max(self.packed.whole, CHUNK) if self.packed else 1
        self.piece = -(-PIECE // whole) * whole
        """The numbers of a row that are taken at a time: whole groups, if weights have any."""

    def add_unit(self) -> ir.Function:
        """Define the function of a range of rows, a range of columns, and the operands."""
        multiply, finish = self._add_multiply(), self._add_finish()
        multiply_one = self._add_multiply_one() if self.packed else None
        e, (first, last, column, end, x, w, plus, bias, y, t, n, k, *parts) = add_function(
            self.module, "unit", VOID, *[I64] * 4, *[POINTER] * 5, *[I64] * 3, *[POINTER] * len(self.weights.parts)
        )
        of = Operands(x, w, plus, bias, y, t, n, k, parts)
        columns, num_rows = Range(column, end), e.ir.sub(last, first)
        with e.ir.if_then(e.ir.icmp_signed("<=", num_rows, I64(0))):
            e.ir.ret_void()
        is_one, lanes = e.ir.icmp_signed("==", num_rows, I64(1)), e.least(of.n, SIDE)
        self._configure(e, lanes, is_one)
        size = self.num_row_matrices * MATRIX_BYTES
        laid_out, kept = e.array(I8, size * self.piece // STEP), e.array(I8, 2 * size * self.num_blocks)
        unpacked = e.array(self.storage, 2 * SIDE * self.piece) if self.packed else NULL
        with e.range(0, of.k, self.piece) as start:
            piece = Range(start, e.least(e.sum(start, self.piece), of.k))
            x = e.at(of.x, self.storage, e.product(first, of.k), start)
            with e.ir.if_then(e.ir.not_(is_one)):
                self._lay_out(e, x, of.k, num_rows, self._steps(e, piece), laid_out)
            rows = Rows(e.ir.select(is_one, x, laid_out), e.ceil_div(num_rows, SIDE), is_one)
            with e.range(*columns, self.width) as begin:
                places = [self._place(e, of, begin, part, lanes) for part in (0, 1)]
                # The sums of long rows are kept from piece to piece.
                block = e.ir.sdiv(e.ir.sub(begin, column), I64(self.width))
                block = e.ir.select(e.ir.icmp_signed("<=", of.k, I64(self.piece)), I64(0), block)
                sums = e.at(kept, I8, e.product(block, 2 * size))
                if multiply_one:
                    self._multiply_packed(e, (multiply_one, multiply), of, rows, places, lanes, piece, sums, unpacked)
                else:
                    has_next = e.ir.icmp_signed("<", e.sum(begin, self.width), columns.stop)
                    self._multiply_plain(e, multiply, of, rows, places, piece, sums, has_next)
                with e.ir.if_then(e.ir.icmp_signed("==", piece.stop, of.k)):
                    y = e.at(of.y, self.out_format.storage, e.product(first, of.n))
                    plus_row = e.product(of.n, 2) if self.is_gated else of.n
                    plus = e.at(of.plus, self.out_format.storage, e.product(first, plus_row))
                    plus = e.ir.select(e.ir.icmp_unsigned("==", of.plus, NULL), NULL, plus)
                    scales = [of.parts[0]] if self._has_scales else []
                    e.ir.call(finish, [sums, num_rows, *places, lanes, of.n, y, plus, of.bias, is_one, *scales])
        amx.release(e)
        e.ir.ret_void()
        return e.function

    @property
    def _has_scales(self) -> bool:
        """Return whether sums are multiplied by a scale for each row of w."""
        return self.packed is not None and self.packed.scales_sums

    def _steps(self, e: Emitter, numbers: Range) -> Any:
        return e.ir.udiv(e.ir.sub(numbers.stop, numbers.start), I64(STEP))

    def _multiply_plain(
        self,
        e: Emitter,
        multiply: ir.Function,
        of: Operands,
        rows: Rows,
        places: Sequence[Any],
        piece: Range,
        sums: Any,
        has_next: Any,
    ) -> None:
        """Multiply two matrices' rows of w in place, while the next ones are fetched."""
        # With few rows, reading w takes the time: the memory behind the unit may be the next unit's.
        fetches = e.ir.or_(has_next, e.ir.icmp_signed("<=", rows.matrices, I64(2)))
        further = e.ir.select(fetches, I64(self.width), I64(0))
        w, following = (
            [e.at(of.w, self.storage, e.product(e.sum(place, offset), of.k), piece.start) for place in places]
            for offset in (0, further)
        )
        stride = e.product(of.k, self.dtype.itemsize)
        is_first = e.ir.icmp_signed("==", piece.start, I64(0))
        e.ir.call(multiply, [*rows, *w, stride, self._steps(e, piece), *following, stride, sums, is_first])

    def _multiply_packed(
        self,
        e: Emitter,
        functions: tuple[ir.Function, ir.Function],
        of: Operands,
        rows: Rows,
        places: Sequence[Any],
        lanes: Any,
        piece: Range,
        sums: Any,
        unpacked: Any,
    ) -> None:
        """Multiply two matrices' rows of packed w: one matrix of x while they are unpacked, more after that."""
        assert self.packed is not None
        multiply_one, multiply = functions
        ahead = e.product(self.packed.width(e, of.k), self.width)
        is_first = e.ir.icmp_signed("==", piece.start, I64(0))
        with e.ir.if_else(e.ir.icmp_signed("==", rows.matrices, I64(1))) as (by_one, by_many):
            with by_one:
                for part, first_row in enumerate(places):
                    target = e.at(sums, I8, part * MATRIX_BYTES)
                    arguments = [rows.x, rows.is_one, of.w, first_row, lanes, of.k, *piece, ahead, target, is_first]
                    e.ir.call(multiply_one, [*arguments, *of.parts])
            with by_many:
                w = [e.at(unpacked, self.storage, part * SIDE * self.piece) for part in (0, 1)]
                for first_row, target in zip(places, w, strict=True):
                    some = Range(first_row, e.sum(first_row, lanes))
                    self.packed.write(e, of.w, of.parts, some, of.k, target, piece, ahead)
                stride = e.product(e.ir.sub(piece.stop, piece.start), self.dtype.itemsize)
                e.ir.call(multiply, [*rows, *w, stride, self._steps(e, piece), *w, I64(0), sums, is_first])

    def _place(self, e: Emitter, of: Operands, begin: Any, part: int, lanes: Any) -> Any:
        """Return the first row of w of a matrix. A matrix that would reach beyond the end begins earlier instead."""
        most = e.ir.sub(of.n, lanes)
        if self.is_gated:
            return e.sum(e.least(begin, most), e.product(of.n, part))
        return e.least(e.sum(begin, part * SIDE), most)

    def _configure(self, e: Emitter, lanes: Any, is_one: Any) -> None:
        """Configure the registers."""
        width, height = e.ir.select(is_one, I16(4), I16(CACHE_LINE)), e.ir.trunc(lanes, I8)
        of_sums, of_weights, of_rows = (height, width), (height, CACHE_LINE), (SIDE, width)
        amx.configure(e, [of_sums] * len(_SUMS) + [of_weights] * len(_WEIGHTS) + [of_rows] * len(_ROWS))

    def _lay_out(self, e: Emitter, x: Any, k: Any, num_rows: Any, steps: Any, target: Any) -> None:
        """Write rows of x as the instruction takes them: pairs of 16 rows side by side, the next pairs below them.

        A matrix with too few rows repeats the last one.
        """
        last = e.ir.sub(num_rows, I64(1))
        with e.range(0, e.ceil_div(num_rows, SIDE)) as matrix:
            starts = [e.product(e.least(e.sum(e.product(matrix, SIDE), row), last), k) for row in range(SIDE)]
            base = e.at(target, I8, e.product(matrix, steps, MATRIX_BYTES))
            with e.range(0, steps) as step:
                number = e.product(step, STEP)
                rows = [e.load_vector(e.at(x, self.storage, start, number), I32, 0) for start in starts]
                for index, pairs in enumerate(e.transpose(rows)):
                    e.store_vector(pairs, e.at(base, I8, e.product(step, MATRIX_BYTES)), index * LANES)

    def _add_multiply(self) -> ir.Function:
        """Multiply two matrices' rows of w by all rows of x of a unit, and leave the sums in memory."""
        e, (x, matrices, is_one, early, late, stride, steps, *following, distance, sums, is_first) = add_function(
            self.module,
            "multiply",
            VOID,
            *[POINTER, I64, I1],
            *[*[POINTER] * 2, I64, I64],
            *[*[POINTER] * 2, I64],
            *[POINTER, I1],
        )
        x_stride, x_bytes = self._x_sizes(e, is_one)

        def multiply(matrix: Any, count: int) -> None:
            places = [e.at(sums, I8, e.product(e.sum(e.product(matrix, 2), i), MATRIX_BYTES)) for i in range(2 * count)]
            self._begin(e, places, x_stride, is_first)
            with e.range(0, steps) as step:
                for number in range(count):
                    base = e.at(x, I8, e.product(e.sum(e.product(e.sum(matrix, number), steps), step), x_bytes))
                    amx.load(e, _ROWS[number], base, x_stride)
                for part, base in enumerate((early, late)):
                    amx.load(e, _WEIGHTS[part], e.at(base, I8, e.product(step, CACHE_LINE)), stride)
                    for number in range(count):
                        amx.multiply(e, 2 * number + part, _WEIGHTS[part], _ROWS[number])
                if not self.packed:
                    done = e.sum(e.product(matrix, steps), e.product(step, count))
                    self._fetch(e, following, distance, e.ir.udiv(e.product(done, CACHE_LINE), matrices))
            for register, address in enumerate(places):
                amx.store(e, register, address, x_stride)

        with e.range(0, matrices, 2) as matrix:
            has_two = e.ir.icmp_signed("<", e.sum(matrix, 1), matrices)
            with e.ir.if_else(has_two) as (by_two, by_one):
                with by_two:
                    multiply(matrix, 2)
                with by_one:
                    multiply(matrix, 1)
        e.ir.ret_void()
        return e.function

    def _add_multiply_one(self) -> ir.Function:
        """Multiply one matrix's rows of packed w by one of x.

        While some numbers are unpacked, the ones before are multiplied.
        """
        assert self.packed is not None
        packed, group, step = self.packed, self.packed.form.group, self.packed.step
        e, (x, is_one, w, first_row, lanes, k, start, stop, ahead, sums, is_first, *parts) = add_function(
            self.module,
            "multiply_one",
            VOID,
            *[POINTER, I1, POINTER, *[I64] * 6, POINTER, I1],
            *[POINTER] * len(packed.parts),
        )
        x_stride, x_bytes = self._x_sizes(e, is_one)
        groups = self.piece // group if group else 0
        scales = e.array(F32, SIDE * groups) if groups else None
        mins = e.array(F32, SIDE * groups) if groups and packed.has_mins else None

        def row(lane: Any, before: Any = 0) -> Row:
            index = e.sum(e.product(lane, groups), before)
            bases = (None if base is None else e.at(base, F32, index) for base in (scales, mins))
            return Row(packed.at(e, w, e.sum(first_row, lane), k), *bases)

        if groups:
            with e.range(0, lanes) as lane:
                packed.prepare(e, row(lane), parts, e.sum(first_row, lane), k, (start, stop))
        before = e.product(e.ir.udiv(start, I64(group)), -1) if groups else 0
        buffers = e.array(self.storage, 2 * SIDE * step)
        self._begin(e, [sums], x_stride, is_first)

        def multiply(turn: Any) -> None:
            buffer = e.at(buffers, self.storage, e.product(e.ir.and_(turn, I64(1)), SIDE * step))
            for part in range(step // STEP):
                base = e.at(x, I8, e.product(e.sum(e.product(turn, step // STEP), part), x_bytes))
                amx.load(e, _ROWS[0], base, x_stride)
                some = e.at(buffer, self.storage, part * STEP)
                amx.load(e, _WEIGHTS[0], some, I64(step * self.dtype.itemsize))
                amx.multiply(e, _SUMS[0], _WEIGHTS[0], _ROWS[0])

        first = e.ir.udiv(start, I64(step))
        turns = e.ir.sub(e.ir.udiv(stop, I64(step)), first)
        with e.range(0, turns) as turn:
            buffer = e.at(buffers, self.storage, e.product(e.ir.and_(turn, I64(1)), SIDE * step))
            with e.range(0, lanes) as lane:
                held = row(lane, before)
                packed.fetch(e, held, e.sum(first, turn), ahead)
                for number, values in enumerate(packed.load(e, held, e.sum(first, turn))):
                    e.store_vector(values, e.at(buffer, self.storage, e.product(lane, step)), number * LANES)
            with e.ir.if_then(e.ir.icmp_signed(">", turn, I64(0))):
                multiply(e.ir.sub(turn, I64(1)))
        multiply(e.ir.sub(turns, I64(1)))
        amx.store(e, _SUMS[0], sums, x_stride)
        e.ir.ret_void()
        return e.function

    def _x_sizes(self, e: Emitter, is_one: Any) -> tuple[Any, Any]:
        """Return the distance in bytes from one row of pairs of x to the next, and from one matrix to the next."""
        stride = e.ir.select(is_one, I64(4), I64(CACHE_LINE))
        return stride, e.ir.select(is_one, I64(CACHE_LINE), I64(MATRIX_BYTES))

    def _begin(self, e: Emitter, places: Sequence[Any], stride: Any, is_first: Any) -> None:
        """Set registers to zeros, or to the sums so far."""
        with e.ir.if_else(is_first) as (at_first, later):
            with at_first:
                for register in range(len(places)):
                    amx.clear(e, register)
            with later:
                for register, address in enumerate(places):
                    amx.load(e, register, address, stride)

    def _fetch(self, e: Emitter, bases: Sequence[Any], distance: Any, offset: Any) -> None:
        """Begin to read a line of each row of the next two matrices."""
        for base in bases:
            for row in range(SIDE):
                e.prefetch(base, I8, offset, e.product(distance, row), cache=2)

    def _add_finish(self) -> ir.Function:
        """Store the results of two matrices' sums."""
        scales = [POINTER] if self._has_scales else []
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
                address = e.at(sums, I8, e.product(e.sum(e.ir.sdiv(first, I64(SIDE // 2)), part), MATRIX_BYTES))
                with e.ir.if_else(is_one) as (by_one, by_all):
                    with by_one:
                        e.store_vector(e.load_vector(address, F32, 0), target, 0)
                    with by_all:
                        columns = [e.load_vector(address, F32, column * LANES) for column in range(SIDE)]
                        for row, results in enumerate(e.transpose(columns)):
                            e.store_vector(results, target, row * LANES)
            with e.range(0, e.least(e.ir.sub(num_rows, first), SIDE)) as row:
                results = [e.load_vector(target, F32, e.product(row, LANES)) for target in rows]
                results = [x if f is None else e.ir.fmul(x, f) for x, f in zip(results, factors, strict=True)]
                index = e.product(e.sum(first, row), n)
                if self.is_gated:
                    assert self.activate is not None
                    # The addend lies as w's rows do: both halves of a row, one behind the other.
                    row_of_plus = e.product(index, 2)
                    results = [
                        e.ir.fadd(self._load_added(e, plus, e.sum(row_of_plus, place), mask), x)
                        for x, place in zip(results, places, strict=True)
                    ]
                    gated = e.ir.fmul(self.activate(e, results[0]), results[1])
                    self._store(e, gated, y, e.sum(index, early), mask)
                else:
                    for x, row_of_w, added in zip(results, places, biases, strict=True):
                        total = e.ir.fadd(self._load_added(e, plus, e.sum(index, row_of_w), mask), x)
                        total = e.ir.fadd(added, total)
                        total = self.activate(e, total) if self.activate else total
                        self._store(e, total, y, e.sum(index, row_of_w), mask)
        e.ir.ret_void()
        return e.function

    def _load_scales(self, e: Emitter, scales: Any, row: Any, lanes: Any) -> Any:
        """Return the scales of 16 rows of w, or of fewer."""
        assert self.packed is not None
        held = e.array(F32, LANES)
        e.clear(held, 4 * LANES)
        with e.range(0, lanes) as lane:
            one = self.packed.load_part(e, "scales", scales, e.sum(row, lane), 1)
            e.store_vector(one, held, lane)
        return e.load_vector(held, F32, 0)

    def _load_added(self, e: Emitter, base: Any, index: Any, mask: Any) -> Any:
        """Return 16 numbers of the addend, or fewer, and zeros if there is none."""
        kind = vector(self.out_format.storage)
        is_there = e.ir.icmp_unsigned("!=", base, NULL)
        some = e.ir.and_(mask, e.splat(is_there))
        name = f"llvm.masked.load.v{LANES}{_suffix(self.out_format.storage)}.p0"
        # A masked load of nothing is slow where there is no memory.
        address = e.ir.select(is_there, e.at(base, self.out_format.storage, index), e.array(I8, CACHE_LINE))
        nothing = ir.Constant(kind, None)
        return self.out_format.widen(e, e.call_named(name, address, I32(1), some, nothing, result=kind))

    def _store(self, e: Emitter, numbers: Any, base: Any, index: Any, mask: Any) -> None:
        name = f"llvm.masked.store.v{LANES}{_suffix(self.out_format.storage)}.p0"
        address = e.at(base, self.out_format.storage, index)
        e.call_named(
            name,
            pairs.narrow_half(e, numbers) if self.out_format.num_bytes == 2 else numbers,
            address,
            I32(1),
            mask,
            result=VOID,
        )


def _suffix(element: ir.Type) -> str:
    return "f32" if element == F32 else str(element)
