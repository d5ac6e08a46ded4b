"""The scan of states on TPUs: one Pallas call for decodes; longer chunks go in plain XLA after it.

A head's state has `state_dim` along lanes: x is turned once for all heads of a sequence, b and c are rows, and so is
what is read turned, after all heads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.recurrent_state import StateBatch
from pallas_kernels.recurrent_state.tpu import take_decodes

from .chunks import take_chunks


def tpu_state_space(
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
    """See `StateSpace`. `interpret` runs the kernel on a CPU, in Pallas' simulation of a TPU."""
    first_slot = jnp.asarray(layer, jnp.int32) * (len(pool) // num_layers)
    out_thp, pool = take_decodes(
        partial(_decode, group=x_thp.shape[1] // b_tgn.shape[1]),
        "state_space_decode",
        (x_thp, dt_th[:, None], b_tgn, c_tgn),
        (a_h[None], d_h[None]),
        pool,
        batch,
        first_slot,
        jnp.zeros_like(x_thp),
        interpret=interpret,
    )
    inputs = x_thp, dt_th, b_tgn, c_tgn
    pool, out_thp = take_chunks(a_h, d_h, pool, batch, first_slot, inputs, out_thp)
    return out_thp, pool


def _decode(
    goes_on: Array,
    x: Any,
    dt: Any,
    b: Any,
    c: Any,
    a: Any,
    d: Any,
    before: Any,
    out: Any,
    after: Any,
    *,
    group: int,
) -> None:
    # [head_dim, heads]: a head's is a column.
    x_ph = x[...].astype(jnp.float32).T
    added, decays = x_ph * dt[...], jnp.exp(dt[...] * a[...])
    b_gn, c_gn = (each[...].astype(jnp.float32) for each in (b, c))
    column = lax.broadcasted_iota(jnp.int32, x_ph.shape, 1)
    read = x_ph * d[...]
    for head in range(x.shape[0]):
        own, shared = slice(head, head + 1), slice(head // group, head // group + 1)
        # What the null slot holds may be NaN.
        state = jnp.where(goes_on, before[head], 0.0) * decays[:, own] + added[:, own] * b_gn[shared]
        after[head] = state
        found = jnp.sum(state * c_gn[shared], axis=1, keepdims=True)
        read = jnp.where(column == head, read + found, read)
    out[...] = read.T.astype(out.dtype)
