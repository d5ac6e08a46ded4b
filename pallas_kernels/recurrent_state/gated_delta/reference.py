"""The reference: a loop over tokens in float32, slow, which defines what is correct."""

from __future__ import annotations

import numpy as np

from pallas_kernels.recurrent_state import StateBatch
from pallas_kernels.recurrent_state.reference import walk

NORM_EPS = 1e-6


def reference_gated_delta(
    q_tkd: np.ndarray,
    k_tkd: np.ndarray,
    v_tvd: np.ndarray,
    log_decay_tvd: np.ndarray,
    beta_tv: np.ndarray,
    pool: np.ndarray,
    batch: StateBatch,
    *,
    layer: int,
    num_layers: int,
) -> tuple[np.ndarray, np.ndarray]:
    """See `GatedDelta`; takes and returns numpy arrays. States are [v, key_dim, value_dim]; rows of padding are 0."""
    group = v_tvd.shape[1] // k_tkd.shape[1]
    out_tvd = np.zeros(v_tvd.shape, np.float32)

    def step(state_vkd: np.ndarray, row: int) -> np.ndarray:
        q_vk, k_vk = (np.repeat(_normed(x[row].astype(np.float32)), group, axis=0) for x in (q_tkd, k_tkd))
        state_vkd = state_vkd * np.exp(log_decay_tvd[row])[:, :, None]
        seen_vd = np.einsum("vk,vkd->vd", k_vk, state_vkd)
        delta_vd = (v_tvd[row].astype(np.float32) - seen_vd) * beta_tv[row][:, None]
        state_vkd = state_vkd + k_vk[:, :, None] * delta_vd[:, None]
        out_tvd[row] = np.einsum("vk,vkd->vd", q_vk * np.float32(q_vk.shape[1] ** -0.5), state_vkd)
        return state_vkd

    pool = walk(pool, batch, layer=layer, num_layers=num_layers, step=step)
    return out_tvd, pool


def _normed(x_kd: np.ndarray) -> np.ndarray:
    return x_kd / np.sqrt((x_kd * x_kd).sum(axis=-1, keepdims=True) + np.float32(NORM_EPS))
