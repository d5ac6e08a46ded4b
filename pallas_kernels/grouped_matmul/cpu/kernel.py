"""The kernel in LLVM IR: the tiles of `linear`, in each group of rows with its own expert's weights.

A unit of work is a stretch of one group's rows times a chunk of its expert's weights. The kernel reads the groups at
run time, and an expert without rows has no unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from pallas_kernels.linear.cpu.multiplier import UNIT_ROWS
from pallas_kernels.linear.cpu.operands import Operands, Range
from pallas_kernels.linear.cpu.tiles import FEW_ROWS, ExactMultiplier, Functions
from pallas_kernels.native.emitter import I64, NULL, POINTER, VOID, Emitter, add_function
from pallas_kernels.native.handler import add_handler


class Call(NamedTuple):
    """The addresses of a call's arrays, and its sizes: experts, columns of y, and the length of a sum."""

    x: Any
    w: Any
    layer: Any
    starts: Any
    counts: Any
    parts: Sequence[Any]
    y: Any
    num_experts: Any
    n: Any
    k: Any


class Kernel(ExactMultiplier):
    """Writes the functions of one kernel."""

    def build(self, name: str) -> ir.Module:
        """Return the module, with a function of this name that XLA calls."""
        tiles = self.add_tiles(has_one=True)
        add_handler(self.module, name, self._add_prepare(), self._add_run(tiles))
        return self.module

    def _call(self, e: Emitter, buffers: Any, dims: Any) -> Call:
        x, w, layer, starts, counts, *parts, y = (
            e.load(buffers, POINTER, index) for index in range(6 + len(self.weights.parts))
        )
        num_experts, o = (e.load(e.load(dims, POINTER, 1), I64, axis) for axis in (1, 2))
        n, k = e.ir.sdiv(o, I64(self.parts)), e.load(e.load(dims, POINTER, 0), I64, 1)
        return Call(x, w, e.load_int(layer, 0), starts, counts, parts, y, num_experts, n, k)

    def _chunk(self, e: Emitter, of: Call) -> tuple[Any, Any]:
        """Return the number of columns of a unit, and the number of stretches of rows."""
        stretches = e.variable(I64, I64(0))
        with e.range(0, of.num_experts) as expert:
            stretches.value = e.sum(stretches.value, e.ceil_div(e.load_int(of.counts, expert), UNIT_ROWS))
        return self.chunk(e, of.n, stretches.value), stretches.value

    def _add_prepare(self) -> ir.Function:
        e, (buffers, dims) = add_function(self.module, "prepare", I64, POINTER, POINTER)
        of = self._call(e, buffers, dims)
        chunk, stretches = self._chunk(e, of)
        # Without rows there is no chunk either.
        e.ir.ret(e.product(stretches, e.ceil_div(of.n, e.most(chunk, 1))))
        return e.function

    def _add_run(self, tiles: Functions) -> ir.Function:
        """Do one unit."""
        e, (buffers, dims, unit) = add_function(self.module, "run", VOID, POINTER, POINTER, I64)
        of = self._call(e, buffers, dims)
        chunk, _ = self._chunk(e, of)
        chunks = e.ceil_div(of.n, chunk)
        expert, stretch = self._find(e, of, e.ir.sdiv(unit, chunks))
        count = e.load_int(of.counts, expert)
        rows = Range(e.product(stretch, UNIT_ROWS), e.least(e.product(e.sum(stretch, 1), UNIT_ROWS), count))
        first_column = e.product(e.ir.srem(unit, chunks), chunk)
        columns = Range(first_column, e.least(e.sum(first_column, chunk), of.n))
        self.multiply(e, tiles, self._operands(e, of, expert, count), count, rows, columns)
        e.ir.ret_void()
        return e.function

    def _find(self, e: Emitter, of: Call, stretch: Any) -> tuple[Any, Any]:
        """Return the expert of a stretch, counted over all experts, and the stretch's index among the expert's."""
        owner, left = e.variable(I64, I64(0)), e.variable(I64, stretch)
        before = e.variable(I64, I64(0))
        with e.range(0, of.num_experts) as expert:
            after = e.sum(before.value, e.ceil_div(e.load_int(of.counts, expert), UNIT_ROWS))
            is_here = e.ir.and_(e.ir.icmp_signed("<=", before.value, stretch), e.ir.icmp_signed("<", stretch, after))
            owner.value = e.ir.select(is_here, expert, owner.value)
            left.value = e.ir.select(is_here, e.ir.sub(stretch, before.value), left.value)
            before.value = after
        return owner.value, left.value

    def _operands(self, e: Emitter, of: Call, expert: Any, count: Any) -> Operands:
        """Return the operands of one expert; its number of rows is rounded up to whole tiles."""
        row = e.load_int(of.starts, expert)
        first = e.product(e.sum(e.product(of.layer, of.num_experts), expert), of.n, self.parts)
        w, parts = self.operands(e, of.w, of.parts, first, of.k)
        return Operands(
            e.at(of.x, self.storage, e.product(row, of.k)),
            w,
            NULL,
            NULL,
            e.at(of.y, self.out_format.storage, e.product(row, of.n)),
            e.product(e.ceil_div(count, FEW_ROWS), FEW_ROWS),
            of.n,
            of.k,
            parts,
        )
