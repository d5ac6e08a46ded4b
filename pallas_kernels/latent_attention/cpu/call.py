"""Call the kernel as a function of JAX arrays."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.native.compiling import register
from pallas_kernels.paged_attention import AttentionBatch, Tiles

from ..layout import LatentPool, LatentShape
from .kernel import Kernel

_UNIT_LANES = 128
"""The most lanes of a chunk in a unit of work, each a head of a row, unless one row has more: their sums stay in a
core's cache.
"""


def cpu_refusal(shape: LatentShape) -> str | None:
    """Return why the kernel cannot run a shape, or None if it can."""
    sizes = shape.latent_dim, shape.rope_dim, shape.block_size
    if any(size % 16 for size in sizes):
        return "latents, their rotated part and block_size must be multiples of 16, not {}, {} and {}".format(*sizes)
    if shape.dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype must be bfloat16 or float32, not {jnp.dtype(shape.dtype).name}"
    return None


def cpu_tiles(shape: LatentShape) -> Tiles:
    """Return the kernel's tile sizes. Rows with chosen positions share no tokens."""
    query = 1 if shape.top_k is not None else max(1, _UNIT_LANES // shape.num_heads)
    return Tiles(decode=1, query=query, kv=shape.block_size)


def cpu_prepare(shape: LatentShape, folder: Path | None = None) -> str:
    """Compile the kernel, kept in a folder, and return its name.

    A program that another process compiled needs it when it is loaded.
    """
    sizes = "_".join(map(str, shape[:4]))
    name = f"latent_attention_{sizes}_{shape.dtype.name}_{shape.kv_dtype.name}"
    if shape.top_k is not None:
        name += f"_top_{shape.top_k}"
    return register(name, Kernel(shape, cpu_tiles(shape).query), folder)


def cpu_latent_attention(
    q_tnh: Array,
    latents_th: Array,
    kv_pool: LatentPool,
    batch: AttentionBatch,
    *,
    layer: Array | int,
    num_layers: int,
    scale: float,
    latent_dim: int,
    tiles: Tiles,
    interpret: bool = False,
    chosen_tw: Array | None = None,
    top_k: int | None = None,
) -> tuple[Array, LatentPool]:
    """See `LatentAttention`; there is nothing to interpret."""
    del tiles, interpret
    [pool], (t, n, h) = kv_pool, q_tnh.shape
    dtypes = jnp.dtype(q_tnh.dtype), jnp.dtype(latents_th.dtype)
    shape = LatentShape(n, latent_dim, h - latent_dim, pool.shape[1], *dtypes, top_k)
    if latents_th.dtype != pool.dtype:
        latents_th = jax.lax.bitcast_convert_type(latents_th, pool.dtype)
    call = jax.ffi.ffi_call(
        cpu_prepare(shape),
        (jax.ShapeDtypeStruct(pool.shape, pool.dtype), jax.ShapeDtypeStruct((t, n, latent_dim), q_tnh.dtype)),
        input_output_aliases={0: 0},
    )
    # In the order of `kernel.BUFFERS`, or of `kernel.CHOSEN_BUFFERS`.
    pool, out_tnl = call(
        pool,
        q_tnh,
        latents_th,
        batch.slots_t,
        batch.block_tables_sm,
        batch.context_lens_s,
        batch.query_ends_s,
        batch.num_decodes,
        batch.tile_seqs_i,
        batch.tile_rows_i,
        batch.num_tiles,
        jnp.asarray(layer * (len(pool) // num_layers), jnp.int32),
        jnp.float32(scale),
        *([] if chosen_tw is None else [chosen_tw]),
    )
    return out_tnl, LatentPool(pool)
