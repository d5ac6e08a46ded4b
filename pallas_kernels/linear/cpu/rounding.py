"""Which matmuls can be those of rows rounded to 8 bits: weights are integers, and multiplying those is faster."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.native import processor
from pallas_kernels.weights import CODEBOOKS, WeightFormat
from pallas_kernels.weights.format import CHUNK

from ..shape import LinearShape

MAX_NUMBER = 127
"""The largest number of a row that is rounded to 8 bits."""
INPUT_GROUP = 32
"""How many numbers of a row share a scale."""
MIN_COLUMNS = 16
"""The fewest columns of y: a vector of them."""
MAX_WORD = 2**15 - 1
MIN_PAIRS = 2
"""How many sums of two products must fit into 16 bits, where that is how they are added up; else it does not pay."""
SIGN = 128
"""What is added to signed codes of 8 bits."""
HALF = 0.5
"""Of which the numbers of e2m1 are multiples."""


class Integers(NamedTuple):
    """What the codes of a format become: integers that are not negative."""

    largest: int
    offset: int
    """What they are too large by."""
    unit: float
    """What 1 stands for, before it is scaled."""

    @property
    def pairs_in_words(self) -> int:
        """Return how many sums of two of their products fit into 16 bits."""
        return MAX_WORD // (2 * MAX_NUMBER * self.largest)


def integers_of(form: WeightFormat) -> Integers:
    """Return what the codes of a format become that stand for integers, or multiples of something."""
    if form.values in CODEBOOKS:
        table = form.table() / HALF
        return Integers(int(table.max() - table.min()), int(-table.min()), HALF)
    return Integers(2**form.bits - 1, SIGN if form.bits == 8 else form.offset, 1.0)


def rounding_refusal(shape: LinearShape) -> str | None:
    """Say why a matmul that the kernel takes is none of rows rounded to 8 bits, None if it is one."""
    form = shape.format
    if form is None or form.is_half:
        return "its weights are not quantized"
    if form.values not in ("integer", "e2m1"):
        return f"its weights are {form.values}, which are no multiples of a scale"
    if shape.num_columns < MIN_COLUMNS or shape.num_inputs % CHUNK:
        return f"it must have at least {MIN_COLUMNS} outputs and a multiple of {CHUNK} inputs"
    own = processor.current()
    if own.has_int8_dot or (own.is_x86 and integers_of(form).pairs_in_words >= MIN_PAIRS):
        return None
    if own.is_x86:
        return f"without VNNI, codes of {form.bits} bits are multiplied no faster than floats"
    return "the processor has no instruction for products of 8-bit integers (i8mm)"
