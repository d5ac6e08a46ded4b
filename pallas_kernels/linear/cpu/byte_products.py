"""Products of unsigned codes of 8 bits and signed numbers of 8 bits.

They are added up in integers: the sum is the same in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from pallas_kernels.native import processor
from pallas_kernels.native.emitter import I16, I32, LANES, Emitter, vector

BYTES = 4 * LANES
"""The number of codes that are multiplied at a time: four of each of 16 columns."""


class Sum:
    """The sums of 16 columns, in 32 bits each, while products are added."""

    def __init__(self, e: Emitter, max_pairs: int, num_chains: int, start: Any = None) -> None:
        """Begin with `start`, or zeros. `max_pairs` sums of two products fit into 16 bits.

        A processor that adds each product directly to its sum uses `num_chains` of sums, which need not wait for each
        other.
        """
        zeros = e.splat(I32(0))
        self._e, self._adds_words = e, not processor.current().has_int8_dot
        self._max_pairs, self._num_pairs = max_pairs, 0
        others = 0 if self._adds_words else num_chains - 1
        self._sums = [zeros if start is None else start, *[zeros] * others]
        self._words: Any = None

    def add(self, codes: Any, numbers: Any) -> None:
        """Add, for each column, the products of four codes and of four numbers: the bytes of 32 bits."""
        e = self._e
        if not self._adds_words:
            first, *others = self._sums
            self._sums = [*others, _add_products(e, first, codes, numbers)]
            return
        if self._num_pairs == self._max_pairs:
            self._add_words()
        words = _multiply_pairs(e, codes, numbers)
        self._words = words if self._words is None else e.ir.add(self._words, words)
        self._num_pairs += 1

    def total(self) -> Any:
        """Return the sums; nothing can be added afterwards."""
        if self._adds_words:
            self._add_words()
        first, *others = self._sums
        for other in others:
            first = self._e.ir.add(first, other)
        return first

    def _add_words(self) -> None:
        """Add the sums in 16 bits to the sums in 32 bits."""
        self._sums = [self._e.ir.add(self._sums[0], _add_pairs(self._e, self._words))]
        self._words, self._num_pairs = None, 0


def _add_products(e: Emitter, sums: Any, codes: Any, numbers: Any) -> Any:
    """Add four products of each column to its sum, by one instruction for each register."""
    present, numbers = processor.current(), e.ir.bitcast(numbers, codes.type)
    if present.has_avx512:
        return e.call_named("llvm.x86.avx512.vpdpbusd.512", sums, codes, numbers)
    name = "llvm.aarch64.neon.usdot.v4i32.v16i8" if present.is_aarch64 else "llvm.x86.avx512.vpdpbusd.256"
    return in_registers(e, name, (sums, codes, numbers))


def _multiply_pairs(e: Emitter, codes: Any, numbers: Any) -> Any:
    """Return the sums of two products each, in 16 bits."""
    numbers = e.ir.bitcast(numbers, codes.type)
    if processor.current().has_avx512:
        return e.call_named("llvm.x86.avx512.pmaddubs.w.512", codes, numbers, result=vector(I16, 2 * LANES))
    return in_registers(e, "llvm.x86.avx2.pmadd.ub.sw", (codes, numbers), vector(I16, LANES))


def _add_pairs(e: Emitter, words: Any) -> Any:
    """Return the sums of two words of 16 bits each, in 32 bits."""
    ones = e.constant(1, words)
    if processor.current().has_avx512:
        return e.call_named("llvm.x86.avx512.pmaddw.d.512", words, ones, result=vector(I32))
    return in_registers(e, "llvm.x86.avx2.pmadd.wd", (words, ones), vector(I32, LANES // 2))


def in_registers(e: Emitter, name: str, vectors: Sequence[Any], result: ir.Type | None = None) -> Any:
    """Call an instruction for each register of vectors of 64 bytes; it returns the first's type, or `result`."""
    num_parts = BYTES // processor.current().register_bytes
    results = []
    for part in range(num_parts):
        some = []
        for value in vectors:
            count = value.type.count // num_parts
            some.append(e.shuffle(value, value, range(part * count, (part + 1) * count)))
        results.append(e.call_named(name, *some, result=result))
    return e.join(results)
