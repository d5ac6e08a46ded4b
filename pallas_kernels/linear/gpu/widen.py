"""Codes of a GPU's kernel become bfloat16 in registers, by arithmetic on words of 32 bits.

An integer's bits in the mantissa of a float, below a power of two, are that power plus the integer: so there is no
conversion of integers, of which a GPU does few in a cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.weights import WeightFormat

MAGIC = 0x4B000000
"""The bits of 2 ** 23."""


def widen(
    words: Array,
    grouped: Mapping[str, list[Array]],
    form: WeightFormat,
    spread: Callable[[list[Array]], Array],
) -> Iterator[Array]:
    """Yield bfloat16 numbers [out, words] of the first code of each word, of the second ones and so on.

    Args:
      words: int32 [out, words].
      grouped: float32 [out] for each group of inputs, of the parts that the format has.
      form: the format.
      spread: a function that makes a number for each word of numbers [out] of each group.
    """
    scales, mins = _scales_and_mins(grouped, form, spread)
    bits = 4 if form.bits == 4 else 8
    if form.values == "integer" and form.bits == 8:
        words = words ^ jnp.int32(-0x7F7F7F80)  # now they are unsigned, 128 more
    for plane in range(32 // bits):
        numbers = _VALUES[form.values](words, plane * bits, form)
        if scales is not None:
            numbers = numbers * scales
        if mins is not None:
            numbers = numbers - mins
        yield numbers.astype(jnp.bfloat16)


def _scales_and_mins(
    grouped: Mapping[str, list[Array]], form: WeightFormat, spread: Callable[[list[Array]], Array]
) -> tuple[Array | None, Array | None]:
    if form.group is None:
        return None, None
    scales = _times(grouped["scales"], grouped.get("scale_factors"))
    if "mins" in grouped:
        return spread(scales), spread(_times(grouped["mins"], grouped.get("min_factors")))
    if "zeros" in grouped:
        return spread(scales), spread([zero * scale for zero, scale in zip(grouped["zeros"], scales, strict=True)])
    return spread(scales), None


def _times(numbers: list[Array], factors: list[Array] | None) -> list[Array]:
    if factors is None:
        return numbers
    return [number * factors[i * len(factors) // len(numbers)] for i, number in enumerate(numbers)]


def _integers(words: Array, shift: int, form: WeightFormat) -> Array:
    mask = 0xF if form.bits == 4 else 0xFF
    offset = 128 if form.bits == 8 else form.offset
    found = (lax.shift_right_logical(words, jnp.int32(shift)) & mask) | MAGIC
    return lax.bitcast_convert_type(found, jnp.float32) - jnp.float32(2**23 + offset)


def _small_floats(words: Array, shift: int, bits: int, mantissa: int, bias: int) -> Array:
    """Return the numbers of codes of `bits` bits: a sign, an exponent, and a mantissa.

    The smallest exponent has no leading one: as if it had one and the next exponent, less that one.
    """
    code = lax.shift_right_logical(words, jnp.int32(shift))
    magnitude = code & ((1 << (bits - 1)) - 1)
    exponent = jnp.int32((127 - bias) << 23)
    is_small = magnitude < (1 << mantissa)
    found = (magnitude << (23 - mantissa)) + exponent
    found = jnp.where(is_small, found + (1 << 23), found)
    lead = jnp.where(is_small, jnp.float32(2.0 ** (1 - bias)), jnp.float32(0))
    sign = (code << (32 - bits)) & jnp.int32(-(2**31))
    number = lax.bitcast_convert_type(found, jnp.float32) - lead
    return lax.bitcast_convert_type(lax.bitcast_convert_type(number, jnp.int32) | sign, jnp.float32)


_VALUES: Mapping[str, Callable[[Array, int, WeightFormat], Array]] = {
    "integer": _integers,
    "e2m1": lambda words, shift, _: _small_floats(words, shift, 4, 1, 1),
    "e4m3": lambda words, shift, _: _small_floats(words, shift, 8, 3, 7),
}
