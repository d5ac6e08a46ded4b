"""Vectors of pairs of bfloat16 in 32 bits, as they lie in memory, with instructions for them or without."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .compiling import has_feature
from .emitter import BF16, F32, I32, LANES, Emitter, vector

PAIRS = vector(I32)
INSTRUCTIONS = "avx512bf16"


def add_products(e: Emitter, total: Any, x: Any, y: Any) -> Any:
    """Add both products of each pair to a vector of float32."""
    if has_feature(INSTRUCTIONS):
        x, y = (e.ir.bitcast(pairs, vector(BF16, 2 * LANES)) for pairs in (x, y))
        return e.call_named("llvm.x86.avx512bf16.dpbf16ps.512", total, x, y)
    for half in (_first, _second):
        total = e.fma(half(e, x), half(e, y), total)
    return total


def narrow(e: Emitter, early: Any, late: Any) -> Any:
    """Round two vectors of float32, of which the first comes first, by the instruction for it."""
    found = e.call_named("llvm.x86.avx512bf16.cvtne2ps2bf16.512", late, early, result=vector(BF16, 2 * LANES))
    return e.ir.bitcast(found, PAIRS)


def _first(e: Emitter, pairs: Any) -> Any:
    return e.ir.bitcast(e.ir.shl(pairs, e.constant(16, pairs)), vector(F32))


def _second(e: Emitter, pairs: Any) -> Any:
    return e.ir.bitcast(e.ir.and_(pairs, ir.Constant(PAIRS, [0xFFFF0000] * LANES)), vector(F32))
