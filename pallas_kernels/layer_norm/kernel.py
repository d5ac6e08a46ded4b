"""The kernel in LLVM IR: it reads a row three times, for its mean, its variance and the result."""

from __future__ import annotations

from typing import Any

from pallas_kernels.native.emitter import F32, I64, LANES, NULL, POINTER, Emitter, vector
from pallas_kernels.rms_norm import kernel as rms_norm


class Kernel(rms_norm.Kernel):
    """Norms rows as the root-mean-square norm does, with a bias in place of the offset of scales."""

    def _operands(self, e: Emitter, buffers: Any, dims: Any) -> rms_norm.Operands:
        x, scale, layer, num_rows, eps, bias, y = (e.load(buffers, POINTER, index) for index in range(7))
        _, d = self._sizes(e, dims)
        first = e.product(e.load_int(layer, 0), d)
        has_bias = e.ir.icmp_signed(">", e.load(e.load(dims, POINTER, 5), I64, 0), I64(0))
        bias = e.ir.select(has_bias, e.at(bias, self.format.storage, first), NULL)
        return rms_norm.Operands(
            x, e.at(scale, self.format.storage, first), bias, e.load_int(num_rows, 0), e.load(eps, F32, 0), y
        )

    def _norm(self, e: Emitter, x: Any, y: Any, d: Any, of: rms_norm.Operands) -> None:
        assert self.format.narrow is not None
        size = e.ir.sitofp(d, F32)
        sums = e.variable(vector(F32), e.splat(F32(0.0)))
        with e.range(0, d, LANES) as i:
            sums.value = e.ir.fadd(sums.value, self._load(e, x, i))
        mean = e.splat(e.ir.fdiv(e.reduce(e.ir.fadd, sums.value), size))
        squares = e.variable(vector(F32), e.splat(F32(0.0)))
        with e.range(0, d, LANES) as i:
            centered = e.ir.fsub(self._load(e, x, i), mean)
            squares.value = e.fma(centered, centered, squares.value)
        variance = e.ir.fdiv(e.reduce(e.ir.fadd, squares.value), size)
        factor = e.splat(e.ir.fdiv(F32(1.0), e.call("sqrt", e.ir.fadd(variance, of.eps))))
        with e.range(0, d, LANES) as i:
            centered = e.ir.fmul(e.ir.fsub(self._load(e, x, i), mean), factor)
            total = e.variable(vector(F32), e.ir.fmul(centered, self._load(e, of.scale, i)))
            with e.ir.if_then(e.ir.icmp_unsigned("!=", of.added, NULL)):
                total.value = e.ir.fadd(total.value, self._load(e, of.added, i))
            e.store_vector(self.format.narrow(e, total.value), y, i)
