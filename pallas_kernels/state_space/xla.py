"""The scan of Mamba-2 in plain jnp, on all platforms."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.recurrent_state import StateBatch
from pallas_kernels.recurrent_state.xla import Step, scan_tokens


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
    step = step_of(x_thp, a_h, b_tgn, d_h)
    first_slot = layer * (len(pool) // num_layers)
    pool, out_thp = scan_tokens(pool, batch, first_slot, inputs, jnp.zeros_like(x_thp), step)
    return out_thp, pool


def step_of(x_thp: Array, a_h: Array, b_tgn: Array, d_h: Array) -> Step:
    """Return the step of a loop over tokens."""
    group = x_thp.shape[1] // b_tgn.shape[1]

    def step(states_shpn: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        x_shp, dt_sh, b_sgn, c_sgn = (each.astype(jnp.float32) for each in inputs)
        b_shn, c_shn = (jnp.repeat(each, group, axis=1) for each in (b_sgn, c_sgn))
        added = (dt_sh[..., None] * x_shp)[..., None] * b_shn[:, :, None]
        states_shpn = states_shpn * jnp.exp(dt_sh * a_h)[..., None, None] + added
        y_shp = jnp.sum(states_shpn * c_shn[:, :, None], axis=-1) + d_h[:, None] * x_shp
        return states_shpn, y_shp.astype(x_thp.dtype)

    return step
