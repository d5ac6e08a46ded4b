"""The gated delta rule on a CPU: one kernel for decodes and chunks (`kernel.py`), called from JAX."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.native.compiling import register
from pallas_kernels.recurrent_state import StateBatch
from pallas_kernels.recurrent_state.cpu.call import call_kernel, refuse_dtype
from pallas_kernels.recurrent_state.cpu.matrices import matrix_pool_spec

from ..shape import GatedDeltaShape
from .kernel import Kernel


def cpu_refusal(shape: GatedDeltaShape) -> str | None:
    """Return why the kernel cannot run a shape, or None if it can."""
    if shape.key_dim % 16 or shape.value_dim % 16:
        return f"key_dim and value_dim must be multiples of 16, not {shape.key_dim} and {shape.value_dim}"
    return refuse_dtype(shape.dtype)


def cpu_pool_spec(shape: GatedDeltaShape, num_layers: int, num_slots: int) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a pool as the kernel has it."""
    return matrix_pool_spec(num_layers, num_slots, shape.num_value_heads, shape.key_dim, shape.value_dim)


def cpu_prepare(shape: GatedDeltaShape, folder: Path | None = None) -> str:
    """Compile the kernel, kept in a folder, and return its name."""
    sizes = "_".join(str(int(size)) for size in shape[:5])
    return register(f"gated_delta_{sizes}_{shape.dtype.name}", Kernel(shape), folder)


def cpu_gated_delta(
    q_tkd: Array,
    k_tkd: Array,
    v_tvd: Array,
    log_decay_tvd: Array,
    beta_tv: Array,
    pool: Array,
    batch: StateBatch,
    *,
    layer: Array | int,
    num_layers: int,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `GatedDelta`; there is nothing to interpret."""
    del interpret
    (_, key_heads, key_dim), (_, value_heads, value_dim) = q_tkd.shape, v_tvd.shape
    has_key_decay = log_decay_tvd.shape[-1] > 1
    shape = GatedDeltaShape(key_heads, value_heads, key_dim, value_dim, has_key_decay, jnp.dtype(v_tvd.dtype))
    return call_kernel(
        cpu_prepare(shape),
        pool,
        (q_tkd, k_tkd, v_tvd, log_decay_tvd, beta_tv),
        batch,
        jax.ShapeDtypeStruct(v_tvd.shape, v_tvd.dtype),
        layer * (len(pool) // num_layers),
    )
