"""Norm of mean and variance on a CPU, one row at a time."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.rms_norm import can_norm

__all__ = ["can_norm", "layer_norm", "prepare"]


def layer_norm(
    x_td: Array,
    scale_ld: Array,
    bias_ld: Array | None,
    layer: Array | int,
    *,
    eps: float,
    num_rows: Array | int | None = None,
) -> Array:
    """Return (x - mean(x)) / sqrt(var(x) + eps) * scale[layer] + bias[layer] by rows.

    It is computed in float32 and returned in x's dtype. `can_norm` must hold. Only the first `num_rows` rows are
    normed, or all if None; others become 0.
    """
    dtype, d = jnp.dtype(x_td.dtype), x_td.shape[1]
    call = jax.ffi.ffi_call(prepare(dtype), jax.ShapeDtypeStruct(x_td.shape, dtype))
    rows = jnp.asarray(x_td.shape[0] if num_rows is None else num_rows, jnp.int32)
    bias = jnp.zeros((0, d), dtype) if bias_ld is None else bias_ld.astype(dtype)
    return call(x_td, scale_ld.astype(dtype), jnp.asarray(layer, jnp.int32), rows, jnp.float32(eps), bias)


def prepare(dtype: DTypeLike, folder: Path | None = None) -> str:
    """Compile the kernel, kept in a folder, and return its name.

    A program that another process compiled needs it when it is loaded.
    """
    from pallas_kernels.native.compiling import register

    from .kernel import Kernel

    return register(f"layer_norm_{jnp.dtype(dtype).name}", Kernel(dtype), folder)
