"""Paged attention on Hopper GPUs, in Mosaic GPU.

Three steps on the same pool, none of which copies it: q and k are rotated, and k and v written in place (`write.py`),
decode rows are attended by a split-KV kernel (`decode.py`), longer chunks by one in the shape of FlashAttention-3
(`prefill.py`). What stands between the kernels is elementwise and fuses, so that an unrolled model stays one command
buffer.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from ..layout import AttentionBatch, AttentionShape, FusedPool
from ..rope import Rope
from ..tiles import Tiles
from .decode import decode_attention
from .prefill import QUERY_TILE, prefill_attention
from .write import rotate_and_write

__all__ = ["gpu_paged_attention", "gpu_tiles"]


def gpu_tiles(shape: AttentionShape) -> Tiles:
    """Return tile sizes of which two fit in shared memory; decode cuts its own, see `decode_config`."""
    return Tiles(decode=1, query=QUERY_TILE, kv=128 if shape.head_dim <= 128 else 64)


def gpu_paged_attention(
    q_tnh: Array,
    k_tkh: Array,
    v_tkh: Array,
    kv_pool: FusedPool,
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
) -> tuple[Array, FusedPool]:
    """See `PagedAttention`. `interpret` runs the kernels on a CPU, in an interpreter that looks for races."""
    place: dict[str, Any] = {"layer": layer, "num_layers": num_layers, "interpret": interpret}
    q_tnh, kv_pool = rotate_and_write(q_tnh, k_tkh, v_tkh, kv_pool, batch.slots_t, rope, **place)
    settings: dict[str, Any] = place | {
        "window": window,
        "scale": scale,
        "soft_cap": soft_cap,
        "sinks_n": sinks_n,
    }
    decoded_snh = decode_attention(q_tnh, kv_pool, batch, **settings)
    prefilled_tnh = prefill_attention(q_tnh, kv_pool, batch, tiles=tiles, **settings)
    t, s = q_tnh.shape[0], decoded_snh.shape[0]
    decoded_tnh = jnp.pad(decoded_snh, ((0, t - s), (0, 0), (0, 0)))
    rows_t1 = jnp.arange(t, dtype=jnp.int32)[:, None]
    is_prefill_ts = (rows_t1 >= batch.query_starts_s) & (rows_t1 < batch.query_ends_s) & (rows_t1 >= batch.num_decodes)
    # The rows of neither kernel are what decode left: zeros.
    return jnp.where(is_prefill_ts.any(axis=1)[:, None, None], prefilled_tnh, decoded_tnh), kv_pool
