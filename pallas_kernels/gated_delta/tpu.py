"""The gated delta rule on TPUs: one Pallas call for decodes; longer chunks go in plain XLA after it.

Keys lie along sublanes: what is multiplied by a key is turned once for all heads of a sequence, and sums over keys stay
in their lanes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.recurrent_state import StateBatch
from pallas_kernels.recurrent_state.tpu import take_decodes

from .chunks import take_chunks
from .norm import normed


def tpu_gated_delta(
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
    """See `GatedDelta`. `interpret` runs the kernel on a CPU, in Pallas' simulation of a TPU."""
    first_slot = jnp.asarray(layer, jnp.int32) * (len(pool) // num_layers)
    has_key_decay = log_decay_tvd.shape[2] > 1
    log_decay = log_decay_tvd if has_key_decay else log_decay_tvd.swapaxes(1, 2)
    out_tvd, pool = take_decodes(
        partial(_decode, has_key_decay=has_key_decay),
        "gated_delta_decode",
        (q_tkd, k_tkd, v_tvd, log_decay, beta_tv[:, None]),
        (),
        pool,
        batch,
        first_slot,
        jnp.zeros_like(v_tvd),
        interpret=interpret,
    )
    inputs = q_tkd, k_tkd, v_tvd, log_decay_tvd, beta_tv
    pool, out_tvd = take_chunks(pool, batch, first_slot, inputs, out_tvd)
    return out_tvd, pool


def _decode(
    goes_on: Array,
    q: Any,
    k: Any,
    v: Any,
    log_decay: Any,
    beta: Any,
    before: Any,
    out: Any,
    after: Any,
    *,
    has_key_decay: bool,
) -> None:
    group = v.shape[0] // k.shape[0]
    # [key_dim, heads]: a head's is a column.
    queries, keys = (normed(x[...]).T for x in (q, k))
    decays = jnp.exp(log_decay[...])
    decays = decays.T if has_key_decay else decays
    values, betas = v[...].astype(jnp.float32), beta[...]
    rows = []
    for head in range(v.shape[0]):
        key_head, own = head // group, slice(head, head + 1)
        # What the null slot holds may be NaN.
        state = jnp.where(goes_on, before[head], 0.0) * decays[:, own]
        key = keys[:, key_head : key_head + 1]
        seen = jnp.sum(state * key, axis=0, keepdims=True)
        state = state + key * ((values[own] - seen) * betas[:, own])
        after[head] = state
        rows.append(jnp.sum(state * queries[:, key_head : key_head + 1], axis=0, keepdims=True))
    read = jnp.concatenate(rows, axis=0) * k.shape[1] ** -0.5
    out[...] = read.astype(out.dtype)
