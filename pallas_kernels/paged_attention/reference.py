"""The reference: a loop over tokens in float32, slow, which defines what is correct."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from .layout import AttentionBatch, SplitPool
from .rope import Rope


def reference_paged_attention(
    q_tnh: np.ndarray,
    k_tkh: np.ndarray,
    v_tkh: np.ndarray,
    kv_pool: SplitPool,
    batch: AttentionBatch,
    *,
    layer: int,
    num_layers: int,
    window: int,
    scale: float,
    rope: Rope | None = None,
    soft_cap: float | None = None,
    sinks_n: np.ndarray | None = None,
) -> tuple[np.ndarray, SplitPool]:
    """See `PagedAttention`; takes and returns numpy arrays. Rows of padding are 0."""
    key_pool, value_pool = np.array(kv_pool.k), np.array(kv_pool.v)
    if rope is not None:
        q_tnh, k_tkh = _rotated(q_tnh, rope), _rotated(k_tkh, rope)
    most = float(jnp.finfo(key_pool.dtype).max)
    k_tkh, v_tkh = (x.astype(np.float32).clip(-most, most).astype(key_pool.dtype) for x in (k_tkh, v_tkh))
    block_size = key_pool.shape[-1]
    first_block = layer * (key_pool.shape[0] // num_layers)
    for k_kh, v_kh, slot in zip(k_tkh, v_tkh, np.asarray(batch.slots_t), strict=True):
        block, offset = first_block + slot // block_size, slot % block_size
        key_pool[block, :, :, offset], value_pool[block, :, offset] = k_kh, v_kh

    out_tnh = np.zeros(q_tnh.shape, np.float32)
    group = q_tnh.shape[1] // k_tkh.shape[1]
    sequences = zip(*map(np.asarray, (batch.query_starts_s, batch.query_ends_s, batch.context_lens_s)), strict=True)
    for seq, (start, end, length) in enumerate(sequences):
        if length == 0:
            continue
        positions = np.arange(length)
        blocks = first_block + np.asarray(batch.block_tables_sm)[seq][positions // block_size]
        keys = key_pool[blocks, :, :, positions % block_size].astype(np.float32)
        values = value_pool[blocks, :, positions % block_size].astype(np.float32)
        for row in range(start, end):
            position = length - end + row
            row_end = position + 1 if batch.row_ends_t is None else batch.row_ends_t[row]
            seen = slice(max(0, position - window + 1), row_end)
            for head in range(q_tnh.shape[1]):
                scores = keys[seen, head // group] @ q_tnh[row, head].astype(np.float32) * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                largest = scores.max() if sinks_n is None else max(scores.max(), sinks_n[head])
                weights = [math.exp(score - largest) for score in scores]
                total = sum(weights) + (0.0 if sinks_n is None else math.exp(sinks_n[head] - largest))
                out_tnh[row, head] = np.asarray(weights) @ values[seen, head // group] / total
    return out_tnh, SplitPool(key_pool, value_pool)


def _rotated(x_tnh: np.ndarray, rope: Rope) -> np.ndarray:
    """Rotate each head: entries i and i + h / 2 are a point in the plane, turned by the token's i-th angle."""
    out_tnh, half = np.empty_like(x_tnh), x_tnh.shape[-1] // 2
    for x_nh, cos_h, sin_h, out_nh in zip(x_tnh.astype(np.float32), *map(np.asarray, rope), out_tnh, strict=True):
        out_nh[:, :half] = x_nh[:, :half] * cos_h - x_nh[:, half:] * sin_h
        out_nh[:, half:] = x_nh[:, half:] * cos_h + x_nh[:, :half] * sin_h
    return out_tnh
