"""The kernel in LLVM IR: y [t, n] = x [t, k] times one layer of w [l, n, k], transposed; no matrix is packed anew.

A few rows of x times a few of w are summed up at a time, each product in one register: 16 sums, of every 16th product
along k. At the end those of one register are added up. What is added to what, and in which order, is the same for any
number of rows: a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.native.compiling import has_feature, num_cores
from pallas_kernels.native.emitter import (
    BF16,
    CACHE_LINE,
    F32,
    I32,
    I64,
    LANES,
    POINTER,
    Emitter,
    Variable,
    add_function,
    vector,
)
from pallas_kernels.native.handler import add_handler
from pallas_kernels.native.number_formats import FORMATS

from . import MIN_COLUMNS, MIN_ROWS, STEP_BYTES

COLUMNS = MIN_COLUMNS
"""Rows of w at a time."""
FEW_ROWS, MANY_ROWS = MIN_ROWS, 6
"""Rows of x at a time. With 6, their 24 sums and what they are made of take 29 of 32 registers."""
BLOCK = 96
"""Rows of x in a unit of work, which stay in a core's cache ..."""
MIN_CHUNK, MAX_CHUNK = 16, 256
"""... and of w: many, for memory to be read in long stretches, but enough units for all cores."""
UNITS_PER_CORE = 4
GROUP_BYTES = 12 << 10
"""Of w, which stay in a core's first cache for all rows of a unit."""
AHEAD = 1024
"""Numbers of w to fetch before they are wanted."""
VOID = ir.VoidType()


