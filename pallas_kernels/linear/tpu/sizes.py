"""The TPU kernel is compiled for these sizes."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.weights import WeightFormat

LANES = 128
VMEM_LIMIT = 56 * 2**20
BLOCK_BYTES = 8 * 2**20
"""The most bytes of a block of rows, and of one of widened weights."""
MOST_ROWS, MOST_OUTPUTS, LEAST_OUTPUTS = 512, 512, 64


class Sizes(NamedTuple):
    """The shape of a block of the result."""

    rows: int
    outputs: int


def choose_sizes(num_rows: int, num_outputs: int, num_inputs: int, dtype: DTypeLike, form: WeightFormat) -> Sizes:
    """Return blocks that fit in VMEM: all inputs of some rows, and of some outputs."""
    row_bytes = num_inputs * jnp.dtype(dtype).itemsize
    del form
    rows, outputs = MOST_ROWS, MOST_OUTPUTS
    while rows * row_bytes > BLOCK_BYTES or rows // 2 >= max(num_rows, 16):
        rows //= 2
    while outputs * row_bytes > BLOCK_BYTES:
        outputs //= 2
    return Sizes(min(rows, -(-num_rows // 8) * 8), min(outputs, num_outputs))
