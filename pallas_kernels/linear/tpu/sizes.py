"""The sizes that the TPU kernels are compiled for."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from ..shape import LinearShape

LANES = 128
VMEM_LIMIT = 56 * 2**20
_BLOCK_BYTES = 8 * 2**20
"""The most bytes of a block of rows, and of one of widened weights."""
WIDEN_ROWS = 64
"""The number of outputs that are widened at a time: a tile of 4-bit codes."""
_MOST_ROWS, _MOST_OUTPUTS = 512, 512
FEW_ROWS = 64
"""The most rows that are multiplied by codes; more are multiplied by widened weights."""
CHUNKS_AT_ONCE = 2
"""The number of chunks of 128 inputs that an iteration over them takes, for few rows."""
_FEW_BYTES = 2**23
"""The bytes of a block of codes, at a byte each."""


class Sizes(NamedTuple):
    """The shape of a block of the result."""

    rows: int
    outputs: int


def choose_sizes(num_rows: int, num_outputs: int, num_inputs: int, dtype: DTypeLike) -> Sizes:
    """Return blocks that fit in VMEM: all inputs of some rows, and of some outputs."""
    row_bytes = num_inputs * jnp.dtype(dtype).itemsize
    rows, outputs = _MOST_ROWS, _MOST_OUTPUTS
    while rows * row_bytes > _BLOCK_BYTES or rows // 2 >= max(num_rows, 16):
        rows //= 2
    while outputs * row_bytes > _BLOCK_BYTES:
        outputs //= 2
    return Sizes(rows, min(outputs, num_outputs))


def few_outputs(num_outputs: int, num_inputs: int) -> int:
    """Return the number of outputs of a block for few rows."""
    outputs = _MOST_OUTPUTS
    while outputs * num_inputs > _FEW_BYTES and outputs > LANES:
        outputs //= 2
    return min(outputs, num_outputs)


def refusal(shape: LinearShape) -> str | None:
    """Return why the kernel cannot run a matmul, or None if it can."""
    form, dtype = shape.format, jnp.dtype(shape.dtype)
    if form is None or form.group is None:
        return "plain XLA widens weights without groups in the matmul, if at all"
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"rows must be bfloat16 or float32, not {dtype.name}"
    if form.values in ("nf4", "e5m2"):
        return f"there is no widening of {form.values} codes"
    if shape.num_inputs % LANES or shape.num_outputs % WIDEN_ROWS:
        return (
            f"inputs must be a multiple of {LANES} and outputs of {WIDEN_ROWS}, "
            f"not {shape.num_inputs} and {shape.num_outputs}"
        )
    if LANES % form.group and form.group % LANES:
        return f"groups of {form.group} numbers are no multiple and no part of {LANES}"
    return None
