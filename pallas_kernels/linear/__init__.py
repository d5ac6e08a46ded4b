"""Multiply a matrix by the transpose of another on a CPU: quickly for few rows, and the same for any number of them."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from .kind import ACTIVATIONS, MIN_COLUMNS, MIN_GATES, MIN_ROWS, STEP_BYTES, Kind

__all__ = ["ACTIVATIONS", "Kind", "can_multiply", "linear", "prepare"]


def can_multiply(
    shape: tuple[int, ...], dtype: DTypeLike, activation: str | None = None, *, is_gated: bool = True
) -> bool:
    """Say whether there is a kernel for x of a dtype, weights [n, k] of it or int8, and the activation if any."""
    (n, k), dtype = shape, jnp.dtype(dtype)
    has_rows = n >= MIN_COLUMNS and activation in (None, *ACTIVATIONS)
    if activation is not None and is_gated:
        has_rows = has_rows and n % 2 == 0 and n >= 2 * MIN_GATES
    return has_rows and dtype in (jnp.bfloat16, jnp.float32) and k * dtype.itemsize % STEP_BYTES == 0


def linear(
    x_tk: Array,
    w_lnk: Array,
    layer: Array | int,
    out_dtype: DTypeLike,
    *,
    scales_ln: Array | None = None,
    num_rows: Array | int | None = None,
    activation: str | None = None,
    is_gated: bool = True,
    plus_tn: Array | None = None,
    bias_n: Array | None = None,
) -> Array:
    """Return x @ w[layer].T, added up in float32, [t, n]; `can_multiply` must hold. No row depends on the others.

    If w is int8, its rows are multiplied by `scales_ln`, float32.
    Only the first `num_rows` rows of x are multiplied, if given; others become 0, or what multiplying gives. With one
    of `ACTIVATIONS` it is the gated product [t, n / 2]: activation of the first half of the columns, times the second.
    If it is not gated, `plus_tn` and `bias_n`, both of the result's dtype, are added, and the activation is that of the
    sum, before the result is rounded.
    """
    t, padding, n = x_tk.shape[0], max(0, MIN_ROWS - x_tk.shape[0]), w_lnk.shape[1]
    kind = Kind(x_tk.dtype, w_lnk.dtype, out_dtype, activation, is_gated)
    name = prepare(kind)
    out_shape = (t + padding, n // 2 if activation and is_gated else n)
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(out_shape, out_dtype))
    numbers = (jnp.asarray(number, jnp.int32) for number in (layer, t if num_rows is None else num_rows))

    def pad(rows: Array) -> Array:
        return jnp.pad(rows, ((0, padding), (0, 0)))

    plus = jnp.zeros((0, n), out_dtype) if plus_tn is None else pad(plus_tn)
    bias = jnp.zeros(0, out_dtype) if bias_n is None else bias_n
    scales = [] if scales_ln is None else [scales_ln]
    return call(pad(x_tk), w_lnk, *numbers, plus, bias, *scales)[:t]


def prepare(kind: Kind, folder: Path | None = None) -> str:
    """Compile a kernel, kept in a folder, and return its name.

    A program that another process compiled needs it when it is loaded.
    """
    from pallas_kernels.native.compiling import register

    from .kernel import Kernel

    return register(kind.name, Kernel(kind), folder)
