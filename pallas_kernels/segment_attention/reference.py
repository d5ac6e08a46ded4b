"""The reference: a loop over rows in float64, slow, which defines what is correct."""

from __future__ import annotations

import numpy as np


def reference_segment_attention(
    q_pnh: np.ndarray, k_pnh: np.ndarray, v_pnh: np.ndarray, starts_p: np.ndarray, ends_p: np.ndarray, *, scale: float
) -> np.ndarray:
    """See `SegmentAttention`; returns float64."""
    out_pnh = np.zeros(q_pnh.shape)
    q_pnh, k_pnh, v_pnh = (np.asarray(x, np.float64) for x in (q_pnh, k_pnh, v_pnh))
    for row, (start, end) in enumerate(zip(starts_p, ends_p, strict=True)):
        for head in range(q_pnh.shape[1] if start < end else 0):
            scores = k_pnh[start:end, head] @ q_pnh[row, head] * scale
            weights = np.exp(scores - scores.max())
            out_pnh[row, head] = weights @ v_pnh[start:end, head] / weights.sum()
    return out_pnh
