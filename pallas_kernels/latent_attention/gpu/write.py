"""Write a step's latents into the block pool on Hopper, in place."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.common import WARPGROUP_LANES, compiler_params, interpret_params
from pallas_kernels.paged_attention.gpu.write import TOKENS, write_token

from ..layout import LatentPool

# The numbers that a thread loads at a time; a token has a multiple of 64.
_VECTOR = 4


def write_latents(
    latents_th: Array,
    kv_pool: LatentPool,
    slots_t: Array,
    rows: jax.ShapeDtypeStruct | None,
    *,
    layer: Array | int,
    num_layers: int,
    interpret: bool = False,
) -> tuple[Array | None, LatentPool]:
    """Return an array for results, and the pool with latents of the pool's dtype at the tokens' slots.

    The null block is not written to. The array has the shape [t, n, latent_dim] and dtype of `rows`, if there are any;
    tokens of the null block are padding, and their rows are 0. Other rows hold anything. The number of tokens must be a
    multiple of 8, or ValueError is raised.

    The kernel gets the pool as a Ref, which XLA neither copies nor slices. A thread block takes 8 tokens, by a bulk
    copy each.
    """
    t, h = latents_th.shape
    if t % TOKENS:
        raise ValueError(f"the GPU's kernel writes {TOKENS} tokens at a time, which {t} is no multiple of")
    kernel = plgpu.kernel(
        partial(_write_kernel, width=rows.shape[2] if rows else 0),
        out_type=[jax.ShapeDtypeStruct((t, math.prod(rows.shape[1:])), rows.dtype)] if rows else [],
        grid=(t // TOKENS,),
        grid_names=("tokens",),
        kernel_name="latent_write",
        scratch_types={"latents_smem": plgpu.SMEM((TOKENS, h), latents_th.dtype)},
        compiler_params=compiler_params(),
        interpret=interpret_params(interpret),
    )
    first_row = jnp.asarray(layer * (len(kv_pool.latents) // num_layers), jnp.int32).reshape(1)
    # A pool with one kv head, laid out like a pool of keys and values.
    pool = jax.new_ref(kv_pool.latents[:, None])
    results = kernel(latents_th, slots_t, first_row, pool)
    return results[0].reshape(rows.shape) if rows else None, LatentPool(jax.freeze(pool)[:, 0])


def _write_kernel(latents_th, slots_t, first_row, pool, *results_tc, latents_smem, width: int):
    first_token = pl.multiple_of(lax.axis_index("tokens") * TOKENS, TOKENS)
    layout = plgpu.Layout.WG_STRIDED(latents_smem.shape, vec_size=_VECTOR)
    latents = plgpu.load(latents_th.at[pl.ds(first_token, TOKENS)], layout=layout)
    slots, row = [slots_t[first_token + i] for i in range(TOKENS)], first_row[0]
    latents_smem[...] = latents
    plgpu.commit_smem()
    for i, slot in enumerate(slots):
        write_token(latents_smem.at[i], pool, slot, row, 0)
        for results in results_tc:
            pl.when(slot < pool.shape[2])(partial(_clear, results, first_token + i, width))
    plgpu.wait_smem_to_gmem(0)


def _clear(results_tc: Any, row: Array, width: int) -> None:
    """Write zeros into a row, `width` at a time."""
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // WARPGROUP_LANES)

    @pl.loop(0, results_tc.shape[1] // width)
    def _(i: Array) -> None:
        zeros = jnp.zeros((width,), results_tc.dtype)
        results_tc[row, pl.ds(pl.multiple_of(i * width, width), width)] = plgpu.layout_cast(zeros, layout)
