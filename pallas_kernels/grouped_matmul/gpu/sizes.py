"""The sizes that the Hopper kernel is compiled for."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.linear import LinearShape
from pallas_kernels.linear.gpu import sizes as linear_sizes
from pallas_kernels.paged_attention.gpu.common import MMA_ROWS, SMEM_BYTES, SMEM_RESERVED, TILED_ROWS, WORKERS
from pallas_kernels.weights import WeightFormat

from ..shape import MatmulShape

ROW_SLAB = 16
"""The rows of a piece in which results are stored. Each expert's rows begin with a piece."""
_ROW_TILES = (16, 32, 64, 128)
"""The numbers of rows that a tile can have."""
_HALF_COLUMNS = (128, 64, 32)
DEPTH = 64
"""The inputs that are multiplied at a time: in bfloat16 the width of a swizzled tile."""
_MOST_STAGES = 12


class Sizes(NamedTuple):
    """How a call is divided."""

    rows: int
    """Rows of a tile."""
    columns: int
    """The columns of each half of a tile: of gates and of ups, or without an activation side by side."""
    stages: int
    """The number of pieces of tiles, `DEPTH` deep, that the ring holds."""
    workers: int = WORKERS
    """The number of thread blocks."""

    @property
    def consumers(self) -> int:
        """Return the number of warpgroups that multiply, 64 rows each; a tile with fewer rows wastes the rest."""
        return -(-self.rows // MMA_ROWS)


def choose_sizes(num_rows: int, num_experts: int, num_columns: int, out_dtype: DTypeLike) -> Sizes:
    """Return sizes for `num_rows`, padding included, that keep all SMs busy and fill their shared memory."""
    # The experts' rows without padding. A tile holds twice the mean, as some experts have more rows than others.
    num_choices = max(num_rows - (ROW_SLAB - 1) * num_experts, 1)
    rows = next((x for x in _ROW_TILES if 2 * num_choices <= x * num_experts), _ROW_TILES[-1])
    most_tiles = min(num_experts, num_rows // ROW_SLAB)
    columns = next((x for x in _HALF_COLUMNS if most_tiles * -(-num_columns // x) >= WORKERS), _HALF_COLUMNS[-1])
    sizes = Sizes(rows, columns, 1)
    out = sizes.consumers * MMA_ROWS * columns * jnp.dtype(out_dtype).itemsize
    stage = (sizes.consumers * MMA_ROWS + 2 * columns) * DEPTH * 2
    return sizes._replace(stages=min(_MOST_STAGES, (SMEM_BYTES - SMEM_RESERVED - out) // stage))


def quantized_sizes(
    num_rows: int, num_experts: int, num_outputs: int, num_inputs: int, form: WeightFormat
) -> linear_sizes.Sizes:
    """Return the linear kernel's sizes for `num_rows` of all experts, padding included, with undivided sums."""
    num_choices = max(num_rows - (ROW_SLAB - 1) * num_experts, 1)
    rows = next((x for x in _ROW_TILES if 2 * num_choices <= x * num_experts), _ROW_TILES[-1])
    return linear_sizes.choose_sizes(rows, num_outputs, num_inputs, form)._replace(parts=1, is_whole=True)


def refusal(shape: MatmulShape) -> str | None:
    """Return why the kernel cannot run a matmul, or None if it can."""
    if shape.format is not None:
        linear = LinearShape(shape.num_outputs, shape.num_inputs, shape.dtype, shape.out_dtype, shape.format)
        return linear_sizes.refusal(linear)
    if jnp.dtype(shape.dtype) != jnp.bfloat16:
        return f"rows and weights must be bfloat16, not {shape.dtype}"
    if shape.num_inputs % DEPTH or shape.num_columns % TILED_ROWS:
        return (
            f"inputs must be a multiple of {DEPTH} and columns of {TILED_ROWS}, "
            f"not {shape.num_inputs} and {shape.num_columns}"
        )
    return None
