"""Writes a step's keys and values into the block pool on Hopper, in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..layout import FusedPool
from .common import compiler_params, interpret_params


def write_kv(
    k_tkh: Array,
    v_tkh: Array,
    kv_pool: FusedPool,
    slots_t: Array,
    *,
    layer: Array | int,
    num_layers: int,
    interpret: bool = False,
) -> FusedPool:
    """Write the tokens' keys and values at their slots; those of the null block (padding) are not written.

    A block per token: two TMAs bring the heads of its K and V, two more put them beside each other in the pool, which
    the kernel gets as a Ref, so that XLA neither copies nor slices it.
    """
    t, k, h = k_tkh.shape
    dtype = kv_pool.kv.dtype
    first_row = jnp.asarray(layer * (kv_pool.kv.shape[0] // num_layers), jnp.int32).reshape(1)
    kernel = plgpu.kernel(
        _write_kernel,
        grid=(t,),
        grid_names=("token",),
        kernel_name="kv_write",
        scratch_types=[plgpu.SMEM((k, h), dtype), plgpu.SMEM((k, h), dtype), plgpu.Barrier(num_arrivals=2)],
        compiler_params=compiler_params(),
        interpret=interpret_params(interpret),
    )
    pool = jax.new_ref(kv_pool.kv)
    # The cast to the pool's dtype joins what computes K and V.
    kernel(k_tkh.astype(dtype), v_tkh.astype(dtype), slots_t, first_row, pool)
    return FusedPool(jax.freeze(pool))


def _write_kernel(k_tkh, v_tkh, slots_t, first_row, pool, k_smem, v_smem, arrived):
    token = lax.axis_index("token")
    slot = slots_t[token]
    o, h = pool.shape[2], k_tkh.shape[2]

    @pl.when(slot >= o)
    def _():
        plgpu.copy_gmem_to_smem(k_tkh.at[token], k_smem, arrived)
        plgpu.copy_gmem_to_smem(v_tkh.at[token], v_smem, arrived)
        plgpu.barrier_wait(arrived)
        plgpu.commit_smem()
        row, offset = first_row[0] + lax.div(slot, o), lax.rem(slot, o)
        plgpu.copy_smem_to_gmem(k_smem, pool.at[row, :, offset, pl.ds(0, h)])
        plgpu.copy_smem_to_gmem(v_smem, pool.at[row, :, offset, pl.ds(h, h)])
        plgpu.wait_smem_to_gmem(0)
