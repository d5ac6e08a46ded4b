"""Update the states of decodes by one token each on Hopper: they are read once and written once, in place.

A thread block takes a part of one sequence's matrix of a head: TMA loads it into shared memory, it goes through
registers and back, and TMA stores it to its slot, and to a second slot where it is saved. Several thread blocks share a
multiprocessor: while one computes, others wait for memory. The grid is as large as the batch, so that the number of
decodes is not needed on the host; the thread blocks of other sequences write zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.common import compiler_params, interpret_params, tiled_smem

from .batch import StateBatch

PART = 64
"""The rows, or columns, of a head's matrix that a thread block takes: 32 KiB where the other axis has length 128."""
_MOST_SUMMED = 256
"""The greatest length of the other axis, over which a query sums: a thread block has all of it."""
MATRIX = plgpu.Layout.WGMMA
"""The layout of a matrix in registers."""
OF_ROWS, OF_COLUMNS = MATRIX.reduce(1), MATRIX.reduce(0)
"""The layouts of vectors with a number for each row of such a matrix, and for each column."""


class Place(NamedTuple):
    """The part of a state that a thread block takes."""

    seq: Array
    head: Array
    part: Any
    """The slice of the rows or columns of the head's matrix."""


def refuse_state(parted: int, summed: int, names: tuple[str, str], dtype: Any) -> str | None:
    """Return why the GPU's kernels cannot run heads of this size and inputs of a dtype, or None if they can.

    `parted` and `summed` are the lengths of the axis that is cut into parts and of the axis that a query sums over;
    `names` are their names.
    """
    if parted % PART or summed % PART or summed > _MOST_SUMMED:
        return (
            f"{names[0]} and {names[1]} must be multiples of {PART}, and {names[1]} at most {_MOST_SUMMED}, "
            f"not {parted} and {summed}"
        )
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype must be bfloat16 or float32, not {jnp.dtype(dtype).name}"
    return None


def take_decodes(
    body: Callable[..., Array],
    name: str,
    operands: Sequence[Array],
    pool: Array,
    batch: StateBatch,
    first_slot: Array,
    out: jax.ShapeDtypeStruct,
    *,
    axis: int,
    interpret: bool,
) -> tuple[Array, Array]:
    """Return an array like `out` with the outputs of decodes in their rows and zeros in others, and the updated pool.

    A head's matrix is cut into parts along its axis of values, `axis`: 0 for rows, 1 for columns. `body` gets its
    place, a function that waits for the state, a Ref to the state in shared memory, and Refs to the operands. It leaves
    the state after the token in the Ref, and returns the token's output from the part, in float32.
    """
    count = min(len(batch.query_starts_s), out.shape[0])
    matrix = list(pool.shape[2:])
    num_parts, matrix[axis] = matrix[axis] // PART, PART
    kernel = plgpu.kernel(
        partial(_kernel, body, axis),
        out_type=jax.ShapeDtypeStruct((count, *out.shape[1:]), out.dtype),
        grid=(num_parts, pool.shape[1], count),
        grid_names=("part", "head", "seq"),
        kernel_name=name,
        scratch_types={
            "state": tiled_smem(tuple(matrix), pool.dtype, columns=32),
            "read": plgpu.SMEM((PART,), out.dtype),
            "barrier": plgpu.Barrier(),
        },
        compiler_params=compiler_params(),
        interpret=interpret_params(interpret),
    )
    pool_ref = jax.new_ref(pool)
    slots = batch.read_slots_s, batch.write_slots_s, batch.save_slots_s
    read = kernel(*slots, batch.num_decodes.reshape(1), first_slot.reshape(1), pool_ref, *operands)
    return jnp.pad(read, [(0, out.shape[0] - count), (0, 0), (0, 0)]), jax.freeze(pool_ref)


def _kernel(body, axis: int, reads_s, writes_s, saves_s, num_decodes, first_slot, pool, *refs, state, read, barrier):
    part, head, seq = (lax.axis_index(name) for name in ("part", "head", "seq"))
    taken = Place(seq, head, pl.ds(pl.multiple_of(part * PART, PART), PART))
    *operands, out = refs
    layout = OF_COLUMNS if axis else OF_ROWS

    def in_pool(slot: Array) -> Any:
        matrix = pool.at[first_slot[0] + slot, head]
        return matrix.at[:, taken.part] if axis else matrix.at[taken.part]

    @pl.when(seq >= num_decodes[0])
    def _():
        read[...] = plgpu.layout_cast(jnp.zeros(read.shape, read.dtype), layout)
        plgpu.commit_smem()

    @pl.when(seq < num_decodes[0])
    def _():
        goes_on = reads_s[seq] > 0

        @pl.when(goes_on)
        def _():
            plgpu.copy_gmem_to_smem(in_pool(reads_s[seq]), state, barrier)

        def wait() -> None:
            pl.when(goes_on)(lambda: plgpu.barrier_wait(barrier))

            @pl.when(jnp.logical_not(goes_on))
            def _():
                state[...] = plgpu.layout_cast(jnp.zeros(state.shape, state.dtype), MATRIX)

        read[...] = body(taken, wait, state, *operands).astype(read.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(state, in_pool(writes_s[seq]))

        @pl.when(saves_s[seq] > 0)
        def _():
            plgpu.copy_smem_to_gmem(state, in_pool(saves_s[seq]))

    plgpu.copy_smem_to_gmem(read, out.at[seq, head, taken.part])
    plgpu.wait_smem_to_gmem(0)


def side_by_side(*arrays: Array) -> Array:
    """Return arrays [t, ...] side by side in one [t, c]. Where they are slices of one array, XLA passes that on.

    As separate operands they would first be copied out of it, each in a launch.
    """
    t = len(arrays[0])
    return jnp.concatenate([x.reshape(t, 1, -1) for x in arrays], axis=2).reshape(t, -1)


def load_vector(ref: Any, layout: Any) -> Array:
    """Load a vector from global memory in `OF_ROWS` or `OF_COLUMNS`, in float32."""
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def spread(vector: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Return a matrix of a shape with a vector's numbers along its rows (axis 0) or its columns (axis 1)."""
    return lax.broadcast_in_dim(vector, shape, (axis,))
