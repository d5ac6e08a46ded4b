"""Call a kernel of recurrent state as a function of JAX arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..batch import StateBatch


def refuse_dtype(dtype: Any) -> str | None:
    """Return why the kernels cannot have inputs of a dtype, or None if they can."""
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype must be bfloat16 or float32, not {jnp.dtype(dtype).name}"
    return None


def call_kernel(
    name: str,
    pool: Array,
    inputs: tuple[Array, ...],
    batch: StateBatch,
    out: jax.ShapeDtypeStruct,
    first_slot: Array | int,
) -> tuple[Array, Array]:
    """Call a kernel by XLA's name for it; return the output, and the pool, which replaces the one before."""
    call = jax.ffi.ffi_call(
        name, (jax.ShapeDtypeStruct(pool.shape, pool.dtype), out), input_output_aliases={0: 0}
    )  # fmt: skip
    # In the order of `units.StateKernel.buffers`.
    pool, read = call(
        pool,
        *inputs,
        batch.query_starts_s,
        batch.query_ends_s,
        batch.num_decodes,
        batch.read_slots_s,
        batch.write_slots_s,
        batch.all_save_ends_s,
        batch.save_slots_s,
        jnp.zeros(len(inputs[0]), jnp.int32) if batch.row_slots_t is None else batch.row_slots_t,
        jnp.asarray(first_slot, jnp.int32),
    )
    return read, pool
