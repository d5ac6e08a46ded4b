"""Update states by their tokens on a TPU: they are read once and written once, in place.

For decodes a program of the grid is one sequence, with its whole state: Pallas' pipeline loads the next one meanwhile,
and stores the last one. Rows of padding stay at the null slot, which moves nothing.

For longer chunks a program is one tile of all heads, one tile after the other; the state stays in VMEM until it is
kept.
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

from . import chunks
from .batch import StateBatch
from .chunks import TILE_ROWS, Tiles, copy_states

_VMEM_LIMIT = 56 * 2**20
_MOST_STATE_BYTES = 8 << 20
"""The largest state that a kernel takes: VMEM holds two being loaded, two being stored, and one that stays."""


def refuse_state(num_bytes: int, dtype: Any) -> str | None:
    """Return why the TPU's kernels cannot have states of a size and inputs of a dtype, or None if they can."""
    if num_bytes > _MOST_STATE_BYTES:
        return f"a state of {num_bytes >> 20} MiB does not fit in VMEM several times"
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype must be bfloat16 or float32, not {jnp.dtype(dtype).name}"
    return None


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number up to a limit, or 1."""
    return next((x for x in range(limit, 1, -1) if number % x == 0), 1)


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
    """Return `out` with the outputs of decodes in their rows, and the updated pool.

    `body` gets whether there is a state before, then refs: to the sequence's `rows`, to `fixed`, to the state before,
    to the output, and to the state after. The first rows belong to the sequences in order.
    """
    count = min(len(batch.query_starts_s), len(out))
    is_decode_s = lax.iota(jnp.int32, count) < batch.num_decodes
    reads_s, writes_s, saves_s = (
        jnp.where(is_decode_s, x[:count], 0) for x in (batch.read_slots_s, batch.write_slots_s, batch.save_slots_s)
    )
    rows = [x[:count] for x in rows]
    state = (None, *pool.shape[1:])
    options: dict[str, Any] = {"compiler_params": pltpu.CompilerParams(vmem_limit_bytes=_VMEM_LIMIT)}
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
    pool = copy_states(pool, first_slot + writes_s, first_slot + saves_s, saves_s > 0)
    # Rows that the kernel did not compute hold arbitrary memory.
    is_decode = is_decode_s.reshape(-1, *[1] * (out.ndim - 1))
    return out.at[:count].set(jnp.where(is_decode, read, out[:count])), pool


def _own(x: Any) -> pl.BlockSpec:
    return pl.BlockSpec((None, *x.shape[1:]), lambda i, *_: (i, *[0] * (x.ndim - 1)))


def _whole(x: Array) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def _kernel(body: Callable[..., None], *refs: Any) -> None:
    _, _, goes_on, num_decodes, *others = refs
    sequence = pl.program_id(0)
    pl.when(sequence < num_decodes[0])(lambda: body(goes_on[sequence] > 0, *others))


def take_tiles(
    body: Callable[..., None],
    name: str,
    rows: Sequence[Array],
    numbers: Sequence[Array],
    fixed: Sequence[Array],
    pool: Array,
    batch: StateBatch,
    first_slot: Array,
    out: Array,
    *,
    interpret: bool,
) -> tuple[Array, Array]:
    """Return the pool after the longer chunks of a step, and `out` [t, columns] with their rows' outputs.

    `rows` are [t, columns], `numbers` [t, heads]. `body` gets refs: to `rows` [TILE_ROWS, columns] and `numbers`
    [heads, TILE_ROWS], both zeros where a tile lacks rows; to `fixed`; to the output; and to the state, which it
    updates.
    """
    inputs = (*rows, *numbers)
    run = partial(_run_tiles, body, name, interpret, len(rows), tuple(fixed), jax.typeof(out))
    return chunks.take_tiles(
        pool, batch, first_slot, inputs, out, run, at_once=chunks.count_at_once((*inputs, out))
    )  # fmt: skip


def _run_tiles(
    body: Callable[..., None],
    name: str,
    interpret: bool,
    num_rows: int,
    fixed: tuple[Array, ...],
    out: Any,
    pool: Array,
    tiles: Tiles,
    inputs: tuple[Array, ...],
) -> tuple[Array, Array]:
    inputs = (*inputs[:num_rows], *(x.swapaxes(1, 2) for x in inputs[num_rows:]))
    count, state = len(tiles.starts_n), pool.shape[1:]
    tiles_n = lax.iota(jnp.int32, count)
    # The state before a chunk stays until the next chunk: it is loaded early, and must not be a state that is yet to be
    # written.
    is_first_n = (tiles_n == 0) | (tiles.is_first_n > 0)
    reads_n = tiles.reads_n[lax.cummax(jnp.where(is_first_n, tiles_n, 0))]
    flags = (tiles.begins_n, is_first_n.astype(jnp.int32), tiles.is_kept_n | (tiles_n == count - 1))
    scalars = (reads_n, tiles.writes_n, tiles.ends_n - tiles.starts_n, *flags)
    read = jax.ShapeDtypeStruct((count, TILE_ROWS, out.shape[1]), out.dtype)
    options: dict[str, Any] = {"compiler_params": pltpu.CompilerParams(vmem_limit_bytes=_VMEM_LIMIT)}
    if interpret:
        options = {"interpret": pltpu.InterpretParams()}
    read, pool = pl.pallas_call(
        partial(_tile_kernel, body),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(count,),
            in_specs=[
                *map(_own, inputs),
                *map(_whole, fixed),
                pl.BlockSpec((None, *state), lambda i, reads, *_: (reads[i], 0, 0, 0)),
            ],
            out_specs=[_own(read), pl.BlockSpec((None, *state), lambda i, _, writes, *__: (writes[i], 0, 0, 0))],
            scratch_shapes=[pltpu.VMEM(state, pool.dtype)],
        ),
        out_shape=[read, jax.ShapeDtypeStruct(pool.shape, pool.dtype)],
        input_output_aliases={len(scalars) + len(inputs) + len(fixed): 1},
        name=name,
        **options,
    )(*scalars, *inputs, *fixed, pool)
    return pool, read


def _tile_kernel(body: Callable[..., None], *refs: Any) -> None:
    _, _, counts, begins, is_first, is_kept, *inputs, before, read, after, state = refs
    tile = pl.program_id(0)

    def take_over(head: Array, _: None) -> None:
        # The null slot may hold NaN.
        state[head] = jnp.where(begins[tile] > 0, 0.0, before[head])

    def keep(head: Array, _: None) -> None:
        after[head] = state[head]

    @pl.when(counts[tile] > 0)
    def _() -> None:
        pl.when(is_first[tile] > 0)(lambda: lax.fori_loop(0, state.shape[0], take_over, None))
        body(*inputs, read, state)
        pl.when(is_kept[tile] > 0)(lambda: lax.fori_loop(0, state.shape[0], keep, None))
