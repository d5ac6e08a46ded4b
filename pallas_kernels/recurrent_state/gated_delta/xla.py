"""The gated delta rule in plain jnp, on all platforms."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import Array

from pallas_kernels.recurrent_state import StateBatch
from pallas_kernels.recurrent_state.xla import scan_tokens

from .chunks import take_chunks
from .norm import normed


def xla_gated_delta(
    q_tkd: Array,
    k_tkd: Array,
    v_tvd: Array,
    log_decay_tvd: Array,
    beta_tv: Array,
    pool: Array,
    batch: StateBatch,
    *,
    layer: Array | int,
    num_layers: int,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `GatedDelta`; there is nothing to interpret."""
    del interpret
    pool, out_tvd = scan_tokens(
        pool,
        batch,
        layer * (len(pool) // num_layers),
        (q_tkd, k_tkd, v_tvd, log_decay_tvd, beta_tv),
        jnp.zeros_like(v_tvd),
        partial(_step, group=v_tvd.shape[1] // q_tkd.shape[1]),
        take_chunks,
    )
    return out_tvd, pool


def _step(states_svkd: Array, inputs: tuple[Array, ...], group: int) -> tuple[Array, Array]:
    """Update each sequence's state by one token."""
    q_skd, k_skd, v_svd, log_decay_svk, beta_sv = inputs
    q_svk, k_svk = (jnp.repeat(normed(x), group, axis=1) for x in (q_skd, k_skd))
    states_svkd = states_svkd * jnp.exp(log_decay_svk)[..., None]
    seen_svd = jnp.sum(k_svk[..., None] * states_svkd, axis=2)
    delta_svd = (v_svd.astype(jnp.float32) - seen_svd) * beta_sv[..., None]
    states_svkd = states_svkd + k_svk[..., None] * delta_svd[:, :, None]
    out_svd = jnp.sum(q_svk[..., None] * states_svkd, axis=2) * q_svk.shape[-1] ** -0.5
    return states_svkd, out_svd.astype(v_svd.dtype)
