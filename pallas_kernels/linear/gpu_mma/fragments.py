"""Rows of x as the right operands of mmas, in the order in which threads hold them.

A thread of a warp has 4 numbers of 8 rows and 16 inputs. Where a tile has 16 rows or more, those of two times 8 rows
lie side by side, so that a thread loads 16 bytes at a time.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import ir, vector
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..gpu.sizes import DEPTH

_ROWS, _LANES, _NUMBERS = 8, 32, 4
"""The rows of a fragment, the threads that hold it, and the numbers that each of them has."""


def _together(rows: int) -> int:
    """Return the number of fragments that lie side by side in tiles of `rows` rows."""
    return min(2, rows // _ROWS)


def fragments_shape(rows: int, depth: int) -> tuple[int, int]:
    """Return the shape of the fragments of a tile's rows and of `depth` inputs."""
    together = _together(rows)
    return depth // DEPTH * rows // (_ROWS * together), _LANES * _NUMBERS * together


def as_fragments(x_tk: Array, rows: int, depth: int) -> Array:
    """Return fragments [row tiles, pieces, *fragments_shape] of x, whose pieces have `depth` numbers of a row."""
    together = _together(rows)
    by_number = x_tk.reshape(
        -1, rows // (_ROWS * together), together, _ROWS, x_tk.shape[1] // depth, depth // DEPTH, 2, 4, 2
    )
    ordered = by_number.transpose(0, 4, 5, 1, 3, 7, 2, 6, 8)
    return ordered.reshape(*ordered.shape[:2], *fragments_shape(rows, depth))


def load_operand(ref: Any, rows: int, operand: Any, interpret: bool) -> Array:
    """Return the right operand [inputs, rows] that fragments in shared memory are, in the layout `operand`."""
    together = _together(rows)
    shape = ref.shape[0] * _ROWS * together // rows * DEPTH, rows
    if interpret:
        by_number = ref[...].reshape(-1, rows // (_ROWS * together), _ROWS, 4, together, 2, 2)
        return by_number.transpose(0, 5, 3, 6, 1, 4, 2).reshape(shape)
    tiling = plgpu.Tiling(((1, _LANES * _NUMBERS * together), (_NUMBERS * together,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1)
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(ref.dtype), layout=operand)
    inline: Any = plgpu.inline_mgpu(arg_types=(layout,), return_type=result)

    @inline
    def reorder(_: Any, x: Any) -> Any:
        words = ir.VectorType.get((2 * together,), ir.IntegerType.get_signless(32))
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        registers = []
        for loaded in x.registers.flat:
            bits = mgpu.utils.bitcast(loaded, words)
            parts = [vector.extract(bits, dynamic_position=[], static_position=[i]) for i in range(2 * together)]
            registers += [mgpu.utils.bitcast(part, pair) for part in parts]
        shape = operand.to_mgpu().registers_shape(result.shape)
        return mgpu.FragmentedArray(
            _registers=np.array(registers, object).reshape(shape), _layout=operand.to_mgpu(), _is_signed=None
        )

    return reorder(plgpu.load(ref, layout=layout, optimized=False))
