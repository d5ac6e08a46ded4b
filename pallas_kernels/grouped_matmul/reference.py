"""The reference: a loop over rows in float64, slow, which defines what is correct."""

from __future__ import annotations

import numpy as np

from pallas_kernels.linear.reference import ACTIVATIONS

from .groups import Groups


def reference_grouped_matmul(
    x_ri: np.ndarray,
    w_leoi: np.ndarray,
    layer: int,
    groups: Groups,
    *,
    activation: str | None = None,
) -> np.ndarray:
    """See `GroupedMatmul`; takes weights as numbers, and returns float64. Rows of no group are 0."""
    w_eoi = np.asarray(w_leoi[layer], np.float64)
    num_columns = w_eoi.shape[1] // 2 if activation else w_eoi.shape[1]
    out_ro = np.zeros((x_ri.shape[0], num_columns))
    for w_oi, start, count in zip(w_eoi, *map(np.asarray, groups), strict=True):
        for row in range(start, start + count):
            out_o = w_oi @ np.asarray(x_ri[row], np.float64)
            if activation:
                gate_o, up_o = np.split(out_o, 2)
                out_o = ACTIVATIONS[activation](gate_o) * up_o
            out_ro[row] = out_o
    return out_ro
