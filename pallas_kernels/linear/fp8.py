"""Matmuls in float8 by cuBLASLt: rows of x are rounded to e4m3 as well, for weights that are e4m3.

XLA makes one call of cuBLASLt of a product of two e4m3 matrices, on NVIDIA's GPUs of compute capability 8.9 and later.
Elsewhere it widens both, which gives the same result.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.weights.held import Quantized

from .shape import LinearShape
from .xla import finish

_LARGEST = 448.0
"""The largest number of e4m3."""
_TINY = 2.0**-100
"""The magnitude up to which numbers are rounded to 0."""
_FIRST_ARCHITECTURE = (8, 9)


def fp8_linear(
    x_ti: Array,
    weight: Quantized,
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
    """See `Linear`; rows are rounded by `round_rows`, and all are multiplied. There is nothing to interpret."""
    del num_rows, interpret
    rounded_ti, scales_t1 = round_rows(x_ti)
    held = weight.map(lambda stack: lax.dynamic_index_in_dim(stack, layer, keepdims=False))
    # With less precision cuBLASLt would keep sums of float8 products in fewer bits than float32's.
    sums_to = jnp.einsum(
        "ti,oi->to", rounded_ti, held.codes, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    out_to = (sums_to * (scales_t1 * held.scales.reshape(1, -1))).astype(out_dtype)
    return finish(out_to, activation, plus_to, bias_o, is_gated=is_gated)


def round_rows(x_ti: Array) -> tuple[Array, Array]:
    """Return rows [t, i] in e4m3, divided by scales, and the float32 scales [t, 1].

    A row's largest magnitude becomes e4m3's. The scale of a row of zeros is 1, and that of a row of tiny numbers too,
    since a subnormal scale may count as 0.
    """
    largest_t1 = jnp.max(jnp.abs(x_ti), axis=1, keepdims=True).astype(jnp.float32)
    scales_t1 = jnp.where(largest_t1 > _TINY, largest_t1 / _LARGEST, 1.0)
    # Rounding may take a quotient beyond the largest number, which is then NaN.
    quotients_ti = jnp.clip(x_ti.astype(jnp.float32) / scales_t1, -_LARGEST, _LARGEST)
    return quotients_ti.astype(jnp.float8_e4m3fn), scales_t1


def refusal(shape: LinearShape) -> str | None:
    """Return why a matmul cannot be rounded to float8, or None if it can."""
    form = shape.format
    if form is None or form.values != "e4m3" or form.group is not None:
        return "its weights are not float8 (e4m3) with a scale for each tensor or output"
    if shape.num_inputs % 16 or shape.num_outputs % 16:
        return f"inputs and outputs must be multiples of 16, not {shape.num_inputs} and {shape.num_outputs}"
    return None


def fp8_device_refusal(architecture: str | None) -> str | None:
    """Return why a GPU of this compute capability does not multiply in float8, or None if it does."""
    major, _, minor = (architecture or "").partition(".")
    if major.isdigit() and minor.isdigit() and (int(major), int(minor)) >= _FIRST_ARCHITECTURE:
        return None
    return f"float8 needs an NVIDIA GPU of compute capability 8.9 or later, and this device has {architecture}"
