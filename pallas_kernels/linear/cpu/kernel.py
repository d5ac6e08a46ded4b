"""The kernel in LLVM IR: y [t, n] = x [t, k] times one layer of w [l, n, k], transposed, divided into tiles.

A unit of work is a stretch of x's rows, which stay in a core's cache, times a chunk of w's rows.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from pallas_kernels.native.emitter import I64, NULL, POINTER, VOID, Emitter, add_function
from pallas_kernels.native.handler import add_handler

from .kind import Kind
from .multiplier import UNIT_ROWS, Multiplier
from .operands import Operands, Range
from .rounded import RoundedMultiplier
from .tiles import ExactMultiplier


class Kernel:
    """Writes the functions of one kernel."""

    def __init__(self, kind: Kind) -> None:
        self.multiplier: Multiplier[Any] = RoundedMultiplier(kind) if kind.rounds else ExactMultiplier(kind)
        self.module, self.parts = self.multiplier.module, self.multiplier.parts

    def build(self, name: str) -> ir.Module:
        """Return the module, with a function of this name that XLA calls."""
        tiles = self.multiplier.add_tiles()
        add_handler(self.module, name, self._add_prepare(), self._add_run(tiles))
        return self.module

    def _sizes(self, e: Emitter, dims: Any) -> tuple[Any, Any, Any]:
        """Return the rows and columns of y, and the length of a sum."""
        x, w = (e.load(dims, POINTER, index) for index in range(2))
        return e.load(x, I64, 0), e.ir.sdiv(e.load(w, I64, 1), I64(self.parts)), e.load(x, I64, 1)

    def _chunk(self, e: Emitter, t: Any, n: Any) -> Any:
        return self.multiplier.chunk(e, n, e.ceil_div(t, UNIT_ROWS) if self.multiplier.has_matrix_unit else 1)

    def _add_prepare(self) -> ir.Function:
        e, (buffers, dims) = add_function(self.module, "prepare", I64, POINTER, POINTER)
        self.multiplier.begin(e, self._scratch(e, buffers))
        t, n, _ = self._sizes(e, dims)
        e.ir.ret(e.product(e.ceil_div(t, UNIT_ROWS), e.ceil_div(n, self._chunk(e, t, n))))
        return e.function

    def _add_run(self, tiles: Any) -> ir.Function:
        """Do one unit: `UNIT_ROWS` rows of x times a chunk of w."""
        e, (buffers, dims, unit) = add_function(self.module, "run", VOID, POINTER, POINTER, I64)
        of = self._operands(e, buffers, dims)
        num_rows = e.load_int(e.load(buffers, POINTER, 3), 0)
        chunk = self._chunk(e, of.t, of.n)
        chunks = e.ceil_div(of.n, chunk)
        first_row = e.product(e.ir.sdiv(unit, chunks), UNIT_ROWS)
        first_column = e.product(e.ir.srem(unit, chunks), chunk)
        last_column = e.least(e.sum(first_column, chunk), of.n)
        end_row = e.least(e.sum(first_row, UNIT_ROWS), of.t)
        last_row = e.most(e.least(end_row, num_rows), first_row)
        columns = Range(first_column, last_column)
        self.multiplier.multiply(e, tiles, of, num_rows, Range(first_row, last_row), columns)
        out_format = self.multiplier.out_format
        with e.range(last_row, end_row) as row:
            cleared = e.at(of.y, out_format.storage, e.product(row, of.n), first_column)
            e.clear(cleared, e.product(e.ir.sub(last_column, first_column), out_format.num_bytes))
        e.ir.ret_void()
        return e.function

    def _operands(self, e: Emitter, buffers: Any, dims: Any) -> Operands:
        """Return the operands of a call, with the weights of the call's layer."""
        x, w, layer, _, plus, bias, *parts, y = (
            e.load(buffers, POINTER, index) for index in range(7 + self._num_parts)
        )
        t, n, k = self._sizes(e, dims)
        w, parts = self.multiplier.operands(e, w, parts, e.product(e.load_int(layer, 0), n, self.parts), k)
        plus, bias = (
            e.ir.select(e.ir.icmp_signed(">", e.load(e.load(dims, POINTER, index), I64, 0), I64(0)), base, NULL)
            for index, base in ((4, plus), (5, bias))
        )
        return Operands(x, w, plus, bias, y, t, n, k, parts, self._scratch(e, buffers))

    @property
    def _num_parts(self) -> int:
        """Return the number of arrays of weights besides their codes."""
        return len(self.multiplier.weights.parts)

    def _scratch(self, e: Emitter, buffers: Any) -> Any:
        """Return the address of the scratch behind y, if the multiplier needs one."""
        return e.load(buffers, POINTER, 7 + self._num_parts) if self.multiplier.has_scratch else NULL
