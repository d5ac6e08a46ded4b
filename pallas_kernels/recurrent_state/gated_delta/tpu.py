"""The gated delta rule on TPUs: a Pallas call for decodes, and one for the tiles of longer chunks.

Keys lie along sublanes: factors of keys are transposed once for all heads of a sequence, and sums over keys stay in
their lanes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.recurrent_state import StateBatch
from pallas_kernels.recurrent_state.chunks import dot_in_halves, exact_dot
from pallas_kernels.recurrent_state.tpu import largest_divisor, refuse_state, take_decodes, take_tiles

from .chunks import advance, prepare
from .norm import normed
from .shape import GatedDeltaShape

_AT_ONCE = 6
"""The number of value heads that go side by side, so that the products of some fill the waits of others."""


def tpu_refusal(shape: GatedDeltaShape) -> str | None:
    """Return why the kernels cannot run a shape, or None if they can."""
    if shape.key_dim % 128 or shape.value_dim % 128:
        return f"key_dim and value_dim must be multiples of 128, not {shape.key_dim} and {shape.value_dim}"
    return refuse_state(shape.num_value_heads * shape.key_dim * shape.value_dim * 4, shape.dtype)


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
    t = len(q_tkd)
    rows = [x.reshape(t, -1) for x in (q_tkd, k_tkd, v_tvd)]
    decays = log_decay_tvd.reshape(t, -1)
    pool, out_tc = take_tiles(
        partial(_tile, group=v_tvd.shape[1] // q_tkd.shape[1], has_key_decay=has_key_decay),
        "gated_delta_tiles",
        [*rows, *[decays] * has_key_decay],
        [*[decays] * (not has_key_decay), beta_tv],
        (),
        pool,
        batch,
        first_slot,
        out_tvd.reshape(t, -1),
        interpret=interpret,
    )
    return out_tc.reshape(out_tvd.shape), pool


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
    # [key_dim, heads]: a head's vector is a column.
    queries, keys = (normed(x[...]).T for x in (q, k))
    decays = jnp.exp(log_decay[...])
    decays = decays.T if has_key_decay else decays
    values, betas = v[...].astype(jnp.float32), beta[...]
    rows = []
    for head in range(v.shape[0]):
        key_head, column = head // group, slice(head, head + 1)
        # The null slot may hold NaN.
        state = jnp.where(goes_on, before[head], 0.0) * decays[:, column]
        key = keys[:, key_head : key_head + 1]
        seen = jnp.sum(state * key, axis=0, keepdims=True)
        state = state + key * ((values[column] - seen) * betas[:, column])
        after[head] = state
        rows.append(jnp.sum(state * queries[:, key_head : key_head + 1], axis=0, keepdims=True))
    read = jnp.concatenate(rows, axis=0) * k.shape[1] ** -0.5
    out[...] = read.astype(out.dtype)


def _tile(
    q: Any,
    k: Any,
    v: Any,
    log_decay: Any,
    beta: Any,
    read: Any,
    state: Any,
    *,
    group: int,
    has_key_decay: bool,
) -> None:
    key_dim, value_dim = state.shape[1:]
    num_key_heads = state.shape[0] // group
    at_once = largest_divisor(num_key_heads, _AT_ONCE // group)

    dot = dot_in_halves if q.dtype == jnp.bfloat16 else exact_dot

    def lanes(head: Array, size: int) -> Any:
        return pl.ds(pl.multiple_of(head * size, size), size)

    def step(i: Array, _: None) -> None:
        key_heads = [i * at_once + index for index in range(at_once)]
        heads = [head * group + index for head in key_heads for index in range(group)]
        taken = [
            (
                *(x[:, lanes(lax.div(head, group), key_dim)] for x in (q, k)),
                v[:, lanes(head, value_dim)],
                log_decay[:, lanes(head, key_dim)] if has_key_decay else log_decay[pl.ds(head, 1)],
                beta[pl.ds(head, 1)],
            )
            for head in heads
        ]
        prepared = jax.vmap(partial(prepare, dot=dot))(*(jnp.stack(x) for x in zip(*taken, strict=True)))
        states, reads = jax.vmap(partial(advance, dot=dot))(prepared, jnp.stack([state[head] for head in heads]))
        for index, head in enumerate(heads):
            state[head], read[:, lanes(head, value_dim)] = states[index], reads[index].astype(read.dtype)

    lax.fori_loop(0, num_key_heads // at_once, step, None)
