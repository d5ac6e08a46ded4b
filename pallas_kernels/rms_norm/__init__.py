"""Root-mean-square norm on a CPU, one row at a time."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

LANES = 16


def can_norm(size: int, dtype: DTypeLike) -> bool:
    """Return whether there is a kernel for rows of this size."""
    return jnp.dtype(dtype) in (jnp.bfloat16, jnp.float32) and size % LANES == 0


def rms_norm(
    x_td: Array, scale_ld: Array, layer: Array | int, *, eps: float, offset: float, num_rows: Array | int | None = None
) -> Array:
    """Return x / sqrt(mean(x ** 2) + eps) * (scale[layer] + offset) by rows, computed in float32, in x's dtype.

    `can_norm` must hold. Only the first `num_rows` rows are normed, or all if None; others become 0.
    """
    dtype = jnp.dtype(x_td.dtype)
    call = jax.ffi.ffi_call(prepare(dtype), jax.ShapeDtypeStruct(x_td.shape, dtype))
    rows = jnp.asarray(x_td.shape[0] if num_rows is None else num_rows, jnp.int32)
    scale = scale_ld.astype(dtype)
    return call(x_td, scale, jnp.asarray(layer, jnp.int32), rows, jnp.float32(eps), jnp.float32(offset))


def prepare(dtype: DTypeLike, folder: Path | None = None) -> str:
    """Compile the kernel, kept in a folder, and return its name.

    A program that another process compiled needs it when it is loaded.
    """
    from pallas_kernels.native.compiling import register

    from .kernel import Kernel

    return register(f"rms_norm_{jnp.dtype(dtype).name}", Kernel(dtype), folder)
