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


def in_planes(x_ti: Array, form: WeightFormat) -> Array:
    """Return rows in the order of planes of codes, [planes, t, 16], with 0 for inputs beyond the last.

    First come the inputs of the first codes of 16 words, then those of the second codes, and so on.
    """
    padded = jnp.pad(x_ti, ((0, 0), (0, -x_ti.shape[1] % piece(form))))
    by_word = padded.reshape(len(x_ti), -1, DEPTH, codes_per_word(form))
    return by_word.transpose(1, 3, 0, 2).reshape(-1, len(x_ti), DEPTH)
