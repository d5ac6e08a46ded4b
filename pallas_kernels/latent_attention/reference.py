"""The reference: a loop over tokens in float32, slow, which defines what is correct."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels.chosen import to_lists
from pallas_kernels.paged_attention import AttentionBatch

from .layout import LatentPool


def reference_latent_attention(
    q_tnh: np.ndarray,
    latents_th: np.ndarray,
    kv_pool: LatentPool,
    batch: AttentionBatch,
    *,
    layer: int,
    num_layers: int,
    scale: float,
    latent_dim: int,
    chosen_tw: np.ndarray | None = None,
    top_k: int | None = None,
) -> tuple[np.ndarray, LatentPool]:
    """See `LatentAttention`; takes and returns numpy arrays. Rows of padding are 0."""
    del top_k
    pool = np.array(kv_pool.latents)
    most, block_size = float(jnp.finfo(pool.dtype).max), pool.shape[1]
    first_block = layer * (len(pool) // num_layers)
    latents_th = latents_th.astype(np.float32).clip(-most, most).astype(pool.dtype)
    for latent_h, slot in zip(latents_th, np.asarray(batch.slots_t), strict=True):
        pool[first_block + slot // block_size, slot % block_size] = latent_h

    positions = None if chosen_tw is None else to_lists(chosen_tw)
    out_tnl = np.zeros((*q_tnh.shape[:2], latent_dim), np.float32)
    sequences = zip(*map(np.asarray, (batch.query_starts_s, batch.query_ends_s, batch.context_lens_s)), strict=True)
    for seq, (start, end, length) in enumerate(sequences):
        if length == 0:
            continue
        tokens = np.arange(length)
        blocks = first_block + np.asarray(batch.block_tables_sm)[seq][tokens // block_size]
        keys_ch = pool[blocks, tokens % block_size].astype(np.float32)
        for row in range(start, end):
            seen_ch = keys_ch[: length - end + row + 1] if positions is None else keys_ch[positions[row]]
            scores_nc = q_tnh[row].astype(np.float32) @ seen_ch.T * scale
            weights_nc = np.exp(scores_nc - scores_nc.max(axis=1, keepdims=True))
            out_tnl[row] = weights_nc @ seen_ch[:, :latent_dim] / weights_nc.sum(axis=1, keepdims=True)
    return out_tnl, LatentPool(pool)
