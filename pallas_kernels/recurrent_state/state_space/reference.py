"""The reference: a loop over tokens in float32, slow, which defines what is correct."""

from __future__ import annotations

import numpy as np

from pallas_kernels.recurrent_state import StateBatch
from pallas_kernels.recurrent_state.reference import walk


def reference_state_space(
    x_thp: np.ndarray,
    dt_th: np.ndarray,
    a_h: np.ndarray,
    b_tgn: np.ndarray,
    c_tgn: np.ndarray,
    d_h: np.ndarray,
    pool: np.ndarray,
    batch: StateBatch,
    *,
    layer: int,
    num_layers: int,
) -> tuple[np.ndarray, np.ndarray]:
    """See `StateSpace`; takes and returns numpy arrays. States are [h, head_dim, state_dim]; rows of padding are 0."""
    group = x_thp.shape[1] // b_tgn.shape[1]
    out_thp = np.zeros(x_thp.shape, np.float32)

    def step(state_hpn: np.ndarray, row: int) -> np.ndarray:
        x_hp, dt_h = x_thp[row].astype(np.float32), dt_th[row].astype(np.float32)
        b_hn, c_hn = (np.repeat(x[row].astype(np.float32), group, axis=0) for x in (b_tgn, c_tgn))
        state_hpn = state_hpn * np.exp(dt_h * a_h)[:, None, None] + (dt_h[:, None] * x_hp)[:, :, None] * b_hn[:, None]
        out_thp[row] = np.einsum("hpn,hn->hp", state_hpn, c_hn) + d_h[:, None] * x_hp
        return state_hpn

    pool = walk(pool, batch, layer=layer, num_layers=num_layers, step=step)
    return out_thp, pool
