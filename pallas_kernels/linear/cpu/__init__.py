"""Multiply a matrix by the transpose of another on a CPU: quickly for few rows, and the same for any number of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.weights import WeightFormat

from .kind import ACTIVATIONS, MIN_COLUMNS, MIN_GATES, MIN_ROWS, STEP_BYTES, Kind, can_unpack

__all__ = ["ACTIVATIONS", "INT8", "Kind", "can_multiply", "cpu_linear", "packed_parts", "prepare"]

INT8 = WeightFormat(8, scale_dtype="float32")
"""Integers with a scale for each output."""


def can_multiply(
    shape: tuple[int, int],
    dtype: DTypeLike,
    activation: str | None = None,
    *,
    is_gated: bool = True,
    form: WeightFormat | None = None,
) -> bool:
    """Say whether there is a kernel for x of a dtype, weights [n, k] of it or a format, and the activation if any."""
    (n, k), dtype = shape, jnp.dtype(dtype)
    has_rows = n >= MIN_COLUMNS and activation in (None, *ACTIVATIONS)
    if activation is not None and is_gated:
        has_rows = has_rows and n % 2 == 0 and n >= 2 * MIN_GATES
    has_steps = dtype in (jnp.bfloat16, jnp.float32) and k * dtype.itemsize % STEP_BYTES == 0
    return has_rows and has_steps and (form is None or can_unpack(form, k))


def cpu_linear(
    x_tk: Array,
    parts: Mapping[str, Array] | Array,
    form: WeightFormat | None,
    layer: Array | int,
    out_dtype: DTypeLike,
    *,
    num_rows: Array | int | None = None,
    activation: str | None = None,
    is_gated: bool = True,
    plus_tn: Array | None = None,
    bias_n: Array | None = None,
) -> Array:
    """Return x @ w[layer].T, added up in float32, [t, n]; `can_multiply` must hold. No row depends on the others.

    The weights are numbers of x's dtype [l, n, k], or the parts of a format, packed, each [l, n, width]. The result is
    that of the numbers that they stand for, rounded to x's dtype, to the bit; a scale for each output multiplies the
    sum.
    Only the first `num_rows` rows of x are multiplied, if given; others become 0, or what multiplying gives. With one
    of `ACTIVATIONS` it is the gated product [t, n / 2]: activation of the first half of the columns, times the second.
    If it is not gated, `plus_tn` and `bias_n`, both of the result's dtype, are added, and the activation is that of the
    sum, before the result is rounded.
    """
    codes, *others = packed_parts(parts, form)
    t, padding, n = x_tk.shape[0], max(0, MIN_ROWS - x_tk.shape[0]), codes.shape[1]
    kind = Kind(x_tk.dtype, form, out_dtype, activation, is_gated)
    prepare(kind)
    out_shape = (t + padding, n // 2 if activation and is_gated else n)
    call = jax.ffi.ffi_call(kind.name, jax.ShapeDtypeStruct(out_shape, out_dtype))
    numbers = (jnp.asarray(number, jnp.int32) for number in (layer, t if num_rows is None else num_rows))

    def pad(rows: Array) -> Array:
        return jnp.pad(rows, ((0, padding), (0, 0)))

    plus = jnp.zeros((0, n), out_dtype) if plus_tn is None else pad(plus_tn)
    bias = jnp.zeros(0, out_dtype) if bias_n is None else bias_n
    return call(pad(x_tk), codes, *numbers, plus, bias, *others)[:t]


def packed_parts(parts: Mapping[str, Array] | Array, form: WeightFormat | None) -> list[Array]:
    """Return the arrays of weights as kernels take them, the codes first."""
    if form is None:
        assert isinstance(parts, Array)
        return [parts]
    assert isinstance(parts, Mapping)
    return [parts[name] for name in form.parts]


def prepare(kind: Kind, folder: Path | None = None) -> None:
    """Compile a kernel, kept in a folder. A program that another process compiled needs it when it is loaded."""
    from pallas_kernels.native.compiling import register

    from .kernel import Kernel

    register(kind.name, Kernel(kind), folder)
