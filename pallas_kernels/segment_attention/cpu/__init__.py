"""The kernel for a CPU, in LLVM IR, as a function of JAX arrays."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.native.compiling import register

from ..shape import SegmentShape
from .kernel import Kernel


def cpu_refusal(shape: SegmentShape) -> str | None:
    """Return why the kernel cannot run a shape, or None if it can."""
    if shape.head_dim % 8 or shape.head_dim > 256:
        return f"heads must be multiples of 8 numbers and at most 256, not {shape.head_dim}"
    if shape.dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype must be bfloat16 or float32, not {shape.dtype.name}"
    return None


def cpu_prepare(shape: SegmentShape, folder: Path | None = None) -> str:
    """Compile the kernel, kept in a folder, and return its name.

    A program that another process compiled needs it when it is loaded.
    """
    return register(f"segment_attention_{shape.num_heads}_{shape.head_dim}_{shape.dtype.name}", Kernel(shape), folder)


def cpu_segment_attention(
    q_pnh: Array, k_pnh: Array, v_pnh: Array, starts_p: Array, ends_p: Array, *, scale: float, longest: int
) -> Array:
    """See `SegmentAttention`."""
    del longest
    _, n, h = q_pnh.shape
    name = cpu_prepare(SegmentShape(n, h, jnp.dtype(q_pnh.dtype)))
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(q_pnh.shape, q_pnh.dtype))
    # In the order of `kernel.BUFFERS`.
    return call(q_pnh, k_pnh, v_pnh, starts_p, ends_p, jnp.float32(scale))
