"""The reference: a loop over tokens in float32, slow, which defines what is correct."""

from __future__ import annotations

import numpy as np

from pallas_kernels.recurrent_state import StateBatch
from pallas_kernels.recurrent_state.reference import walk


def reference_selective_scan(
    x_tc: np.ndarray,
    dt_tc: np.ndarray,
    a_cn: np.ndarray,
    b_tn: np.ndarray,
    c_tn: np.ndarray,
    d_c: np.ndarray,
    pool: np.ndarray,
    batch: StateBatch,
    *,
    layer: int,
    num_layers: int,
) -> tuple[np.ndarray, np.ndarray]:
    """See `SelectiveScan`; takes and returns numpy arrays. States are as in its pool; rows of padding are 0."""
    out_tc = np.zeros(x_tc.shape, np.float32)

    def step(state_inl: np.ndarray, row: int) -> np.ndarray:
        x_c, dt_c, b_n, c_n = (each[row].astype(np.float32) for each in (x_tc, dt_tc, b_tn, c_tn))
        state_cn = state_inl.swapaxes(1, 2).reshape(a_cn.shape)
        state_cn = state_cn * np.exp(dt_c[:, None] * a_cn) + (dt_c * x_c)[:, None] * b_n
        out_tc[row] = state_cn @ c_n + d_c * x_c
        return state_cn.reshape(len(state_inl), -1, len(b_n)).swapaxes(1, 2)

    pool = walk(pool, batch, layer=layer, num_layers=num_layers, step=step)
    return out_tc, pool
