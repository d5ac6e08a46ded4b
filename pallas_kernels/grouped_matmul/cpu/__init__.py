"""The grouped matmul on a CPU: the weights of each expert that has rows are read in place, as one stream."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.linear.cpu import Kind, arrays_of, can_multiply, dtype_refusal
from pallas_kernels.linear.cpu.kind import MIN_ROWS
from pallas_kernels.weights.held import Quantized

from ..groups import Groups
from ..shape import MatmulShape

ROW_ALIGNMENT = MIN_ROWS
"""The rows of the smallest tile, so that no tile has rows of two groups."""


def cpu_refusal(shape: MatmulShape) -> str | None:
    """Return why there is no kernel for a matmul, or None if there is."""
    if reason := dtype_refusal(shape.dtype, shape.out_dtype):
        return reason
    o, i = shape.num_outputs, shape.num_inputs
    if not can_multiply((o, i), shape.dtype, shape.activation, form=shape.format):
        return (
            f"a row of weights must be a multiple of 64 bytes in x's dtype, and there must be several, not [{o}, {i}]"
        )
    return None


def cpu_prepare(shape: MatmulShape, folder: Path | None) -> None:
    """Compile the kernel of a matmul."""
    _prepare(Kind(shape.dtype, shape.format, shape.out_dtype, shape.activation), folder)


def cpu_grouped_matmul(
    x_ri: Array,
    weight: Array | Quantized,
    layer: Array | int,
    groups: Groups,
    *,
    activation: str | None = None,
    out_dtype: DTypeLike,
    interpret: bool = False,
) -> Array:
    """See `GroupedMatmul`; there is nothing to interpret."""
    del interpret
    codes, *parts = arrays_of(weight)
    form = weight.format if isinstance(weight, Quantized) else None
    num_rows, num_outputs = x_ri.shape[0], codes.shape[2]
    if num_rows % ROW_ALIGNMENT:
        raise ValueError(f"grouped_matmul: x must have a multiple of {ROW_ALIGNMENT} rows, not {num_rows}")
    kind = Kind(x_ri.dtype, form, out_dtype, activation)
    out_shape = (num_rows, num_outputs // 2 if activation else num_outputs)
    call = jax.ffi.ffi_call(_prepare(kind, None), jax.ShapeDtypeStruct(out_shape, out_dtype))
    return call(x_ri, codes, jnp.asarray(layer, jnp.int32), *groups, *parts)


def _prepare(kind: Kind, folder: Path | None) -> str:
    """Compile the kernel and return XLA's name for it."""
    from pallas_kernels.native.compiling import register

    from .kernel import Kernel

    return register(f"grouped_{kind.name}", Kernel(kind), folder)
