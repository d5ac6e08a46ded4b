"""The matmul in plain XLA, for platforms and shapes without a kernel of their own.

A matrix product by quantized weights writes them to memory in x's dtype first, and that of one row by bfloat16 weights
with a float32 result writes them in float32 on a GPU. So there a few rows are sums of products instead: XLA makes one
kernel of them that reads the weights once and widens them in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.weights.held import Quantized

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}
SUMMED_ROWS = 8
"""The most rows that a GPU multiplies by quantized weights as sums of products; with more, arithmetic takes longer than
writing and reading the widened weights would."""


def xla_linear(
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
    """See `Linear`; all rows are multiplied, and there is nothing to interpret."""
    del num_rows, interpret

    def one(stack: Array) -> Array:
        return lax.dynamic_index_in_dim(stack, layer, keepdims=False)

    arguments = x_ti, weight.map(one) if isinstance(weight, Quantized) else one(weight)
    multiply, summed = (partial(function, out_dtype=out_dtype) for function in (_multiply, multiply_few))
    if 0 < len(x_ti) <= (SUMMED_ROWS if isinstance(weight, Quantized) else 1):
        out_to = lax.platform_dependent(*arguments, cuda=summed, default=multiply)
    else:
        out_to = multiply(*arguments)
    return finish(out_to, activation, plus_to, bias_o, is_gated=is_gated)


def _dot(x_ti: Array, w_oi: Array, dtype: DTypeLike) -> Array:
    precision = lax.Precision.HIGHEST if x_ti.dtype == jnp.float32 else None
    return jnp.einsum("ti,oi->to", x_ti, w_oi, precision=precision, preferred_element_type=dtype)


def _multiply(x_ti: Array, weight: Array | Quantized, *, out_dtype: DTypeLike) -> Array:
    """Return the product of rows and weights [o, i]; quantized ones are widened to x's dtype."""
    if not isinstance(weight, Quantized):
        return _dot(x_ti, weight, out_dtype) if weight.dtype == x_ti.dtype else _dot_in_parts(x_ti, weight, out_dtype)
    w_oi = weight.numbers().astype(x_ti.dtype)
    if not weight.format.scales_rows:
        return _dot(x_ti, w_oi, out_dtype)
    return (_dot(x_ti, w_oi, jnp.float32) * weight.scales.reshape(1, -1)).astype(out_dtype)


def multiply_few(x_ti: Array, weight: Array | Quantized, *, out_dtype: DTypeLike) -> Array:
    """Return the product of a few rows and weights [o, i], as a sum of float32 products for each result.

    All rows are one reduction: a kernel then reads each weight once, however many rows there are.
    """
    w_oi = weight.numbers() if isinstance(weight, Quantized) else weight.astype(jnp.float32)
    products = tuple(w_oi * x_1i.astype(jnp.float32) for x_1i in x_ti[:, None])

    def add(sums: tuple[Array, ...], terms: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(total + term for total, term in zip(sums, terms, strict=True))

    sums_to = jnp.stack(lax.reduce(products, (jnp.float32(0),) * len(products), add, (1,)))
    if isinstance(weight, Quantized) and weight.format.scales_rows:
        sums_to = sums_to * weight.scales.reshape(1, -1)
    return sums_to.astype(out_dtype)


def _dot_in_parts(x_ti: Array, w_oi: Array, dtype: DTypeLike) -> Array:
    """Return the product [t, o] of bfloat16 rows and float32 weights, as exact as if both were float32.

    A weight is the sum of three bfloat16 numbers, and their products with x are exact. A matrix unit multiplies by them
    directly; GPUs and TPUs multiply in float32 many times slower.
    """
    parts, rest_oi = [], w_oi
    for _ in range(3):
        # XLA would remove a conversion back and forth.
        part_oi = lax.reduce_precision(rest_oi, exponent_bits=8, mantissa_bits=7)
        parts.append(part_oi.astype(jnp.bfloat16))
        rest_oi = rest_oi - part_oi
    sums_tpo = jnp.einsum("ti,poi->tpo", x_ti, jnp.stack(parts), preferred_element_type=jnp.float32)
    return (sums_tpo[:, 0] + (sums_tpo[:, 1] + sums_tpo[:, 2])).astype(dtype)


def finish(
    out_to: Array, activation: str | None, plus_to: Array | None, bias_o: Array | None, *, is_gated: bool
) -> Array:
    """Return the result of `Linear` from a product."""
    if plus_to is not None:
        out_to = plus_to + out_to
    if bias_o is not None:
        out_to = out_to + bias_o[None]
    if activation is None:
        return out_to
    if not is_gated:
        return ACTIVATIONS[activation](out_to)
    gate_to, gated_to = jnp.split(out_to, 2, axis=1)
    return ACTIVATIONS[activation](gate_to) * gated_to
