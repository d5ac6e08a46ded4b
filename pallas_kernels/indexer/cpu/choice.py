"""The choice of the largest integers, exact: the smallest one that is chosen is found digit by digit."""

from __future__ import annotations

from typing import Any

from pallas_kernels.native.emitter import I32, I64, Emitter

_DIGITS = (11, 11, 10)
"""The bits of each digit, from the highest one on."""


def choose(e: Emitter, scores: Any, count: Any, target: Any, top_k: int) -> None:
    """Set the bits of the `top_k` largest of more than `top_k` unsigned integers; of equal ones the first are chosen.

    The target's words are 0 before.
    """
    counts = e.array(I32, 1 << max(_DIGITS))
    least, wanted = e.variable(I32, I32(0)), e.variable(I32, I32(top_k))
    shift = 32
    for bits in _DIGITS:
        shift -= bits
        _count(e, scores, count, counts, least.value, shift, bits)
        digit = _find_digit(e, counts, wanted, bits)
        least.value = e.ir.or_(least.value, e.ir.shl(digit, I32(shift)))
    # `wanted` is now the number of integers to take that equal the least one.
    limit = least.value
    with e.range(0, count) as position:
        score = e.load(scores, I32, position)
        is_equal = e.ir.icmp_signed("==", score, limit)
        is_wanted = e.ir.and_(is_equal, e.ir.icmp_signed(">", wanted.value, I32(0)))
        with e.ir.if_then(e.ir.or_(is_wanted, e.ir.icmp_unsigned(">", score, limit))):
            word = e.ir.lshr(position, I64(5))
            bit = e.ir.shl(I32(1), e.ir.trunc(e.ir.and_(position, I64(31)), I32))
            e.store(e.ir.or_(e.load(target, I32, word), bit), target, word)
            wanted.value = e.ir.sub(wanted.value, e.ir.zext(is_equal, I32))


def _count(e: Emitter, scores: Any, count: Any, counts: Any, prefix: Any, shift: int, bits: int) -> None:
    """Count the values of a digit among the integers with the higher digits of `prefix`."""
    e.clear(counts, 4 << bits)
    higher = I64(shift + bits)
    wanted = e.ir.lshr(e.ir.zext(prefix, I64), higher)
    with e.range(0, count) as position:
        score = e.ir.zext(e.load(scores, I32, position), I64)
        with e.ir.if_then(e.ir.icmp_unsigned("==", e.ir.lshr(score, higher), wanted)):
            digit = e.ir.and_(e.ir.lshr(score, I64(shift)), I64((1 << bits) - 1))
            e.store(e.ir.add(e.load(counts, I32, digit), I32(1)), counts, digit)


def _find_digit(e: Emitter, counts: Any, wanted: Any, bits: int) -> Any:
    """Return the value of a digit where the wanted number is reached from above; it is reduced by those above."""
    digit = e.variable(I32, I32(-1))
    with e.range(0, 1 << bits) as below:
        value = e.ir.sub(I64((1 << bits) - 1), below)
        some = e.load(counts, I32, value)
        is_reached = e.ir.icmp_signed(">=", some, wanted.value)
        is_open = e.ir.icmp_signed("<", digit.value, I32(0))
        digit.value = e.ir.select(e.ir.and_(is_open, is_reached), e.ir.trunc(value, I32), digit.value)
        is_above = e.ir.icmp_signed("<", digit.value, I32(0))
        wanted.value = e.ir.select(is_above, e.ir.sub(wanted.value, some), wanted.value)
    return digit.value
