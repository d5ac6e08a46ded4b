"""The scan of Mamba-2 on a CPU: one kernel for decodes and chunks (`kernel.py`), called from JAX."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.native.compiling import register
from pallas_kernels.recurrent_state import StateBatch
from pallas_kernels.recurrent_state.cpu.call import call_kernel, refuse_dtype
from pallas_kernels.recurrent_state.cpu.matrices import matrix_pool_spec

from ..shape import StateSpaceShape
from .kernel import Kernel


def cpu_refusal(shape: StateSpaceShape) -> str | None:
    """Return why the kernel cannot run a shape, or None if it can."""
    if shape.head_dim % 16 or shape.state_dim % 16:
        return f"head_dim and state_dim must be multiples of 16, not {shape.head_dim} and {shape.state_dim}"
    return refuse_dtype(shape.dtype)


def cpu_pool_spec(shape: StateSpaceShape, num_layers: int, num_slots: int) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a pool as the kernel has it."""
    return matrix_pool_spec(num_layers, num_slots, shape.num_heads, shape.state_dim, shape.head_dim)


def cpu_prepare(shape: StateSpaceShape, folder: Path | None = None) -> str:
    """Compile the kernel, kept in a folder, and return its name."""
    sizes = "_".join(map(str, shape[:4]))
    return register(f"state_space_{sizes}_{shape.dtype.name}", Kernel(shape), folder)


def cpu_state_space(
    x_thp: Array,
    dt_th: Array,
    a_h: Array,
    b_tgn: Array,
    c_tgn: Array,
    d_h: Array,
    pool: Array,
    batch: StateBatch,
    *,
    layer: Array | int,
    num_layers: int,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `StateSpace`; there is nothing to interpret."""
    del interpret
    (_, heads, head_dim), (_, groups, state_dim) = x_thp.shape, b_tgn.shape
    shape = StateSpaceShape(heads, head_dim, groups, state_dim, jnp.dtype(x_thp.dtype))
    return call_kernel(
        cpu_prepare(shape),
        pool,
        (x_thp, dt_th, a_h, b_tgn, c_tgn, d_h),
        batch,
        jax.ShapeDtypeStruct(x_thp.shape, x_thp.dtype),
        layer * (len(pool) // num_layers),
    )
