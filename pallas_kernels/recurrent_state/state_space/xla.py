"""The scan of Mamba-2 in plain jnp, on all platforms."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import Array

from pallas_kernels.recurrent_state import StateBatch
from pallas_kernels.recurrent_state.xla import scan_tokens

from .chunks import take_chunks


def xla_state_space(
    x_thp: Array,
    dt_th: Array,
    a_h: Array,
    b_tgn: Array,
    c_tgn: Array,
    d_h: Array,
    pool: Array,
    batch: StateBatch,
    *,
    layer: Array | int,
    num_layers: int,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `StateSpace`; there is nothing to interpret."""
    del interpret
    inputs = x_thp, dt_th, b_tgn, c_tgn
    step = partial(_step, a_h, d_h)
    by_tiles = partial(take_chunks, a_h, d_h)
    first_slot = layer * (len(pool) // num_layers)
    pool, out_thp = scan_tokens(pool, batch, first_slot, inputs, jnp.zeros_like(x_thp), step, by_tiles)
    return out_thp, pool


def _step(a_h: Array, d_h: Array, states_shpn: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
    """Update each sequence's state by one token."""
    x_shp, dt_sh, b_sgn, c_sgn = (each.astype(jnp.float32) for each in inputs)
    group = x_shp.shape[1] // b_sgn.shape[1]
    b_shn, c_shn = (jnp.repeat(each, group, axis=1) for each in (b_sgn, c_sgn))
    added = (dt_sh[..., None] * x_shp)[..., None] * b_shn[:, :, None]
    states_shpn = states_shpn * jnp.exp(dt_sh * a_h)[..., None, None] + added
    y_shp = jnp.sum(states_shpn * c_shn[:, :, None], axis=-1) + d_h[:, None] * x_shp
    return states_shpn, y_shp.astype(inputs[0].dtype)
