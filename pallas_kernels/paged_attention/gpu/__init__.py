"""Paged attention on Hopper GPUs, in Mosaic GPU.

Three steps on the same pool, without a copy: `write.py` rotates q and k and writes k and v in place, `decode.py`
attends decode rows in splits of their contexts, and `prefill.py` attends longer chunks in the manner of
FlashAttention-3, unless the batch has no room for tiles. Results replace the rotated queries; rows of neither kernel
stay rotated queries. Nothing stands between the kernels, and an unrolled model stays one command buffer.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..layout import AttentionBatch, AttentionShape, FusedPool, refuse_sizes
from ..rope import Rope
from ..tiles import Tiles
from .decode import decode_attention
from .prefill import QUERY_TILE, prefill_attention
from .write import rotate_and_write

__all__ = [
    "decode_attention",
    "gpu_paged_attention",
    "gpu_refusal",
    "gpu_tiles",
    "prefill_attention",
    "rotate_and_write",
]


def gpu_refusal(shape: AttentionShape) -> str | None:
    """Return why the kernels cannot run a shape, or None if they can."""
    if shape.head_dim > 256:
        return (
            f"head_dim must be 64, 128 or 256, not {shape.head_dim}, whose tiles do not fit in shared memory. "
            "Plain XLA copies keys and values out of the pool before it multiplies, which moves three times their bytes"
        )
    if shape.group > 64:
        return f"a kv head can serve at most 64 query heads, not {shape.group}"
    return refuse_sizes(shape, (64, 128, 256), (jnp.bfloat16,), (16, 32, 64, 128))


def gpu_tiles(shape: AttentionShape) -> Tiles:
    """Return tile sizes; two tiles fit in shared memory. Decode uses its own, see `decode_config`."""
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
    num_cores: int | None = None,
) -> tuple[Array, FusedPool]:
    """See `PagedAttention`. `interpret` runs the kernels on a CPU, in an interpreter that looks for races.

    `num_cores` is the number of the GPU's multiprocessors.
    """
    common: dict[str, Any] = {"layer": layer, "num_layers": num_layers, "interpret": interpret}
    num_rows = batch.context_lens_s.shape[0]
    queries, kv_pool = rotate_and_write(q_tnh, k_tkh, v_tkh, kv_pool, batch.slots_t, rope, num_rows=num_rows, **common)
    settings: dict[str, Any] = common | {
        "window": window,
        "scale": scale,
        "soft_cap": soft_cap,
        "sinks_n": sinks_n,
    }
    out_tc = jax.new_ref(queries.all_tc)
    decode_attention(queries.decode_rkgh, kv_pool, batch, out_tc, num_cores=num_cores, **settings)
    if batch.tile_seqs_i.shape[0]:
        prefill_attention(out_tc, kv_pool, batch, tiles=tiles, **settings)
    return jax.freeze(out_tc).reshape(q_tnh.shape), kv_pool
