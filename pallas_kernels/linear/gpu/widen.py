"""Codes of a GPU's kernel become bfloat16 in registers, by arithmetic on words of 32 bits.

An integer's bits in the mantissa of a float, below a power of two, give that power plus the integer. This avoids
conversions of integers, which are slow on a GPU. The bits of small floats become floats in a similar way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.weights import WeightFormat

_FIRST_BIT = 12
"""The bit that a byte of integers is moved to: so low that (2 ** 11 + integer) * scale is exact for a scale of 11 bits.
"""
_EXACT_SCALES = ("float16", "bfloat16", "float8_e4m3fn", "int8", "uint8")
_SMALL_FLOATS = {"e2m1": (2, 1), "e4m3": (4, 3)}
"""The number of bits of the exponent and the mantissa."""
_SIGN = -(2**31)


class _Values(NamedTuple):
    """The values of codes: (floats - bias) * unit."""

    floats: Array
    bias: int
    unit: float


def widen(
    words: Array,
    grouped: Mapping[str, list[Array]],
    form: WeightFormat,
    spread: Callable[[list[Array]], Array],
    zero: Array,
) -> Iterator[Array]:
    """Yield bfloat16 numbers [out, words]: of the first code of each word, then of the second codes, and so on.

    Args:
      words: int32 [out, words].
      grouped: the format's parts besides the codes, float32 [out] for each group of inputs.
      form: the format.
      spread: a function that repeats numbers [out] of each group for each word.
      zero: int32 0 that is opaque to ptxas, which would load constants anew for each instruction with two of them.
    """
    scales, mins = _scales_and_mins(grouped, form)
    if form.values == "integer" and form.bits == 8:
        words = words ^ jnp.int32(-0x7F7F7F80)  # now they are unsigned, too large by 128
    spread_scales = {}
    for plane in range(32 // (4 if form.bits == 4 else 8)):
        values = _values(words, plane, form, zero)
        if scales is None:
            yield ((values.floats - values.bias) * values.unit).astype(jnp.bfloat16)
            continue
        key = values.bias if _is_exact(form) else 0
        if key not in spread_scales:
            taken = [key * scale + (0 if mins is None else mins[i]) for i, scale in enumerate(scales)]
            spread_scales[key] = (
                spread([scale * values.unit for scale in scales]),
                spread(taken) if key or mins is not None else None,
            )
        factors, less = spread_scales[key]
        numbers = (values.floats if key else values.floats - values.bias) * factors
        yield (numbers if less is None else numbers - less).astype(jnp.bfloat16)


def _is_exact(form: WeightFormat) -> bool:
    """Return whether a scale times a float of `_values`, and times its bias, is exact: then one operation does both."""
    return (
        form.values == "integer"
        and form.scale_dtype in _EXACT_SCALES
        and form.factor_group is None
        and not form.has_mins
        and form.zero_dtype in (None, "uint8", "int8")
    )


def _scales_and_mins(
    grouped: Mapping[str, list[Array]], form: WeightFormat
) -> tuple[list[Array] | None, list[Array] | None]:
    if form.group is None:
        return None, None
    scales = _times(grouped["scales"], grouped.get("scale_factors"))
    if "mins" in grouped:
        return scales, _times(grouped["mins"], grouped.get("min_factors"))
    if "zeros" in grouped:
        return scales, [zero * scale for zero, scale in zip(grouped["zeros"], scales, strict=True)]
    return scales, None


def _times(numbers: list[Array], factors: list[Array] | None) -> list[Array]:
    if factors is None:
        return numbers
    return [number * factors[i * len(factors) // len(numbers)] for i, number in enumerate(numbers)]


def _values(words: Array, plane: int, form: WeightFormat, zero: Array) -> _Values:
    if form.values in _SMALL_FLOATS:
        return _small_floats(words, plane, *_SMALL_FLOATS[form.values], zero)
    bits, offset = (4, form.offset) if form.bits == 4 else (8, 128 if form.bits == 8 else form.offset)
    byte, nibble = divmod(plane * bits, 8)
    distance, bit = _FIRST_BIT - 8 * byte, _FIRST_BIT + nibble
    moved = words << distance if distance > 0 else lax.shift_right_logical(words, jnp.int32(-distance))
    power = 23 - bit
    bit_pattern = (moved & (zero + (((1 << bits) - 1) << bit))) | ((127 + power) << 23)
    return _Values(lax.bitcast_convert_type(bit_pattern, jnp.float32), 2**power + offset, 1)


def _small_floats(words: Array, plane: int, exponent: int, mantissa: int, zero: Array) -> _Values:
    """Return the numbers of codes with a sign, an exponent and a mantissa.

    A code with the smallest exponent is subnormal: it has the next exponent and no leading one. It is computed as
    twice the number that it would be if it were normal, less the leading one.
    """
    bits = 1 + exponent + mantissa
    at_top = words << (32 - bits * (plane + 1)) if bits * (plane + 1) < 32 else words
    moved = at_top >> (8 - exponent)  # copies of the sign in between
    base = 128 - (1 << exponent)
    bit_pattern = (moved & (zero + (((1 << (exponent + mantissa)) - 1) << (23 - mantissa)))) | (base << 23)
    large = lax.bitcast_convert_type(bit_pattern, jnp.float32)
    magnitude = jnp.minimum(large, 2 * large - 2.0 ** (base - 126))
    signed = lax.bitcast_convert_type(magnitude, jnp.int32) | (at_top & _SIGN)
    return _Values(lax.bitcast_convert_type(signed, jnp.float32), 0, 2.0 ** (128 - base - (1 << (exponent - 1))))
