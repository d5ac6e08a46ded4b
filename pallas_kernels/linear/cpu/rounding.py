"""Decide which matmuls can round rows of x to 8 bits: the weights must be small integers times a scale."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.native import processor
from pallas_kernels.weights import CODEBOOKS, WeightFormat
from pallas_kernels.weights.format import CHUNK

from ..shape import LinearShape

MAX_NUMBER = 127
"""The largest number of a row that is rounded to 8 bits."""
INPUT_GROUP = 32
"""The number of numbers of a row that share a scale."""
_MIN_OUTPUTS = 16
"""The fewest columns of y: a vector of them."""
_MAX_GROUP = 1024
"""The most inputs of a group: whole groups are multiplied at a time, and their codes lie on the stack. A scale for a
whole row does not count as a group."""
_MAX_WORD = 2**15 - 1
_MIN_PAIRS = 2
"""The number of sums of two products that must fit into 16 bits, where they are added up like that; with fewer it does
not pay."""
SIGN = 128
"""The number added to signed codes of 8 bits."""
_HALF = 0.5
"""The numbers of e2m1 are multiples of this."""


class Integers(NamedTuple):
    """The integers that a format's codes become, which are not negative."""

    largest: int
    offset: int
    """The number subtracted from them to get signed values."""
    unit: float
    """The value of 1, before the weights' scale."""

    @property
    def pairs_in_words(self) -> int:
        """Return the number of sums of two of their products that fit into 16 bits."""
        return _MAX_WORD // (2 * MAX_NUMBER * self.largest)


def integers_of(form: WeightFormat) -> Integers:
    """Return the unsigned integers that represent a format's codes, with values "integer" or "e2m1"."""
    if form.values in CODEBOOKS:
        table = form.table() / _HALF
        return Integers(int(table.max() - table.min()), int(-table.min()), _HALF)
    return Integers(2**form.bits - 1, SIGN if form.bits == 8 else form.offset, 1.0)


def rounding_refusal(shape: LinearShape) -> str | None:
    """Return why a matmul that the kernel takes cannot round rows to 8 bits, or None if it can."""
    form = shape.format
    if form is None or form.is_half:
        return "its weights are not quantized"
    if form.values not in ("integer", "e2m1"):
        return f"its weights are {form.values}, whose values are not evenly spaced"
    if shape.num_columns < _MIN_OUTPUTS or shape.num_inputs % CHUNK:
        return f"it must have at least {_MIN_OUTPUTS} outputs and a multiple of {CHUNK} inputs"
    if (form.group or 0) > _MAX_GROUP:
        return f"more than {_MAX_GROUP} of its inputs share a scale"
    present = processor.current()
    if present.name == "plain":
        return "there are no kernels for the processor"
    if present.has_int8_dot or (present.is_x86 and integers_of(form).pairs_in_words >= _MIN_PAIRS):
        return None
    if present.is_x86:
        return f"without VNNI, codes of {form.bits} bits are multiplied no faster than floats"
    return "the processor has no instruction for products of 8-bit integers (i8mm)"
