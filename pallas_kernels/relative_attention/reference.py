"""The reference: a loop over sequences and heads in float64, which defines what is correct."""

from __future__ import annotations

import numpy as np

from .buckets import bucket_rows


def reference_relative_attention(
    q_tnh: np.ndarray,
    k_tnh: np.ndarray,
    v_tnh: np.ndarray,
    q_rnh: np.ndarray,
    k_rnh: np.ndarray,
    starts_s: np.ndarray,
    ends_s: np.ndarray,
    *,
    scale: float,
    max_distance: int | None,
) -> np.ndarray:
    """See `RelativeAttention`; returns float64, with zeros in rows of padding."""
    out_tnh = np.zeros(q_tnh.shape)
    q_tnh, k_tnh, v_tnh, q_rnh, k_rnh = (np.asarray(x, np.float64) for x in (q_tnh, k_tnh, v_tnh, q_rnh, k_rnh))
    for start, end in zip(starts_s, ends_s, strict=True):
        positions = np.arange(end - start)
        rows_qc = bucket_rows(positions[:, None] - positions[None], len(q_rnh) // 2, max_distance)
        for head in range(q_tnh.shape[1] if start < end else 0):
            q_qh, k_ch, v_ch = (x[start:end, head] for x in (q_tnh, k_tnh, v_tnh))
            scores_qc = q_qh @ k_ch.T
            scores_qc += np.take_along_axis(q_qh @ k_rnh[:, head].T, rows_qc, axis=1)
            scores_qc += np.take_along_axis(k_ch @ q_rnh[:, head].T, rows_qc.T, axis=1).T
            weights_qc = np.exp(scale * (scores_qc - scores_qc.max(axis=1, keepdims=True)))
            out_tnh[start:end, head] = weights_qc @ v_ch / weights_qc.sum(axis=1, keepdims=True)
    return out_tnh