class Kernel:
    """Writes the functions of one kernel."""

    def __init__(self, dtype: Any, out_dtype: Any) -> None:
        self.dtype, self.out_format = jnp.dtype(dtype), FORMATS[jnp.dtype(out_dtype)]
        self.storage, self.step = FORMATS[self.dtype].storage, STEP_BYTES // self.dtype.itemsize
        self.module = ir.Module()

    def build(self, name: str) -> ir.Module:
        """Return the module, with a function of this name for XLA to call."""
        few, many = (self._add_block(f"block_{rows}", rows) for rows in (FEW_ROWS, MANY_ROWS))
        add_handler(self.module, name, self._add_prepare(), self._add_run(few, many))
        return self.module

    def _sizes(self, e: Emitter, dims: Any) -> tuple[Any, Any, Any]:
        x, w = (e.load(dims, POINTER, index) for index in range(2))
        return e.load(x, I64, 0), e.load(w, I64, 1), e.load(w, I64, 2)

    def _chunk(self, e: Emitter, n: Any) -> Any:
        each = e.product(e.ceil_div(n, MIN_CHUNK * UNITS_PER_CORE * num_cores()), MIN_CHUNK)
        return e.least(each, MAX_CHUNK)

    def _add_prepare(self) -> ir.Function:
        e, (_, dims) = add_function(self.module, "prepare", I64, POINTER, POINTER)
        t, n, _ = self._sizes(e, dims)
        e.ir.ret(e.product(e.ceil_div(t, BLOCK), e.ceil_div(n, self._chunk(e, n))))
        return e.function

    def _add_run(self, few: ir.Function, many: ir.Function) -> ir.Function:
        """Do one unit: `BLOCK` rows of x times a chunk of w. What would reach beyond the end begins earlier instead."""
        e, (buffers, dims, unit) = add_function(self.module, "run", VOID, POINTER, POINTER, I64)
        x, w, layer, y = (e.load(buffers, POINTER, index) for index in range(4))
        t, n, k = self._sizes(e, dims)
        w = e.at(w, self.storage, e.product(e.load_int(layer, 0), n, k))
        chunk = self._chunk(e, n)
        chunks = e.ceil_div(n, chunk)
        first_row, first_column = e.product(e.ir.sdiv(unit, chunks), BLOCK), e.product(e.ir.srem(unit, chunks), chunk)
        last_row, last_column = e.least(e.sum(first_row, BLOCK), t), e.least(e.sum(first_column, chunk), n)
        group = e.most(e.product(e.ir.sdiv(I64(GROUP_BYTES // self.dtype.itemsize // COLUMNS), k), COLUMNS), COLUMNS)
        with e.range(first_column, last_column, group) as start:
            stop = e.least(e.sum(start, group), last_column)
            with e.ir.if_else(e.ir.icmp_signed("<", t, I64(MANY_ROWS))) as (is_few, is_many):
                for branch, function, rows in ((is_few, few, FEW_ROWS), (is_many, many, MANY_ROWS)):
                    with branch, e.range(first_row, last_row, rows) as row:
                        if rows == MANY_ROWS:
                            self._fetch(
                                e,
                                e.at(w, self.storage, e.product(stop, k)),
                                e.product(group, k),
                                e.ir.sub(row, first_row),
                                e.ir.sub(last_row, first_row),
                            )
                        row = e.least(row, e.ir.sub(t, I64(rows)))
                        x_rows = e.at(x, self.storage, e.product(row, k))
                        with e.range(start, stop, COLUMNS) as column:
                            column = e.least(column, e.ir.sub(n, I64(COLUMNS)))
                            w_rows = e.at(w, self.storage, e.product(column, k))
                            y_rows = e.at(y, self.out_format.storage, e.product(row, n), column)
                            e.ir.call(function, [x_rows, w_rows, y_rows, n, k])
        e.ir.ret_void()
        return e.function

    def _fetch(self, e: Emitter, base: Any, count: Any, row: Any, num_rows: Any) -> None:
        """Begin to read those of `count` numbers that are this row's share."""
        per_line = CACHE_LINE // self.dtype.itemsize
        share = e.product(e.ceil_div(e.product(count, MANY_ROWS), e.product(num_rows, per_line)), per_line)
        begin = e.product(e.ir.sdiv(row, I64(MANY_ROWS)), share)
        with e.range(begin, e.least(e.sum(begin, share), count), per_line) as i:
            e.prefetch(base, self.storage, i)

    def _add_block(self, name: str, rows: int) -> ir.Function:
        """Multiply a few rows of x and of w."""
        e, (x, w, y, n, k) = add_function(self.module, name, VOID, *[POINTER] * 3, *[I64] * 2)
        sums = [[e.variable(vector(F32), e.splat(F32(0.0))) for _ in range(COLUMNS)] for _ in range(rows)]
        # With few rows of x, what takes time is to read w: as one stream, which the processor reads ahead of.
        together = 1 if rows == FEW_ROWS else COLUMNS
        for first in range(0, COLUMNS, together):
            with e.range(0, k, self.step) as i:
                x_rows = [self._load(e, x, e.product(k, row), i) for row in range(rows)]
                for column in range(first, first + together):
                    w_row = self._load(e, w, e.product(k, column), i)
                    if rows == FEW_ROWS:
                        e.prefetch(w, self.storage, e.product(k, column), i, AHEAD)
                    for row in range(rows):
                        self._add_product(e, sums[row][column], x_rows[row], w_row)
        per_vector = LANES // COLUMNS
        for first in range(0, rows, per_vector):
            some = [each.value for row in sums[first : first + per_vector] for each in row]
            found = add_up(e, some + [e.splat(F32(0.0))] * (LANES - len(some)))
            assert self.out_format.narrow is not None
            found = self.out_format.narrow(e, found)
            for row in range(first, min(rows, first + per_vector)):
                lanes = range((row - first) * COLUMNS, (row - first + 1) * COLUMNS)
                e.store_vector(e.shuffle(found, found, lanes), y, e.product(n, row))
        e.ir.ret_void()
        return e.function

    def _load(self, e: Emitter, base: Any, *index: Any) -> Any:
        if self.dtype == jnp.float32:
            return e.load_vector(base, F32, *index)
        place = e.at(base, self.storage, *index)
        if has_feature("avx512bf16"):
            return e.load_vector(place, BF16, 0, lanes=2 * LANES)
        return e.load_vector(place, I32, 0)

    def _add_product(self, e: Emitter, total: Variable, x: Any, w: Any) -> None:
        if self.dtype == jnp.float32:
            total.value = e.fma(x, w, total.value)
        elif has_feature("avx512bf16"):
            total.value = e.call_named("llvm.x86.avx512bf16.dpbf16ps.512", total.value, x, w)
        else:
            for half in (_low_half, _high_half):
                total.value = e.fma(half(e, x), half(e, w), total.value)


def _low_half(e: Emitter, pairs: Any) -> Any:
    return e.ir.bitcast(e.ir.shl(pairs, ir.Constant(vector(I32), [16] * LANES)), vector(F32))


def _high_half(e: Emitter, pairs: Any) -> Any:
    return e.ir.bitcast(e.ir.and_(pairs, ir.Constant(vector(I32), [0xFFFF0000] * LANES)), vector(F32))


def add_up(e: Emitter, vectors: Sequence[Any]) -> Any:
    """Return a vector of the sums of 16 vectors, each summed up as halves of halves."""
    size = LANES // 2
    while size:
        # Each holds segments of 2 * size numbers still to be added up, of one vector each.
        starts = range(0, LANES, 2 * size)
        low = [
            lane
            for start in starts
            for lane in (*range(start, start + size), *range(LANES + start, LANES + start + size))
        ]
        high = [lane + size for lane in low]
        half = len(vectors) // 2
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors = [e.ir.fadd(e.shuffle(a, b, low), e.shuffle(a, b, high)) for a, b in pairs]
        size //= 2
    return vectors[0]
