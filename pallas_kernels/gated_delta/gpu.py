"""The gated delta rule on Hopper GPUs: one Mosaic kernel for decodes, and one that passes states along longer chunks.

A thread block takes 64 values of a head, with all keys: a value's memory depends on no other's. What tiles of chunks
come to without a state is computed in plain XLA. Float32 inputs' chunks are all in plain XLA, which is more exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.common import LOG2_E
from pallas_kernels.recurrent_state import StateBatch
from pallas_kernels.recurrent_state.chunks import Tiles, rounded_dot_in_halves
from pallas_kernels.recurrent_state.gpu import (
    MATRIX,
    OF_COLUMNS,
    OF_ROWS,
    Place,
    load_vector,
    side_by_side,
    spread,
    take_decodes,
)
from pallas_kernels.recurrent_state.gpu_tiles import TILES_BYTES, Products, pass_states, stacked_halves

from .chunks import Prepared, take_chunks
from .reference import NORM_EPS


def gpu_gated_delta(
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
    """See `GatedDelta`. `interpret` runs the kernel on a CPU, in an interpreter that looks for races."""
    first_slot = jnp.asarray(layer, jnp.int32) * (len(pool) // num_layers)
    inputs = q_tkd, k_tkd, v_tvd, log_decay_tvd, beta_tv
    out_tvd, pool = take_decodes(
        partial(_decode, key_heads=k_tkd.shape[1]),
        "gated_delta_decode",
        (side_by_side(q_tkd, k_tkd, v_tvd), log_decay_tvd, beta_tv),
        pool,
        batch,
        first_slot,
        jax.ShapeDtypeStruct(v_tvd.shape, v_tvd.dtype),
        axis=1,
        interpret=interpret,
    )
    ways: dict[str, Any] = {}
    if q_tkd.dtype == jnp.bfloat16:
        has_key_decay = log_decay_tvd.shape[2] > 1
        pass_on = partial(_pass_states, has_key_decay=has_key_decay, dtype=out_tvd.dtype, interpret=interpret)
        ways = {"dot": rounded_dot_in_halves, "pass_states": pass_on, "most_bytes": TILES_BYTES}
    pool, out_tvd = take_chunks(pool, batch, first_slot, inputs, out_tvd, **ways)
    return out_tvd, pool


def _pass_states(
    pool: Array,
    tiles: Tiles,
    prepared: Prepared,
    q_nhck: Array,
    k_nhck: Array,
    *,
    has_key_decay: bool,
    dtype: Any,
    interpret: bool,
) -> tuple[Array, Array]:
    if has_key_decay:
        q_nhck, k_nhck = prepared.q_ck, prepared.k_ck
    products = Products(
        q=stacked_halves(q_nhck),
        w=stacked_halves(prepared.w_ck),
        u=prepared.u_cd,
        scores=stacked_halves(prepared.scores_cc),
        k=stacked_halves(k_nhck),
        q_factor=prepared.q_factor_c1[..., 0],
        k_factor=prepared.k_factor_c1[..., 0],
        decay=prepared.decay_k1[..., 0],
    )
    return pass_states(pool, tiles, products, "gated_delta_tiles", dtype, axis=1, interpret=interpret)


def _decode(
    place: Place,
    wait: Callable[[], None],
    state: Any,
    qkv: Any,
    log_decay: Any,
    beta: Any,
    *,
    key_heads: int,
) -> Array:
    seq, head, part = place
    shape, heads, num_keys = state.shape, beta.shape[1], key_heads * state.shape[0]
    value_dim = (qkv.shape[1] - 2 * num_keys) // heads
    own_key = lax.div(head, heads // key_heads) * shape[0]
    query, key = (
        _normed(load_vector(qkv.at[seq, pl.ds(first + own_key, shape[0])], OF_ROWS)) for first in (0, num_keys)
    )
    own_values = pl.ds(2 * num_keys + head * value_dim + part.start, part.size)
    value, correction = load_vector(qkv.at[seq, own_values], OF_COLUMNS), beta[seq, head]
    if log_decay.shape[2] > 1:
        decay = spread(jnp.exp2(load_vector(log_decay.at[seq, head], OF_ROWS) * LOG2_E), shape, 0)
    else:
        decay = jnp.exp2(log_decay[seq, head, 0] * LOG2_E)
    key_kd = spread(key, shape, 0)
    wait()
    state_kd = plgpu.load(state, layout=MATRIX) * decay
    delta = (value - jnp.sum(state_kd * key_kd, axis=0)) * correction
    state_kd = state_kd + key_kd * spread(delta, shape, 1)
    state[...] = state_kd
    return jnp.sum(state_kd * spread(query, shape, 0), axis=0) * shape[0] ** -0.5


def _normed(x: Array) -> Array:
    return x * lax.rsqrt(jnp.sum(x * x) + NORM_EPS)
