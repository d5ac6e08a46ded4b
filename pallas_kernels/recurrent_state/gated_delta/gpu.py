"""The gated delta rule on Hopper GPUs: a Mosaic kernel for decodes, and two for the tiles of longer chunks.

A thread block takes 64 values of a head, with all keys: a value's memory depends on no other's. For tiles one kernel
solves for the corrections, with scores and A that it computes or, with decays of keys, plain XLA does; another kernel
passes states from tile to tile. Chunks run in plain XLA for float32 inputs, where it is more exact, and for keys that
are wider than `_MOST_KEYS`.
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
from pallas_kernels.recurrent_state.chunks import Tiles, decays_of, rounded_dot_in_halves
from pallas_kernels.recurrent_state.gpu import (
    MATRIX,
    OF_COLUMNS,
    OF_ROWS,
    Place,
    load_vector,
    refuse_state,
    side_by_side,
    spread,
    take_decodes,
)
from pallas_kernels.recurrent_state.gpu_tiles import TILES_BYTES, Products, pass_states, stacked_halves

from .chunks import Related, by_heads, relate, take_chunks
from .gpu_solve import Relations, solve
from .norm import norm
from .reference import NORM_EPS
from .shape import GatedDeltaShape

_MOST_KEYS = 128
"""The greatest length of a key in the kernels of tiles: longer ones do not fit in shared memory."""


def gpu_refusal(shape: GatedDeltaShape) -> str | None:
    """Return why the kernels cannot run a shape, or None if they can."""
    return refuse_state(shape.value_dim, shape.key_dim, ("value_dim", "key_dim"), shape.dtype)


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
    taken = pool, batch, first_slot, inputs, out_tvd
    if q_tkd.dtype == jnp.bfloat16 and q_tkd.shape[2] <= _MOST_KEYS:
        run = partial(_pass_tiles, dtype=out_tvd.dtype, interpret=interpret)
        # With decays of keys plain XLA keeps more of each tile, so the inputs get half of the bytes.
        pool, out_tvd = take_chunks(*taken, run, TILES_BYTES // min(2, log_decay_tvd.shape[2]))
    else:
        pool, out_tvd = take_chunks(*taken)
    return out_tvd, pool


def _pass_tiles(
    pool: Array, tiles: Tiles, inputs: tuple[Array, ...], *, dtype: Any, interpret: bool
) -> tuple[Array, Array]:
    """See `Run`."""
    v_ncghd, log_decay_ncghd, beta_ncgh = inputs[2:]
    n, c, d = *v_ncghd.shape[:2], v_ncghd.shape[-1]
    v_nhcd = v_ncghd.reshape(n, c, -1, d).swapaxes(1, 2)
    beta_nhc = beta_ncgh.reshape(n, c, -1).swapaxes(1, 2)
    if log_decay_ncghd.shape[-1] > 1:
        related: Related = by_heads(_relate)(*inputs)
        key_factor, k_until = related.k_until_factor_1c[:, :, 0], stacked_halves(related.k_until_ck)
        u, w = solve(tiles, related.a_cc, beta_nhc, key_factor, v_nhcd, k_until, interpret=interpret)
        scores, queries, keys = (stacked_halves(x) for x in (related.scores_cc, related.q_ck, related.k_ck))
        factors = related.q_factor_c1[..., 0], related.k_factor_c1[..., 0], related.decay_k1[..., 0]
    else:
        q_norm, k_norm, a_factor, key_factor, q_factor, k_factor, decay = by_heads(_factors)(*inputs)
        factors = q_factor, k_factor, decay
        # These are unchanged: several value heads share each.
        queries, keys = (x.swapaxes(1, 2) for x in inputs[:2])
        log_decay_nhc = log_decay_ncghd.reshape(n, c, -1).swapaxes(1, 2)
        relations = Relations(queries, q_norm, k_norm, a_factor, log_decay_nhc)
        u, w, scores = solve(tiles, relations, beta_nhc, key_factor, v_nhcd, keys, interpret=interpret)
    products = Products(queries, w, u, scores, keys, *factors)
    return pass_states(pool, tiles, products, "gated_delta_tiles", dtype, axis=1, interpret=interpret)


def _relate(q_ck: Array, k_ck: Array, _: Array, log_decay_ck: Array, beta_1c: Array) -> Related:
    return relate(q_ck, k_ck, log_decay_ck, beta_1c, dot=rounded_dot_in_halves)


def _factors(q_ck: Array, k_ck: Array, _: Array, log_decay_1c: Array, beta_1c: Array) -> tuple[Array, ...]:
    """Return the factors [c] of q, k and A in `Relations`, `key_factor_nhc` of `solve`, and those of `Products`."""
    q_norm, k_norm = (norm(x)[:, 0] for x in (q_ck, k_ck))
    q_norm *= q_ck.shape[1] ** -0.5
    decays = decays_of(log_decay_1c)
    until, after = decays.until_ck[:, 0], decays.after_ck[:, 0]
    k_beta = k_norm * beta_1c[0]
    return q_norm, k_norm, k_beta, k_beta * until, until * q_norm, after * k_norm, decays.whole_k1[:, 0]


def _decode(
    part_of_state: Place,
    wait: Callable[[], None],
    state: Any,
    qkv: Any,
    log_decay: Any,
    beta: Any,
    *,
    key_heads: int,
) -> Array:
    seq, head, part = part_of_state
    shape, heads, keys_width = state.shape, beta.shape[1], key_heads * state.shape[0]
    value_dim = (qkv.shape[1] - 2 * keys_width) // heads
    own_key = lax.div(head, heads // key_heads) * shape[0]
    query, key = (
        _normed(load_vector(qkv.at[seq, pl.ds(first + own_key, shape[0])], OF_ROWS)) for first in (0, keys_width)
    )
    own_values = pl.ds(2 * keys_width + head * value_dim + part.start, part.size)
    value, strength = load_vector(qkv.at[seq, own_values], OF_COLUMNS), beta[seq, head]
    if log_decay.shape[2] > 1:
        decay = spread(jnp.exp2(load_vector(log_decay.at[seq, head], OF_ROWS) * LOG2_E), shape, 0)
    else:
        decay = jnp.exp2(log_decay[seq, head, 0] * LOG2_E)
    key_kd = spread(key, shape, 0)
    wait()
    state_kd = plgpu.load(state, layout=MATRIX) * decay
    delta = (value - jnp.sum(state_kd * key_kd, axis=0)) * strength
    state_kd = state_kd + key_kd * spread(delta, shape, 1)
    state[...] = state_kd
    return jnp.sum(state_kd * spread(query, shape, 0), axis=0) * shape[0] ** -0.5


def _normed(x: Array) -> Array:
    return x * lax.rsqrt(jnp.sum(x * x) + NORM_EPS)
