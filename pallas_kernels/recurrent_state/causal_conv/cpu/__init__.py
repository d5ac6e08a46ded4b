"""The convolution on a CPU: one kernel for decodes and chunks (`kernel.py`), called from JAX."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.native.compiling import register
from pallas_kernels.recurrent_state import StateBatch
from pallas_kernels.recurrent_state.cpu.call import call_kernel, refuse_dtype

from ..shape import ConvShape
from .kernel import Kernel


def cpu_refusal(shape: ConvShape) -> str | None:
    """Return why the kernel cannot run a shape, or None if it can."""
    if shape.num_channels % 16:
        return f"num_channels must be a multiple of 16, not {shape.num_channels}"
    return refuse_dtype(shape.dtype)


def cpu_prepare(shape: ConvShape, folder: Path | None = None) -> str:
    """Compile the kernel, kept in a folder, and return its name."""
    return register(f"causal_conv_{shape[0]}_{shape[1]}_{shape.dtype.name}", Kernel(shape), folder)


def cpu_causal_conv(
    x_tc: Array,
    weight_kc: Array,
    pool: Array,
    batch: StateBatch,
    *,
    layer: Array | int,
    num_layers: int,
    bias_c: Array | None = None,
    activation: Literal["silu"] | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `CausalConv`; there is nothing to interpret."""
    del interpret
    num_channels, dtype = x_tc.shape[1], jnp.dtype(x_tc.dtype)
    shape = ConvShape(num_channels, len(weight_kc), dtype)
    bias_c = jnp.zeros(num_channels, dtype) if bias_c is None else bias_c
    return call_kernel(
        cpu_prepare(shape),
        pool,
        (x_tc, weight_kc, bias_c, jnp.int32(activation == "silu")),
        batch,
        jax.ShapeDtypeStruct(x_tc.shape, dtype),
        layer * (len(pool) // num_layers),
    )
