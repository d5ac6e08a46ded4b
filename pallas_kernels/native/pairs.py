"""Vectors of pairs of bfloat16 in 32 bits, as they lie in memory, with instructions for them or without."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from . import processor
from .emitter import BF16, F32, I32, LANES, Emitter, vector

PAIRS = vector(I32)
X86_DOT = "llvm.x86.avx512bf16.dpbf16ps.512"
AARCH64_DOT = "llvm.aarch64.neon.bfdot.v4f32.v8bf16"


def add_products(e: Emitter, total: Any, x: Any, y: Any) -> Any:
    """Add both products of each pair to a vector of float32."""
    own = processor.current()
    if own.has_bfloat16_dot:
        x, y = (e.ir.bitcast(pairs, vector(BF16, 2 * LANES)) for pairs in (x, y))
        return _add_by_four(e, total, x, y) if own.is_aarch64 else e.call_named(X86_DOT, total, x, y)
    for half in (_first, _second):
        total = e.fma(half(e, x), half(e, y), total)
    return total


def narrow(e: Emitter, early: Any, late: Any) -> Any:
    """Round two vectors of float32, of which the first comes first, by the instruction for it."""
    found = e.call_named("llvm.x86.avx512bf16.cvtne2ps2bf16.512", late, early, result=vector(BF16, 2 * LANES))
    return e.ir.bitcast(found, PAIRS)


def _add_by_four(e: Emitter, total: Any, x: Any, y: Any) -> Any:
    """Add products as AArch64 does, in a register of four sums.

    Before FEAT_EBF16 `bfdot` rounds to odd after each addition, not to the nearest, and takes denormals for 0.
    """
    parts = []
    for first in range(0, LANES, 4):
        pairs = (e.shuffle(each, each, range(2 * first, 2 * first + 8)) for each in (x, y))
        parts.append(e.call_named(AARCH64_DOT, e.shuffle(total, total, range(first, first + 4)), *pairs))
    low, high = (e.shuffle(a, b, range(8)) for a, b in (parts[:2], parts[2:]))
    return e.shuffle(low, high, range(LANES))


def _first(e: Emitter, pairs: Any) -> Any:
    return e.ir.bitcast(e.ir.shl(pairs, e.constant(16, pairs)), vector(F32))


def _second(e: Emitter, pairs: Any) -> Any:
    return e.ir.bitcast(e.ir.and_(pairs, ir.Constant(PAIRS, [0xFFFF0000] * LANES)), vector(F32))
