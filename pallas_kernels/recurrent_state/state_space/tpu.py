"""The scan of states on TPUs: a Pallas call for decodes, and one for the tiles of longer chunks.

A head's state has `state_dim` along lanes: x is transposed once for all heads of a sequence, b and c are rows, and the
outputs are transposed once, after all heads.
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

from .chunks import advance, prepare, take_chunks
from .shape import StateSpaceShape

_LANES = 128
_AT_ONCE = 8
"""The number of heads that go side by side, so that the products of some fill the waits of others."""


def tpu_refusal(shape: StateSpaceShape) -> str | None:
    """Return why the kernels cannot run a shape, or None if they can."""
    if shape.head_dim % 8 or shape.state_dim % 128:
        return f"head_dim must be a multiple of 8 and state_dim of 128, not {shape.head_dim} and {shape.state_dim}"
    return refuse_state(shape.num_heads * shape.head_dim * shape.state_dim * 4, shape.dtype)


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
    t, num_heads, head_dim = x_thp.shape
    if not _fills_lanes(head_dim, num_heads // b_tgn.shape[1]):
        inputs = x_thp, dt_th, b_tgn, c_tgn
        pool, out_thp = take_chunks(a_h, d_h, pool, batch, first_slot, inputs, out_thp)
        return out_thp, pool
    pool, out_tc = take_tiles(
        partial(_tile, num_groups=b_tgn.shape[1]),
        "state_space_tiles",
        [x.reshape(t, -1) for x in (x_thp, b_tgn, c_tgn)],
        [dt_th],
        (a_h[:, None], d_h[:, None]),
        pool,
        batch,
        first_slot,
        out_thp.reshape(t, -1),
        interpret=interpret,
    )
    return out_tc.reshape(out_thp.shape), pool


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
    # [head_dim, heads]: a head's vector is a column.
    x_ph = x[...].astype(jnp.float32).T
    added, decays = x_ph * dt[...], jnp.exp(dt[...] * a[...])
    b_gn, c_gn = (each[...].astype(jnp.float32) for each in (b, c))
    column = lax.broadcasted_iota(jnp.int32, x_ph.shape, 1)
    read = x_ph * d[...]
    for head in range(x.shape[0]):
        column_of_head, shared = slice(head, head + 1), slice(head // group, head // group + 1)
        # The null slot may hold NaN.
        state = (
            jnp.where(goes_on, before[head], 0.0) * decays[:, column_of_head] + added[:, column_of_head] * b_gn[shared]
        )
        after[head] = state
        total = jnp.sum(state * c_gn[shared], axis=1, keepdims=True)
        read = jnp.where(column == head, read + total, read)
    out[...] = read.T.astype(out.dtype)


def _fills_lanes(head_dim: int, group: int) -> bool:
    """Return True if each head takes the lanes of whole vector registers; False if the heads of a group share them."""
    return head_dim == _LANES or (_LANES % head_dim == 0 and group % (_LANES // head_dim) == 0)


def _tile(x: Any, b: Any, c: Any, dt: Any, a: Any, d: Any, read: Any, state: Any, *, num_groups: int) -> None:
    num_heads, head_dim, state_dim = state.shape
    group, width = num_heads // num_groups, max(head_dim, _LANES)
    # Heads of one group, as many as fill the lanes of registers.
    at_once = largest_divisor(group * head_dim // width, _AT_ONCE * head_dim // width) * width // head_dim

    dot = dot_in_halves if x.dtype == jnp.bfloat16 else exact_dot

    def lanes(index: Array, size: int) -> Any:
        return pl.ds(pl.multiple_of(index * size, size), size)

    def take_heads(i: Array, _: None) -> None:
        heads = [i * at_once + offset for offset in range(at_once)]
        shared = lanes(lax.div(heads[0], group), state_dim)
        taken = []
        for offset, head in enumerate(heads):
            row, first = pl.ds(head, 1), offset * head_dim % width
            x_cp = x[:, lanes(lax.div(head * head_dim, width), width)][:, first : first + head_dim]
            taken.append((x_cp, dt[row], a[row], b[:, shared], c[:, shared], d[row]))
        arrays = [jnp.stack(each) for each in zip(*taken, strict=True)]
        prepared, (b_hcn, c_hcn) = jax.vmap(partial(prepare, dot=dot))(*arrays), arrays[3:5]
        states = jnp.stack([state[head] for head in heads])
        states, reads = jax.vmap(partial(advance, dot=dot))(prepared, b_hcn, c_hcn, states)
        for offset, head in enumerate(heads):
            state[head] = states[offset]
        read_cx = jnp.concatenate(list(reads), axis=1).astype(read.dtype)
        read[:, lanes(i, at_once * head_dim)] = read_cx

    lax.fori_loop(0, num_heads // at_once, take_heads, None)
