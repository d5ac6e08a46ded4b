"""Call the kernel as a function of JAX arrays."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.chosen import num_words
from pallas_kernels.native.compiling import register
from pallas_kernels.paged_attention import AttentionBatch, Tiles

from ..layout import IndexerPool, IndexerShape
from .kernel import Kernel


def cpu_refusal(shape: IndexerShape) -> str | None:
    """Return why the kernel cannot run a shape, or None if it can."""
    if shape.head_dim % 16 or shape.block_size % 16:
        return f"keys and block_size must be multiples of 16, not {shape.head_dim} and {shape.block_size}"
    if shape.dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype must be bfloat16 or float32, not {jnp.dtype(shape.dtype).name}"
    return None


def cpu_tiles(shape: IndexerShape) -> Tiles:
    """Return the kernel's tile sizes: a unit of work is one row."""
    return Tiles(decode=1, query=1, kv=shape.block_size)


def cpu_prepare(shape: IndexerShape, folder: Path | None = None) -> str:
    """Compile the kernel, kept in a folder, and return its name.

    A program that another process compiled needs it when it is loaded.
    """
    sizes = "_".join(map(str, shape[:4]))
    return register(f"indexer_{sizes}_{shape.dtype.name}_{shape.kv_dtype.name}", Kernel(shape), folder)


def cpu_indexer(
    q_tnh: Array,
    k_th: Array,
    weights_tn: Array,
    kv_pool: IndexerPool,
    batch: AttentionBatch,
    *,
    layer: Array | int,
    num_layers: int,
    top_k: int,
    tiles: Tiles,
    interpret: bool = False,
) -> tuple[Array, IndexerPool]:
    """See `Indexer`; there is nothing to interpret."""
    del tiles, interpret
    [pool], (t, n, h) = kv_pool, q_tnh.shape
    shape = IndexerShape(n, h, top_k, pool.shape[1], jnp.dtype(q_tnh.dtype), jnp.dtype(k_th.dtype))
    if k_th.dtype != pool.dtype:
        k_th = jax.lax.bitcast_convert_type(k_th, pool.dtype)
    chosen_spec = jax.ShapeDtypeStruct((t, num_words(batch, shape.block_size)), jnp.int32)
    call = jax.ffi.ffi_call(
        cpu_prepare(shape),
        (jax.ShapeDtypeStruct(pool.shape, pool.dtype), chosen_spec),
        input_output_aliases={0: 0},
    )
    # In the order of `kernel.BUFFERS`.
    pool, chosen_tw = call(
        pool,
        q_tnh,
        k_th,
        weights_tn,
        batch.slots_t,
        batch.block_tables_sm,
        batch.context_lens_s,
        batch.query_ends_s,
        batch.num_decodes,
        batch.tile_seqs_i,
        batch.tile_rows_i,
        batch.num_tiles,
        jnp.asarray(layer * (len(pool) // num_layers), jnp.int32),
    )
    return chosen_tw, IndexerPool(pool)
