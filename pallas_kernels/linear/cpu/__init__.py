"""The matmul on a CPU: quick for few rows, and the same for any number of them."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.weights.held import Quantized

from ..shape import LinearShape
from .kind import ACTIVATIONS, MIN_COLUMNS, MIN_GATES, MIN_ROWS, STEP_BYTES, Kind

__all__ = ["Kind", "can_multiply", "cpu_linear", "cpu_prepare", "cpu_refusal"]


def cpu_refusal(shape: LinearShape) -> str | None:
    """Say why there is no kernel for a matmul, None if there is."""
    form = shape.format
    if form is not None and (form.group is not None or form.values != "integer"):
        return "there is no kernel for this format"
    if not can_multiply((shape.num_outputs, shape.num_inputs), shape.dtype, shape.activation, is_gated=shape.is_gated):
        return "a row of weights must be a multiple of 64 bytes in x's dtype, and there must be a few"
    from pallas_kernels.native.compiling import refuse

    return refuse()


def cpu_prepare(shape: LinearShape, folder: Path | None) -> None:
    """Compile the kernel of a matmul, kept in a folder."""
    _prepare(_kind(shape), folder)


def can_multiply(
    shape: tuple[int, ...], dtype: DTypeLike, activation: str | None = None, *, is_gated: bool = True
) -> bool:
    """Say whether there is a kernel for x of a dtype, weights [n, k] of it or int8, and the activation if any."""
    (n, k), dtype = shape, jnp.dtype(dtype)
    has_rows = n >= MIN_COLUMNS and activation in (None, *ACTIVATIONS)
    if activation is not None and is_gated:
        has_rows = has_rows and n % 2 == 0 and n >= 2 * MIN_GATES
    return has_rows and dtype in (jnp.bfloat16, jnp.float32) and k * dtype.itemsize % STEP_BYTES == 0


def cpu_linear(
    x_ti: Array,
    weight: Array | Quantized,
    layer: Array | int,
    *,
    out_dtype: DTypeLike,
    num_rows: Array | int | None = None,
    activation: str | None = None,
    is_gated: bool = True,
    plus_to: Array | None = None,
    bias_o: Array | None = None,
    interpret: bool = False,
) -> Array:
    """See `Linear`; there is nothing to interpret. Rows that do not count become 0, or what multiplying gives."""
    del interpret
    t, padding, n = x_ti.shape[0], max(0, MIN_ROWS - x_ti.shape[0]), weight.shape[1]
    values, scales = (weight.codes, [weight.scales]) if isinstance(weight, Quantized) else (weight, [])
    kind = Kind(x_ti.dtype, values.dtype, out_dtype, activation, is_gated)
    out_shape = (t + padding, n // 2 if activation and is_gated else n)
    call = jax.ffi.ffi_call(_prepare(kind, None), jax.ShapeDtypeStruct(out_shape, out_dtype))
    numbers = (jnp.asarray(number, jnp.int32) for number in (layer, t if num_rows is None else num_rows))

    def pad(rows: Array) -> Array:
        return jnp.pad(rows, ((0, padding), (0, 0)))

    plus = jnp.zeros((0, n), out_dtype) if plus_to is None else pad(plus_to)
    bias = jnp.zeros(0, out_dtype) if bias_o is None else bias_o
    return call(pad(x_ti), values, *numbers, plus, bias, *(each.reshape(-1, n) for each in scales))[:t]


def _kind(shape: LinearShape) -> Kind:
    weight_dtype = shape.dtype if shape.format is None else shape.format.code_dtype
    return Kind(shape.dtype, weight_dtype, shape.out_dtype, shape.activation, shape.is_gated)


def _prepare(kind: Kind, folder: Path | None) -> str:
    """Return XLA's name for the kernel, which is compiled."""
    from pallas_kernels.native.compiling import register

    from .kernel import Kernel

    return register(kind.name, Kernel(kind), folder)
