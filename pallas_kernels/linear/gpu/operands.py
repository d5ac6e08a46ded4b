"""Weights and rows in the layout that the kernel takes."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.weights import WeightFormat
from pallas_kernels.weights.held import Quantized

from .sizes import DEPTH, codes_per_word, piece


def as_words(weight: Quantized) -> Array:
    """Return the codes of matrices [*lead, o, i] as int32 words [matrices, o, words]; nothing is moved.

    Raises ValueError for codes in another layout than a GPU's.
    """
    codes, per_word = weight.codes, codes_per_word(weight.format)
    if weight.is_packed or codes.dtype.itemsize != 1 or (per_word == 8) != (codes.dtype == jnp.uint4):
        raise ValueError(f"linear: a GPU takes 4-bit codes as uint4 and others a byte each, not {codes.dtype}")
    by_word = codes.reshape(
        -1, codes.shape[-2], codes.shape[-1] // codes_per_word(weight.format), codes_per_word(weight.format)
    )
    return lax.bitcast_convert_type(by_word, jnp.int32)


def in_kernel_order(x_ti: Array, form: WeightFormat, side_by_side: int = 1, *, overlaps: bool = False) -> Array:
    """Return rows in the order in which the kernel multiplies, [t, pieces * depth].

    16 numbers that an operand has at a time come from four words. The thread with the first word has the numbers 0, 1,
    8 and 9: its codes 0 and 4, 1 and 5 of 8; the next 16 numbers are the other codes. Words of 4 codes have 16
    numbers. Where groups have mins, 16 numbers with sums of inputs end each piece. Inputs that the last piece lacks are
    0: those after the row's, or, if it overlaps the piece before, those that this has.

    Args:
      x_ti: rows.
      form: the weights' format.
      side_by_side, overlaps: as in `Operands` and `Parts`.
    """
    num_rows, per_word, lacking = len(x_ti), codes_per_word(form), -x_ti.shape[1] % piece(form)
    if overlaps and lacking:
        before, after = jnp.split(x_ti, [x_ti.shape[1] + lacking - piece(form)], axis=1)
        padded = jnp.concatenate([before, jnp.zeros((num_rows, lacking), x_ti.dtype), after], axis=1)
    else:
        padded = jnp.pad(x_ti, ((0, 0), (0, lacking)))
    # Axes: rows, pieces, tiles in two axes with the words between, the half of a word's codes, which is that of a
    # register, planes, registers.
    tiles = DEPTH // 4 // side_by_side
    by_code = padded.reshape(num_rows, -1, tiles, 4, side_by_side, 2, per_word // 4, 2)
    ordered = by_code.transpose(0, 1, 2, 4, 6, 7, 3, 5).reshape(num_rows, -1, piece(form))
    if form.has_mins:
        ordered = jnp.concatenate([ordered, _sums(padded, form)], axis=2)
    return ordered.reshape(num_rows, -1)


def _sums(x_ti: Array, form: WeightFormat) -> Array:
    """Return sums over the groups of each piece, [t, pieces, 16].

    A group's thread has the sum as three bfloat16 numbers, for its min, and the first once more, for what the min
    lacks. Halves are added, so the order is the same for any number of rows; that of a reduction of XLA need not be.
    """
    length = min(form.group or piece(form), piece(form))
    sums = x_ti.astype(jnp.float32).reshape(len(x_ti), -1, piece(form) // length, length)
    while sums.shape[-1] > 1:
        sums = jnp.add(*jnp.split(sums, 2, axis=-1))
    sums = sums[..., 0]
    parts = []
    for _ in range(3):
        # XLA would remove a conversion back and forth.
        part = lax.reduce_precision(sums, exponent_bits=8, mantissa_bits=7)
        parts.append(part)
        sums = sums - part
    slots = jnp.stack([*parts, parts[0]], axis=-1).astype(x_ti.dtype)
    slots = jnp.pad(slots, ((0, 0), (0, 0), (0, 4 - slots.shape[2]), (0, 0)))
    return slots.reshape(*slots.shape[:3], 2, 2).transpose(0, 1, 3, 2, 4).reshape(*slots.shape[:2], DEPTH)
