"""The reference: a loop over tokens in float32, slow, which defines what is correct."""

from __future__ import annotations

from typing import Literal

import numpy as np

from pallas_kernels.recurrent_state import StateBatch
from pallas_kernels.recurrent_state.reference import walk


def reference_causal_conv(
    x_tc: np.ndarray,
    weight_kc: np.ndarray,
    pool: np.ndarray,
    batch: StateBatch,
    *,
    layer: int,
    num_layers: int,
    bias_c: np.ndarray | None = None,
    activation: Literal["silu"] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """See `CausalConv`; takes and returns numpy arrays. States are [k - 1, c]; rows of padding are 0."""
    out_tc = np.zeros(x_tc.shape, np.float32)

    def step(state_kc: np.ndarray, row: int) -> np.ndarray:
        seen_kc = np.concatenate([state_kc, x_tc[row : row + 1].astype(state_kc.dtype)])
        sum_c = np.zeros(x_tc.shape[1], np.float32) if bias_c is None else bias_c.astype(np.float32)
        for x_c, weight_c in zip(seen_kc.astype(np.float32), weight_kc.astype(np.float32), strict=True):
            sum_c = sum_c + x_c * weight_c
        out_tc[row] = sum_c / (1 + np.exp(-sum_c)) if activation == "silu" else sum_c
        return seen_kc[1:]

    pool = walk(pool, batch, layer=layer, num_layers=num_layers, step=step)
    return out_tc, pool
