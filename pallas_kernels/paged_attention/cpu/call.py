"""Call the kernel as a function of JAX arrays."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.native.compiling import register

from ..layout import AttentionBatch, AttentionShape, PairedPool, SplitPool
from ..rope import Rope
from ..tiles import Tiles
from .kernel import Kernel

_QUERY_TILE = 64


def cpu_refusal(shape: AttentionShape) -> str | None:
    """Return why the kernel cannot run a shape, or None if it can."""
    if shape.head_dim % 16 or shape.block_size % 16:
        return f"head_dim and block_size must be multiples of 16, not {shape.head_dim} and {shape.block_size}"
    if shape.dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype must be bfloat16 or float32, not {jnp.dtype(shape.dtype).name}"
    return None


def cpu_tiles(shape: AttentionShape) -> Tiles:
    """Return the kernel's tile sizes."""
    return Tiles(decode=1, query=_QUERY_TILE, kv=shape.block_size)


def cpu_prepare(shape: AttentionShape, folder: Path | None = None) -> str:
    """Compile the kernel, kept in a folder, and return its name.

    A program that another process compiled needs it when it is loaded.
    """
    sizes = "_".join(map(str, shape[:4]))
    name = f"paged_attention_{sizes}_{shape.dtype.name}_{shape.kv_dtype.name}"
    return register(name, Kernel(shape, _QUERY_TILE), folder)


def cpu_paged_attention(
    q_tnh: Array,
    k_tkh: Array,
    v_tkh: Array,
    kv_pool: SplitPool | PairedPool,
    batch: AttentionBatch,
    *,
    layer: Array | int,
    num_layers: int,
    window: Array | int,
    scale: float,
    rope: Rope | None = None,
    soft_cap: float | None = None,
    sinks_n: Array | None = None,
    tiles: Tiles,
    interpret: bool = False,
) -> tuple[Array, SplitPool | PairedPool]:
    """See `PagedAttention`; there is nothing to interpret. Without `rope` nothing is rotated."""
    del tiles, interpret
    _, n, h = q_tnh.shape
    k, block_size = kv_pool.k.shape[1], kv_pool.k.shape[3]
    shape = AttentionShape(n, k, h, block_size, jnp.dtype(q_tnh.dtype), jnp.dtype(k_tkh.dtype))
    if k_tkh.dtype != kv_pool.k.dtype:
        k_tkh, v_tkh = (jax.lax.bitcast_convert_type(x, kv_pool.k.dtype) for x in (k_tkh, v_tkh))
    call = jax.ffi.ffi_call(
        cpu_prepare(shape),
        (*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kv_pool), jax.ShapeDtypeStruct(q_tnh.shape, q_tnh.dtype)),
        input_output_aliases={0: 0, 1: 1},
    )
    # In the order of `BUFFERS`.
    *pool, out_tnh = call(
        *kv_pool,
        q_tnh,
        k_tkh,
        v_tkh,
        batch.slots_t,
        batch.block_tables_sm,
        batch.context_lens_s,
        batch.query_ends_s,
        batch.num_decodes,
        batch.tile_seqs_i,
        batch.tile_rows_i,
        batch.num_tiles,
        jnp.zeros(0, jnp.int32) if batch.row_ends_t is None else batch.row_ends_t,
        jnp.asarray(layer * (kv_pool.k.shape[0] // num_layers), jnp.int32),
        jnp.asarray(window, jnp.int32),
        jnp.float32(scale),
        jnp.float32(0.0 if soft_cap is None else soft_cap),
        jnp.zeros(0, jnp.float32) if sinks_n is None else sinks_n.astype(jnp.float32),
        *(rope or [jnp.zeros((0, h // 2), jnp.float32)] * 2),
    )
    return out_tnh, type(kv_pool)(*pool)
