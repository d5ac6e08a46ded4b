"""The kernel in LLVM IR: y [t, n] = y + B A x for the rows that have an adapter, each with its own slot's A and B.

A unit of work is a stretch of the rows sorted by slot, with all of their columns, or a share of the columns where rows
are few and B is large. Up to `_ROWS` rows of one slot are taken at once: first A x of all parts, as a matmul takes it;
then B times that, one vector of outputs after the other. Only a part's own outputs of B are read. The order of all sums
is the same for any number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.linear.cpu.tiles import add_up
from pallas_kernels.linear.cpu.unpack import Plain
from pallas_kernels.native import pairs, processor
from pallas_kernels.native.compiling import num_cores, num_registers
from pallas_kernels.native.emitter import (
    F32,
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
from pallas_kernels.native.handler import add_handler
from pallas_kernels.native.number_formats import FORMATS, Format

from .kind import COLUMNS, MAX_COLUMNS, STEP_BYTES, Kind

_ROWS = 4
"""The number of rows of one slot that are multiplied at a time."""
_UNIT_ROWS = 8
"""The most rows of a unit of work: twice `_ROWS`, as the second time a core has A and B in its own cache."""
CHUNK_BYTES = 256 << 10
"""The fewest bytes of B that are worth a unit of their own, which has to compute A x again."""


class Call(NamedTuple):
    """The addresses of a call's arrays, with A and B of the call's layer, and its sizes."""

    x: Any
    down: Any
    up: Any
    slots: Any
    order: Any
    num_adapted: Any
    stops: Any
    y: Any
    t: Any
    n: Any
    k: Any
    num_columns: Any
    """The number of rows of A that a slot has."""
    num_parts: Any


class _Share(NamedTuple):
    """The share of the columns of each part that a unit has: its index, and the number of shares."""

    index: Any
    count: Any


class Kernel:
    """Writes the functions of one kernel."""

    def __init__(self, kind: Kind) -> None:
        self.dtype, self.adds = jnp.dtype(kind.dtype), kind.adds
        self.format, self.out_format = FORMATS[self.dtype], FORMATS[jnp.dtype(kind.out_dtype)]
        self.plain, self.step = Plain(self.dtype), STEP_BYTES // self.dtype.itemsize
        present = processor.current()
        has_many_registers = num_registers() == 32
        self.together = COLUMNS if has_many_registers else 1
        """The number of rows of A that are multiplied at a time, where not all sums fit in registers."""
        self.by_pairs = self.dtype == jnp.bfloat16 and present.has_bfloat16_dot
        """True if two of B's rows are multiplied by one instruction."""
        self.vectors = 2 if has_many_registers else 1
        """The number of vectors of outputs that are summed up at a time."""
        self.narrows_at_once = present.is_x86 and present.has_bfloat16_dot and self.out_format.num_bytes == 2
        self.module = ir.Module()

    @property
    def width(self) -> int:
        """Return the number of outputs that are summed up at a time."""
        return self.vectors * LANES

    def build(self, name: str) -> ir.Module:
        """Return the module, with a function of this name that XLA calls."""
        few, one = self._add_tile(_ROWS), self._add_tile(1)
        add_handler(self.module, name, self._add_prepare(), self._add_run(few, one))
        return self.module

    def _call(self, e: Emitter, buffers: Any, dims: Any) -> Call:
        x, down, up, layer, slots, order, num_adapted, stops, *_ = (e.load(buffers, POINTER, i) for i in range(8))
        y = e.load(buffers, POINTER, 9 if self.adds else 8)

        def size(buffer: int, axis: int) -> Any:
            return e.load(e.load(dims, POINTER, buffer), I64, axis)

        num_columns, n, k = size(1, 2), size(2, 3), size(1, 3)
        first = e.product(e.load_int(layer, 0), size(1, 1), num_columns)
        down, up = (e.at(base, self.format.storage, e.product(first, each)) for base, each in ((down, k), (up, n)))
        count = e.load_int(num_adapted, 0)
        return Call(x, down, up, slots, order, count, stops, y, size(0, 0), n, k, num_columns, size(7, 0))

    def _sizes(self, e: Emitter, of: Call) -> tuple[Any, Any, Any]:
        """Return the number of rows of a unit, of stretches of rows, and of shares of columns."""
        num_rows = of.num_adapted if self.adds else of.t
        unit_rows = e.most(e.least(e.ceil_div(num_rows, num_cores()), _UNIT_ROWS), 1)
        stretches = e.ceil_div(num_rows, unit_rows)
        wanted = e.ceil_div(num_cores(), e.most(stretches, 1))
        rank = e.ir.udiv(of.num_columns, of.num_parts)
        worth = e.ir.udiv(e.product(of.n, rank, self.format.num_bytes), I64(CHUNK_BYTES))
        return unit_rows, stretches, e.most(e.least(wanted, worth), 1)

    def _add_prepare(self) -> ir.Function:
        e, (buffers, dims) = add_function(self.module, "prepare", I64, POINTER, POINTER)
        _, stretches, shares = self._sizes(e, self._call(e, buffers, dims))
        e.ir.ret(e.product(stretches, shares))
        return e.function

    def _add_run(self, few: ir.Function, one: ir.Function) -> ir.Function:
        """Do one unit: the rows of each slot, a few at a time."""
        e, (buffers, dims, unit) = add_function(self.module, "run", VOID, POINTER, POINTER, I64)
        of = self._call(e, buffers, dims)
        unit_rows, _, shares = self._sizes(e, of)
        share = _Share(e.ir.srem(unit, shares), shares)
        first = e.product(e.ir.sdiv(unit, shares), unit_rows)
        end = e.sum(first, unit_rows)
        stop = e.least(end, of.num_adapted)
        following = e.variable(I64, first)
        with e.range(first, stop) as position, e.ir.if_then(e.ir.icmp_signed("==", position, following.value)):
            slot = e.load_int(of.slots, position)
            last = e.variable(I64, position)
            for ahead in range(1, _ROWS):
                other = e.least(e.sum(position, ahead), e.ir.sub(stop, I64(1)))
                is_same = e.ir.icmp_signed("==", e.load_int(of.slots, other), slot)
                last.value = e.ir.select(is_same, other, last.value)
            following.value = e.sum(last.value, 1)
            before = e.product(e.ir.sub(slot, I64(1)), of.num_columns)
            down, up = (
                e.at(base, self.format.storage, e.product(before, each))
                for base, each in ((of.down, of.k), (of.up, of.n))
            )
            is_one = e.ir.icmp_signed("==", position, last.value)
            tile = e.ir.select(is_one, one, few)
            rows = [e.load_int(of.order, e.least(e.sum(position, ahead), last.value)) for ahead in range(_ROWS)]
            e.ir.call(tile, [of.x, down, up, of.stops, of.y, of.n, of.k, of.num_columns, of.num_parts, *share, *rows])
        if not self.adds:
            with e.range(e.most(first, of.num_adapted), e.least(end, of.t)) as position:
                self._clear(e, of, share, e.load_int(of.order, position))
        e.ir.ret_void()
        return e.function

    def _clear(self, e: Emitter, of: Call, share: _Share, row: Any) -> None:
        """Set a row to -0."""
        assert self.out_format.narrow is not None
        y = e.at(of.y, self.out_format.storage, e.product(row, of.n))
        nothing = self.out_format.narrow(e, e.splat(F32(-0.0)))
        with self._parts(e, of.stops, of.num_parts, share) as (_, start, stop):
            whole = e.sum(start, self._whole(e, start, stop))
            with e.range(start, whole, self.width) as column:
                for i in range(self.vectors):
                    e.store_vector(nothing, y, column, i * LANES)
            with e.range(whole, stop) as column:
                e.store(e.ir.extract_element(nothing, I32(0)), y, column)

    @contextmanager
    def _parts(self, e: Emitter, stops: Any, num_parts: Any, share: _Share) -> Iterator[tuple[Any, Any, Any]]:
        """Loop over the parts, with the columns of each that belong to a share, in whole vectors."""
        before = e.variable(I64, I64(0))
        with e.range(0, num_parts) as part:
            stop = e.load_int(stops, part)
            size = e.ceil_div(e.ceil_div(e.ir.sub(stop, before.value), share.count), self.width)
            start = e.sum(before.value, e.product(share.index, size, self.width))
            yield part, e.least(start, stop), e.least(e.sum(start, e.product(size, self.width)), stop)
            before.value = stop

    def _whole(self, e: Emitter, start: Any, stop: Any) -> Any:
        """Return the number of columns of a stretch that are taken in vectors."""
        return e.product(e.ir.sdiv(e.ir.sub(stop, start), I64(self.width)), self.width)

    def _add_tile(self, rows: int) -> ir.Function:
        """Take up to a few rows of one slot. Where there are fewer, the last one is computed again."""
        e, (x, down, up, stops, y, n, k, num_columns, num_parts, index, count, *numbers) = add_function(
            self.module, f"tile_{rows}", VOID, *[POINTER] * 5, *[I64] * (6 + _ROWS)
        )
        of_x = [e.at(x, self.format.storage, e.product(number, k)) for number in numbers[:rows]]
        of_y = [e.at(y, self.out_format.storage, e.product(number, n)) for number in numbers[:rows]]
        held = e.array(self.format.storage, rows * MAX_COLUMNS)
        rank = e.ir.udiv(num_columns, num_parts)
        with e.range(0, num_columns, COLUMNS) as column:
            self._find(e, of_x, down, column, k, held)
        with self._parts(e, stops, num_parts, _Share(index, count)) as (part, start, stop):
            first = e.product(part, rank)
            whole = e.sum(start, self._whole(e, start, stop))
            kept = e.at(held, self.format.storage, first)
            base = e.at(up, self.format.storage, e.product(first, n))
            with e.range(start, whole, self.width) as column:
                self._add_outputs(e, kept, e.at(base, self.format.storage, column), n, rank, column, of_y)
            with e.range(whole, stop) as column:
                self._add_output(e, kept, e.at(base, self.format.storage, column), n, rank, column, of_y)
        e.ir.ret_void()
        return e.function

    def _find(self, e: Emitter, of_x: Sequence[Any], down: Any, column: Any, k: Any, held: Any) -> None:
        """Keep the products of rows of x with a few rows of A, from column `column` on."""
        sums = [[e.variable(vector(F32), e.splat(F32(0.0))) for _ in range(COLUMNS)] for _ in of_x]
        for first in range(0, COLUMNS, self.together):
            some = range(first, first + self.together)
            of_a = [e.at(down, self.format.storage, e.product(e.sum(column, each), k)) for each in some]
            with e.range(0, k, self.step) as i:
                numbers = [self.plain.load_vector(e, base, i, 0, LANES) for base in of_x]
                for index, base in zip(some, of_a, strict=True):
                    row_of_a = self.plain.load_vector(e, base, i, 0, LANES)
                    for row, total in zip(numbers, sums, strict=True):
                        self._add_products(e, total[index], row, row_of_a)
        vectors = [total.value for row in sums for total in row]
        result = add_up(e, vectors + [e.splat(F32(0.0))] * (LANES - len(vectors)))
        assert self.format.narrow is not None
        result = self.format.narrow(e, result)
        for row in range(len(of_x)):
            lanes = range(row * COLUMNS, (row + 1) * COLUMNS)
            e.store_vector(e.shuffle(result, result, lanes), held, column, row * MAX_COLUMNS)

    def _add_products(self, e: Emitter, total: Any, x: Any, w: Any) -> None:
        if x.type.element == F32:
            total.value = e.fma(x, w, total.value)
        else:
            total.value = pairs.add_products(e, total.value, x, w)

    def _add_outputs(
        self, e: Emitter, kept: Any, base: Any, n: Any, rank: Any, column: Any, of_y: Sequence[Any]
    ) -> None:
        """Add to a few vectors of outputs of each row the products of B with the numbers that were kept."""
        sums = [[e.variable(vector(F32), e.splat(F32(0.0))) for _ in range(self.vectors)] for _ in of_y]
        with e.range(0, rank, 2 if self.by_pairs else 1) as i:
            take = self._load_pairs if self.by_pairs else self._load_numbers
            of_b = take(e, e.at(base, self.format.storage, e.product(i, n)), n)
            for row, totals in enumerate(sums):
                number = self._spread(e, kept, e.sum(i, row * MAX_COLUMNS))
                for total, row_of_b in zip(totals, of_b, strict=True):
                    self._add_products(e, total, number, row_of_b)
        results = [[each.value for each in totals] for totals in sums]
        if self.adds:
            results = [
                [e.ir.fadd(self._load_out(e, y, e.sum(column, i * LANES)), each) for i, each in enumerate(totals)]
                for y, totals in zip(of_y, results, strict=True)
            ]
        for y, totals in zip(of_y, results, strict=True):
            self._store_out(e, totals, y, column)

    def _spread(self, e: Emitter, kept: Any, index: Any) -> Any:
        """Return a vector of one kept number, or of a pair."""
        if self.by_pairs:
            return e.splat(e.ir.load(e.at(kept, self.format.storage, index), typ=I32, align=2))
        return e.splat(self.format.widen(e, e.load(kept, self.format.storage, index)))

    def _load_numbers(self, e: Emitter, base: Any, n: Any) -> list[Any]:
        """Return vectors of a row of B, side by side, in float32."""
        del n
        return [self.format.widen(e, e.load_vector(base, self.format.storage, i * LANES)) for i in range(self.vectors)]

    def _load_pairs(self, e: Emitter, base: Any, n: Any) -> list[Any]:
        """Return vectors of pairs of numbers of two rows of B, one below the other."""
        a, b = (e.load_vector(e.at(base, I16, offset), I16, 0, lanes=self.width) for offset in (I64(0), n))
        vectors = []
        for start in range(0, self.width, LANES):
            lanes = [lane for i in range(start, start + LANES) for lane in (i, self.width + i)]
            vectors.append(e.ir.bitcast(e.shuffle(a, b, lanes), pairs.PAIRS))
        return vectors

    def _load_out(self, e: Emitter, y: Any, column: Any) -> Any:
        return self.out_format.widen(e, e.load_vector(y, self.out_format.storage, column))

    def _store_out(self, e: Emitter, totals: Sequence[Any], y: Any, column: Any) -> None:
        if self.narrows_at_once:
            for i in range(0, self.vectors, 2):
                target = e.at(y, self.out_format.storage, column, i * LANES)
                e.store_vector(pairs.narrow(e, *totals[i : i + 2]), target, 0)
            return
        assert self.out_format.narrow is not None
        for i, total in enumerate(totals):
            e.store_vector(self.out_format.narrow(e, total), y, column, i * LANES)

    def _add_output(
        self, e: Emitter, kept: Any, base: Any, n: Any, rank: Any, column: Any, of_y: Sequence[Any]
    ) -> None:
        """Add to one output of each row: for the few outputs beyond a part's whole vectors, in most models none."""
        results = []
        form: Format = self.format
        for row in range(len(of_y)):
            total = e.variable(F32, F32(0.0))
            with e.range(0, rank) as i:
                number = form.widen(e, e.load(kept, form.storage, i, row * MAX_COLUMNS))
                total.value = e.fma(number, form.widen(e, e.load(base, form.storage, e.product(i, n))), total.value)
            results.append(total.value)
        out = self.out_format
        assert out.narrow is not None
        if self.adds:
            results = [
                e.ir.fadd(out.widen(e, e.load(y, out.storage, column)), result)
                for y, result in zip(of_y, results, strict=True)
            ]
        for y, result in zip(of_y, results, strict=True):
            e.store(out.narrow(e, result), y, column)
