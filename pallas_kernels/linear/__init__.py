"""A matrix times the transpose of another on a CPU: quick for few rows, and the same for any number of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

MIN_ROWS = 4
"""Of x; fewer are padded."""
MIN_COLUMNS = 4
STEP_BYTES = 64
"""The kernel takes so much of a row at a time."""


def can_multiply(shape: tuple[int, ...], dtype: DTypeLike) -> bool:
    """Say whether there is a kernel for weights of this shape, [n, k]."""
    (n, k), dtype = shape, jnp.dtype(dtype)
    return dtype in (jnp.bfloat16, jnp.float32) and k * dtype.itemsize % STEP_BYTES == 0 and n >= MIN_COLUMNS


def linear(x_tk: Array, w_lnk: Array, layer: Array | int, out_dtype: DTypeLike) -> Array:
    """Return x @ w[layer].T, added up in float32, [t, n]; `can_multiply` must hold. No row depends on the others."""
    t, padding = x_tk.shape[0], max(0, MIN_ROWS - x_tk.shape[0])
    prepare(x_tk.dtype, out_dtype)
    call = jax.ffi.ffi_call(
        _name(x_tk.dtype, out_dtype), jax.ShapeDtypeStruct((t + padding, w_lnk.shape[1]), out_dtype)
    )
    return call(jnp.pad(x_tk, ((0, padding), (0, 0))), w_lnk, jnp.asarray(layer, jnp.int32))[:t]


def prepare(dtype: DTypeLike, out_dtype: DTypeLike, folder: Path | None = None) -> None:
    """Compile the kernel, kept in a folder. A program that another process compiled needs it when it is loaded."""
    from pallas_kernels.native.compiling import register

    from .kernel import Kernel

    register(_name(dtype, out_dtype), Kernel(dtype, out_dtype), folder)


def _name(dtype: Any, out_dtype: Any) -> str:
    return f"linear_{jnp.dtype(dtype).name}_{jnp.dtype(out_dtype).name}"
