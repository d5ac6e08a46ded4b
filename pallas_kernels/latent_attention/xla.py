"""Attention over latents in plain jnp, on all platforms: the loops of paged attention with one kv head.

A head's key is the latent and its rotated part, its value the latent alone; the latent is read once for both.
"""

from __future__ import annotations

from jax import Array, lax

from pallas_kernels.paged_attention import NO_WINDOW, AttentionBatch, Tiles
from pallas_kernels.paged_attention.tiles import XLA_TILES
from pallas_kernels.paged_attention.xla import attend_step, widen

from .layout import LatentPool
from .xla_chosen import attend_chosen


def xla_latent_attention(
    q_tnh: Array,
    latents_th: Array,
    kv_pool: LatentPool,
    batch: AttentionBatch,
    *,
    layer: Array | int,
    num_layers: int,
    scale: float,
    latent_dim: int,
    tiles: Tiles = XLA_TILES,
    interpret: bool = False,
    chosen_tw: Array | None = None,
    top_k: int | None = None,
) -> tuple[Array, LatentPool]:
    """See `LatentAttention`; there is nothing to interpret."""
    del interpret
    pool, kv_dtype = kv_pool.latents, latents_th.dtype
    _, block_size, h = pool.shape
    first_block = layer * (len(pool) // num_layers)
    written_th = latents_th if kv_dtype == pool.dtype else lax.bitcast_convert_type(latents_th, pool.dtype)
    pool = pool.at[first_block + batch.slots_t // block_size, batch.slots_t % block_size].set(written_th)

    if chosen_tw is not None:
        assert top_k is not None

        def read_tokens(blocks: Array, offsets: Array) -> Array:
            return widen(pool[first_block + blocks, offsets], kv_dtype, q_tnh.dtype)

        settings = {"latent_dim": latent_dim, "block_size": block_size, "scale": scale, "top_k": top_k, "tiles": tiles}
        return attend_chosen(q_tnh, chosen_tw, batch, read_tokens, **settings), LatentPool(pool)

    def read(blocks_sb: Array) -> tuple[Array, Array]:
        keys_skch = widen(pool[first_block + blocks_sb], kv_dtype, q_tnh.dtype).reshape(len(blocks_sb), 1, -1, h)
        return keys_skch.swapaxes(2, 3), keys_skch[..., :latent_dim]

    out_tnl = attend_step(
        q_tnh,
        batch,
        read,
        num_kv_heads=1,
        value_dim=latent_dim,
        block_size=block_size,
        window=NO_WINDOW,
        scale=scale,
        tiles=tiles,
    )
    return out_tnl, LatentPool(pool)
