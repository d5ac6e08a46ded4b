"""Vectors of pairs of bfloat16 in 32 bits, as they lie in memory, and their products with or without instructions."""

from __future__ import annotations

from typing import Any

from . import processor
from .emitter import BF16, F32, I16, I32, LANES, Emitter, vector

PAIRS = vector(I32)
_X86_DOT = "llvm.x86.avx512bf16.dpbf16ps.512"
_AARCH64_DOT = "llvm.aarch64.neon.bfdot.v4f32.v8bf16"


def add_products(e: Emitter, total: Any, x: Any, y: Any) -> Any:
    """Add both products of each pair to a vector of float32."""
    present = processor.current()
    if present.has_bfloat16_dot:
        x, y = (e.ir.bitcast(pairs, vector(BF16, 2 * pairs.type.count)) for pairs in (x, y))
        return _add_by_four(e, total, x, y) if present.is_aarch64 else e.call_named(_X86_DOT, total, x, y)
    for half in (first, second):
        total = e.fma(half(e, x), half(e, y), total)
    return total


def narrow(e: Emitter, early: Any, late: Any) -> Any:
    """Round two vectors of float32 to one of bfloat16 with the processor's instruction; `early` comes first."""
    rounded = e.call_named("llvm.x86.avx512bf16.cvtne2ps2bf16.512", late, early, result=vector(BF16, 2 * LANES))
    return e.ir.bitcast(rounded, PAIRS)


def narrow_half(e: Emitter, numbers: Any) -> Any:
    """Round a vector of float32 to bfloat16 with the processor's instruction."""
    rounded = e.call_named("llvm.x86.avx512bf16.cvtneps2bf16.512", numbers, result=vector(BF16, LANES))
    return e.ir.bitcast(rounded, vector(I16, LANES))


def _add_by_four(e: Emitter, total: Any, x: Any, y: Any) -> Any:
    """Add products as AArch64 does, in a register of four sums.

    Before FEAT_EBF16 `bfdot` rounds to odd after each addition, not to the nearest, and takes denormals for 0.
    """
    parts = []
    for start in range(0, total.type.count, 4):
        pairs = (e.shuffle(each, each, range(2 * start, 2 * start + 8)) for each in (x, y))
        parts.append(e.call_named(_AARCH64_DOT, e.shuffle(total, total, range(start, start + 4)), *pairs))
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        parts = [e.shuffle(a, b, range(count)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def first(e: Emitter, pairs: Any) -> Any:
    """Return the first number of each pair, as float32."""
    return e.ir.bitcast(e.ir.shl(pairs, e.constant(16, pairs)), vector(F32, pairs.type.count))


def second(e: Emitter, pairs: Any) -> Any:
    """Return the second number of each pair, as float32."""
    return e.ir.bitcast(e.ir.and_(pairs, e.constant(0xFFFF0000, pairs)), vector(F32, pairs.type.count))
