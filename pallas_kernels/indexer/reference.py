"""The reference: a loop over rows in float32, slow, which defines what is correct."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels.chosen import num_words, to_array
from pallas_kernels.paged_attention import AttentionBatch

from .layout import IndexerPool


def reference_indexer(
    q_tnh: np.ndarray,
    k_th: np.ndarray,
    weights_tn: np.ndarray,
    kv_pool: IndexerPool,
    batch: AttentionBatch,
    *,
    layer: int,
    num_layers: int,
    top_k: int,
) -> tuple[np.ndarray, IndexerPool]:
    """See `Indexer`; takes and returns numpy arrays."""
    scores, pool = reference_scores(q_tnh, k_th, weights_tn, kv_pool, batch, layer=layer, num_layers=num_layers)
    positions = [np.arange(0)] * len(q_tnh)
    for row, scores_c in scores.items():
        positions[row] = np.argsort(-scores_c, stable=True)[:top_k]
    return to_array(positions, num_words(batch, pool.keys.shape[1])), pool


def reference_scores(
    q_tnh: np.ndarray,
    k_th: np.ndarray,
    weights_tn: np.ndarray,
    kv_pool: IndexerPool,
    batch: AttentionBatch,
    *,
    layer: int,
    num_layers: int,
) -> tuple[dict[int, np.ndarray], IndexerPool]:
    """Return each row's scores of the positions that it sees, by the row's number, and the pool."""
    pool = np.array(kv_pool.keys)
    most, block_size = float(jnp.finfo(pool.dtype).max), pool.shape[1]
    first_block = layer * (len(pool) // num_layers)
    k_th = k_th.astype(np.float32).clip(-most, most).astype(pool.dtype)
    for k_h, slot in zip(k_th, np.asarray(batch.slots_t), strict=True):
        pool[first_block + slot // block_size, slot % block_size] = k_h

    scores = {}
    sequences = zip(*map(np.asarray, (batch.query_starts_s, batch.query_ends_s, batch.context_lens_s)), strict=True)
    for seq, (start, end, length) in enumerate(sequences):
        positions = np.arange(length)
        blocks = first_block + np.asarray(batch.block_tables_sm)[seq][positions // block_size]
        keys_ch = pool[blocks, positions % block_size].astype(np.float32)
        for row in range(start, end):
            seen_ch = keys_ch[: length - end + row + 1]
            products_nc = q_tnh[row].astype(np.float32) @ seen_ch.T
            scores[row] = weights_tn[row] @ np.maximum(products_nc, 0)
    return scores, IndexerPool(pool)
