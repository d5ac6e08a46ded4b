"""Take the states of decodes past one token each on a TPU: they are read once and written once, in place.

A program of the grid is one sequence, whose state comes whole: Pallas' pipeline brings the next one meanwhile, and
sends the last one back. Rows of padding stay at the null slot, which moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .batch import StateBatch

VMEM_LIMIT = 56 * 2**20
MOST_STATE_BYTES = 8 << 20
"""The largest state that a kernel takes: VMEM has two that come and two that go."""


def refuse_state(num_bytes: int, dtype: Any) -> str | None:
    """Say why a TPU's kernel cannot have states of a size and inputs of a dtype, None if it can."""
    if num_bytes > MOST_STATE_BYTES:
        return f"a state of {num_bytes >> 20} MiB does not fit in VMEM several times"
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype must be bfloat16 or float32, not {jnp.dtype(dtype).name}"
    return None


def take_decodes(
    body: Callable[..., None],
    name: str,
    rows: Sequence[Array],
    fixed: Sequence[Array],
    pool: Array,
    batch: StateBatch,
    first_slot: Array,
    out: Array,
    *,
    interpret: bool,
) -> tuple[Array, Array]:
    """Return `out` with what decodes read in their rows, and the pool after them.

    `body` gets whether the sequence goes on, so that there is a state before it, then refs: of the sequence's own of
    `rows`, of `fixed`, the state before, what it reads, and the state after. The first rows are those of sequences.
    """
    count = min(len(batch.query_starts_s), len(out))
    is_decode_s = lax.iota(jnp.int32, count) < batch.num_decodes
    reads_s, writes_s, saves_s = (
        jnp.where(is_decode_s, x[:count], 0) for x in (batch.read_slots_s, batch.write_slots_s, batch.save_slots_s)
    )
    rows = [x[:count] for x in rows]
    state = (None, *pool.shape[1:])
    options: dict[str, Any] = {"compiler_params": pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT)}
    if interpret:
        options = {"interpret": pltpu.InterpretParams()}
    scalars = (first_slot + reads_s, first_slot + writes_s, jnp.sign(reads_s), batch.num_decodes.reshape(1))
    read, pool = pl.pallas_call(
        partial(_kernel, body),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(count,),
            in_specs=[
                *map(_own, rows),
                *map(_whole, fixed),
                pl.BlockSpec(state, lambda i, reads, *_: (reads[i], 0, 0, 0)),
            ],
            out_specs=[_own(out), pl.BlockSpec(state, lambda i, _, writes, *__: (writes[i], 0, 0, 0))],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((count, *out.shape[1:]), out.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={len(scalars) + len(rows) + len(fixed): 1},
        name=name,
        **options,
    )(*scalars, *rows, *fixed, pool)
    pool = _save(pool, first_slot + writes_s, first_slot + saves_s, saves_s > 0)
    # Rows that the kernel did not compute hold whatever the memory held.
    is_decode = is_decode_s.reshape(-1, *[1] * (out.ndim - 1))
    return out.at[:count].set(jnp.where(is_decode, read, out[:count])), pool


def _own(x: Array) -> pl.BlockSpec:
    return pl.BlockSpec((None, *x.shape[1:]), lambda i, *_: (i, *[0] * (x.ndim - 1)))


def _whole(x: Array) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def _kernel(body: Callable[..., None], *refs: Any) -> None:
    _, _, goes_on, num_decodes, *others = refs
    sequence = pl.program_id(0)
    pl.when(sequence < num_decodes[0])(lambda: body(goes_on[sequence] > 0, *others))


def _save(pool: Array, sources_s: Array, targets_s: Array, is_saved_s: Array) -> Array:
    """Copy the states that are to be saved, one after the other."""
    order_s = jnp.argsort(is_saved_s, descending=True)

    def copy(i: Array, pool: Array) -> Array:
        state = lax.dynamic_slice_in_dim(pool, sources_s[order_s[i]], 1)
        return lax.dynamic_update_slice_in_dim(pool, state, targets_s[order_s[i]], 0)

    return lax.fori_loop(0, jnp.sum(is_saved_s, dtype=jnp.int32), copy, pool)
