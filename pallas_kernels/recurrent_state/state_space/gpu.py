"""The scan of states on Hopper GPUs: a Mosaic kernel for decodes, and one that passes states along longer chunks.

A thread block takes 64 rows of a head's state, which do not depend on the others. For tiles plain XLA computes the
scores by which tokens read each other. Chunks of float32 inputs run in plain XLA alone, which is more exact.
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
    PART,
    Place,
    load_vector,
    refuse_state,
    side_by_side,
    spread,
    take_decodes,
)
from pallas_kernels.recurrent_state.gpu_tiles import TILES_BYTES, Products, pass_states, stacked_halves

from .chunks import scores_and_decays, take_chunks
from .shape import StateSpaceShape


def gpu_refusal(shape: StateSpaceShape) -> str | None:
    """Return why the kernels cannot run a shape, or None if they can."""
    return refuse_state(shape.head_dim, shape.state_dim, ("head_dim", "state_dim"), shape.dtype)


def gpu_state_space(
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
    """See `StateSpace`. `interpret` runs the kernel on a CPU, in an interpreter that looks for races."""
    first_slot = jnp.asarray(layer, jnp.int32) * (len(pool) // num_layers)
    out_thp, pool = take_decodes(
        partial(_decode, groups=b_tgn.shape[1]),
        "state_space_decode",
        (side_by_side(x_thp, b_tgn, c_tgn), dt_th, a_h, d_h),
        pool,
        batch,
        first_slot,
        jax.ShapeDtypeStruct(x_thp.shape, x_thp.dtype),
        axis=0,
        interpret=interpret,
    )
    taken = a_h, d_h, pool, batch, first_slot, (x_thp, dt_th, b_tgn, c_tgn), out_thp
    if x_thp.dtype == jnp.bfloat16:
        run = partial(_pass_tiles, a_h, d_h, dtype=out_thp.dtype, interpret=interpret)
        pool, out_thp = take_chunks(*taken, run, TILES_BYTES)
    else:
        pool, out_thp = take_chunks(*taken)
    return out_thp, pool


def _pass_tiles(
    a_h: Array,
    d_h: Array,
    pool: Array,
    tiles: Tiles,
    inputs: tuple[Array, ...],
    *,
    dtype: Any,
    interpret: bool,
) -> tuple[Array, Array]:
    """See `Run`. Tokens add their x to the state, where the gated delta rule has corrections."""

    def of_head(dt_c: Array, a: Array, d: Array, b_cn: Array, c_cn: Array) -> tuple[Array, ...]:
        scores_cc, decays = scores_and_decays(dt_c[None], a, b_cn, c_cn, dot=rounded_dot_in_halves)
        scores_cc += d * jnp.eye(len(dt_c))  # a token's output also has x times d
        return scores_cc, decays.until_ck[:, 0], dt_c * decays.after_ck[:, 0], decays.whole_k1[:, 0]

    x_ncghp, dt_ncgh, b_ncgn, c_ncgn = inputs
    a, d = (x.reshape(dt_ncgh.shape[2:]) for x in (a_h, d_h))
    of_group = jax.vmap(of_head, in_axes=(1, 0, 0, None, None))
    of_tile = jax.vmap(of_group, in_axes=(1, 0, 0, 1, 1))
    prepared = jax.vmap(of_tile, in_axes=(0, None, None, 0, 0))(dt_ncgh, a, d, b_ncgn, c_ncgn)
    scores, q_factor, k_factor, decay = (x.reshape(len(x), -1, *x.shape[3:]) for x in prepared)
    n, c, p = *x_ncghp.shape[:2], x_ncghp.shape[-1]
    products = Products(
        q=c_ncgn.swapaxes(1, 2),
        w=None,
        u=x_ncghp.reshape(n, c, -1, p).swapaxes(1, 2),
        scores=stacked_halves(scores),
        k=b_ncgn.swapaxes(1, 2),
        q_factor=q_factor,
        k_factor=k_factor,
        decay=decay,
    )
    return pass_states(pool, tiles, products, "state_space_tiles", dtype, axis=0, interpret=interpret)


def _decode(
    part_of_state: Place,
    wait: Callable[[], None],
    state: Any,
    xbc: Any,
    dt: Any,
    a: Any,
    d: Any,
    *,
    groups: int,
) -> Array:
    seq, head, part = part_of_state
    heads, state_dim = dt.shape[1], state.shape[1]
    b_width = groups * state_dim
    x_width = xbc.shape[1] - 2 * b_width
    own_group = lax.div(head, heads // groups) * state_dim
    step, rate, skip = dt[seq, head], a[head], d[head]
    x_p = load_vector(xbc.at[seq, pl.ds(head * (x_width // heads) + part.start, part.size)], OF_ROWS)
    decay, added, read = jnp.exp2(step * rate * LOG2_E), x_p * step, x_p * skip
    wait()
    for start in range(0, state_dim, PART):  # few registers at a time
        columns = pl.ds(start, PART)
        b_n, c_n = (
            load_vector(xbc.at[seq, pl.ds(first + own_group + start, PART)], OF_COLUMNS)
            for first in (x_width, x_width + b_width)
        )
        state_pn = plgpu.load(state.at[:, columns], layout=MATRIX) * decay
        shape = state_pn.shape
        state_pn = state_pn + spread(added, shape, 0) * spread(b_n, shape, 1)
        state[:, columns] = state_pn
        read = read + jnp.sum(state_pn * spread(c_n, shape, 1), axis=1)
    return read
