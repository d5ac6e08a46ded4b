"""The kernel in LLVM IR: it reads a row twice, the second time from the first cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.native.emitter import F32, I64, LANES, POINTER, VOID, Emitter, add_function, vector
from pallas_kernels.native.handler import add_handler
from pallas_kernels.native.number_formats import FORMATS

_ROWS = 16
"""The number of rows of a unit of work."""


class Operands(NamedTuple):
    """The operands of a call; `scale` is the row of the call's layer."""

    x: Any
    scale: Any
    added: Any
    """The number added to every scale, or in a layer norm the address of a row added to every row of the result."""
    num_rows: Any
    eps: Any
    y: Any


class Kernel:
    """Writes the functions of one kernel."""

    def __init__(self, dtype: Any) -> None:
        self.format = FORMATS[jnp.dtype(dtype)]
        self.module = ir.Module()

    def build(self, name: str) -> ir.Module:
        """Return the module, with a function of this name that XLA calls."""
        add_handler(self.module, name, self._add_prepare(), self._add_run())
        return self.module

    def _sizes(self, e: Emitter, dims: Any) -> tuple[Any, Any]:
        x = e.load(dims, POINTER, 0)
        return e.load(x, I64, 0), e.load(x, I64, 1)

    def _add_prepare(self) -> ir.Function:
        e, (_, dims) = add_function(self.module, "prepare", I64, POINTER, POINTER)
        e.ir.ret(e.ceil_div(self._sizes(e, dims)[0], _ROWS))
        return e.function

    def _add_run(self) -> ir.Function:
        """Norm, or clear, the rows of a unit."""
        e, (buffers, dims, unit) = add_function(self.module, "run", VOID, POINTER, POINTER, I64)
        of, (t, d), storage = self._operands(e, buffers, dims), self._sizes(e, dims), self.format.storage
        first = e.product(unit, _ROWS)
        with e.range(first, e.least(e.sum(first, _ROWS), t)) as row:
            source, target = (e.at(base, storage, e.product(row, d)) for base in (of.x, of.y))
            with e.ir.if_else(e.ir.icmp_signed("<", row, of.num_rows)) as (is_live, is_padding):
                with is_live:
                    self._norm(e, source, target, d, of)
                with is_padding:
                    e.clear(target, e.product(d, self.format.num_bytes))
        e.ir.ret_void()
        return e.function

    def _operands(self, e: Emitter, buffers: Any, dims: Any) -> Operands:
        x, scale, layer, num_rows, eps, offset, y = (e.load(buffers, POINTER, index) for index in range(7))
        _, d = self._sizes(e, dims)
        scale = e.at(scale, self.format.storage, e.product(e.load_int(layer, 0), d))
        return Operands(x, scale, e.splat(e.load(offset, F32, 0)), e.load_int(num_rows, 0), e.load(eps, F32, 0), y)

    def _norm(self, e: Emitter, x: Any, y: Any, d: Any, of: Operands) -> None:
        assert self.format.narrow is not None
        squares = e.variable(vector(F32), e.splat(F32(0.0)))
        with e.range(0, d, LANES) as i:
            numbers = self._load(e, x, i)
            squares.value = e.fma(numbers, numbers, squares.value)
        mean = e.ir.fdiv(e.reduce(e.ir.fadd, squares.value), e.ir.sitofp(d, F32))
        factor = e.splat(e.ir.fdiv(F32(1.0), e.call("sqrt", e.ir.fadd(mean, of.eps))))
        with e.range(0, d, LANES) as i:
            by = e.ir.fadd(self._load(e, of.scale, i), of.added)
            numbers = e.ir.fmul(e.ir.fmul(self._load(e, x, i), factor), by)
            e.store_vector(self.format.narrow(e, numbers), y, i)

    def _load(self, e: Emitter, base: Any, i: Any) -> Any:
        return self.format.widen(e, e.load_vector(base, self.format.storage, i))
