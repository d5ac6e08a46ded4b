"""The kernel in Mosaic GPU: a tile multiplies rows of one expert by two pieces of its weights.

As many thread blocks as there are SMs each walk their share of the tiles. In each, a producer warpgroup streams rows
and weights by TMA into a ring of shared memory, and begins the next tile's before this one ends. Consumer warpgroups
multiply 64 rows each by all columns of the tile with wgmma. A tile of fewer rows wastes a part of the tensor cores'
work; even so they need only a quarter of the time in which the weights come from memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.paged_attention.gpu.common import (
    LOG2_E,
    MMA_ROWS,
    compiler_params,
    interpret_params,
    tiled_smem,
)

from ..spans import Spans
from .sizes import DEPTH, ROW_SLAB, Sizes

HALVES = 2


def multiply_tiles(
    x_ri: Array,
    w_leoi: Array,
    layer: Array | int,
    tiles: Spans,
    *,
    activation: str | None,
    out_dtype: DTypeLike,
    sizes: Sizes,
    interpret: bool,
) -> Array:
    """Return [r, columns]: the products of each tile's rows; the other rows hold anything."""
    num_columns = w_leoi.shape[2] // (1 if activation is None else 2)
    kernel = plgpu.kernel(
        partial(_kernel, activation=activation, sizes=sizes),
        out_type=jax.ShapeDtypeStruct((x_ri.shape[0], num_columns), out_dtype),
        grid=(sizes.workers,),
        grid_names=("worker",),
        num_threads=sizes.consumers + 1,
        thread_name="warpgroup",
        kernel_name="grouped_matmul",
        scratch_types={
            "x": tiled_smem((sizes.stages, sizes.consumers * MMA_ROWS, DEPTH), x_ri.dtype),
            "w": tiled_smem((sizes.stages, HALVES * sizes.columns, DEPTH), w_leoi.dtype),
            "out": plgpu.SMEM((sizes.consumers, MMA_ROWS, sizes.columns), out_dtype),
            "full": plgpu.Barrier(num_arrivals=1 + HALVES, num_barriers=sizes.stages),
            "free": plgpu.Barrier(num_arrivals=sizes.consumers, num_barriers=sizes.stages),
        },
        compiler_params=compiler_params(),
        interpret=interpret_params(interpret),
    )
    # As operands of their own they need no launch that joins them.
    return kernel(x_ri, w_leoi, jnp.asarray(layer, jnp.int32).reshape(1), *tiles)


class _Refs(NamedTuple):
    """The operands, result and scratch of the kernel."""

    x: Any
    w: Any
    layer: Any
    ends_e: Any
    """One past the last tile of rows of each expert."""
    experts_n: Any
    rows_n: Any
    counts_n: Any
    places_n: Any
    siblings_n: Any
    y: Any
    x_smem: Any
    w_smem: Any
    out: Any
    full: Any
    free: Any


class _Item(NamedTuple):
    """A tile, read from memory; int32 scalars."""

    expert: Array
    row: Array
    num_rows: Array
    """The number of rows."""
    column: Array
    """The column where the first half begins."""


def _kernel(*refs: Any, activation: str | None, sizes: Sizes, x: Any, w: Any, **scratch: Any) -> None:
    kernel_refs = _Refs(*refs, x_smem=x, w_smem=w, **scratch)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < sizes.consumers)
    def _():
        plgpu.set_max_registers(232, action="increase")
        _for_each_item(kernel_refs, sizes, activation, partial(_consume, kernel_refs, sizes, activation, warpgroup))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == sizes.consumers)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        num_pieces = _for_each_item(kernel_refs, sizes, activation, partial(_produce, kernel_refs, sizes, activation))

        # No barrier may end with a phase that nobody waited for.
        def drain(piece, _):
            plgpu.barrier_wait(kernel_refs.free.at[lax.rem(piece, sizes.stages)])

        lax.fori_loop(lax.max(num_pieces - sizes.stages, 0), num_pieces, drain, None)


def _for_each_item(refs: _Refs, sizes: Sizes, activation: str | None, body: Callable[[_Item, Array], None]) -> Array:
    """Run `body(item, piece)` for the worker's items, `piece` counting pieces before it. Return their number.

    Tiles of the same columns of an expert follow one another, so that its weights come once from memory and then from
    the cache.
    """
    width = sizes.columns * (HALVES if activation is None else 1)
    column_tiles = -(-refs.y.shape[1] // width)
    num_pieces = refs.x.shape[1] // DEPTH
    worker, total = lax.axis_index("worker"), refs.ends_e[refs.ends_e.shape[0] - 1] * column_tiles

    def step(i, piece):
        number = worker + i * sizes.workers
        entry = lax.div(number, column_tiles)  # some tile of the expert
        first, siblings = entry - refs.places_n[entry], refs.siblings_n[entry]
        within = number - first * column_tiles
        column = lax.div(within, siblings)
        tile = first + within - column * siblings
        body(_Item(refs.experts_n[tile], refs.rows_n[tile], refs.counts_n[tile], column * width), piece)
        return piece + num_pieces

    return lax.fori_loop(0, lax.div(total - worker + (sizes.workers - 1), sizes.workers), step, jnp.int32(0))


def _produce(refs: _Refs, sizes: Sizes, activation: str | None, item: _Item, first_piece: Array) -> None:
    """Bring a tile's rows and weights."""
    layer = refs.layer[0]
    distance = sizes.columns if activation is None else refs.y.shape[1]
    # Where the tile is not full, these include rows of other experts, or rows beyond the last.
    rows = pl.ds(pl.multiple_of(item.row, ROW_SLAB), sizes.rows)

    def bring(i, _):
        piece = first_piece + i
        stage, depth = lax.rem(piece, sizes.stages), pl.ds(pl.multiple_of(i * DEPTH, DEPTH), DEPTH)

        @pl.when(piece >= sizes.stages)
        def _():
            plgpu.barrier_wait(refs.free.at[stage])

        full = refs.full.at[stage]
        plgpu.copy_gmem_to_smem(refs.x.at[rows, depth], refs.x_smem.at[stage, pl.ds(0, sizes.rows)], full)
        for half in range(HALVES):
            first = pl.multiple_of(item.column + half * distance, 8)
            source = refs.w.at[layer, item.expert, pl.ds(first, sizes.columns), depth]
            target = refs.w_smem.at[stage, pl.ds(half * sizes.columns, sizes.columns)]
            plgpu.copy_gmem_to_smem(source, target, full)

    lax.fori_loop(0, refs.x.shape[1] // DEPTH, bring, None)


def _consume(
    refs: _Refs, sizes: Sizes, activation: str | None, warpgroup: Array, item: _Item, first_piece: Array
) -> None:
    """Multiply a consumer's 64 rows of a tile, and store the results."""
    num_pieces = refs.x.shape[1] // DEPTH
    own_rows = pl.ds(pl.multiple_of(warpgroup * MMA_ROWS, MMA_ROWS), MMA_ROWS)

    def multiply(sums):
        def add(i, _):
            stage = lax.rem(first_piece + i, sizes.stages)
            plgpu.barrier_wait(refs.full.at[stage])
            plgpu.wgmma(sums, refs.x_smem.at[stage, own_rows], refs.w_smem.at[stage].transpose((1, 0)))
            # All but this one are done, so the piece before may be overwritten.
            plgpu.wgmma_wait(1)

            @pl.when(i > 0)
            def _():
                plgpu.barrier_arrive(refs.free.at[lax.rem(first_piece + i - 1, sizes.stages)])

        lax.fori_loop(0, num_pieces, add, None)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(refs.free.at[lax.rem(first_piece + num_pieces - 1, sizes.stages)])
        return sums[...]

    sums = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((MMA_ROWS, HALVES * sizes.columns), jnp.float32))
    halves = [sums[:, half * sizes.columns : (half + 1) * sizes.columns] for half in range(HALVES)]
    if activation is not None:
        halves = [halves[0] * _gate(halves[0], activation) * halves[1]]
    out = refs.out.at[warpgroup]
    for i, half in enumerate(halves):
        columns = pl.ds(item.column + i * sizes.columns, sizes.columns)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out[...] = half.astype(out.dtype)
        plgpu.commit_smem()
        for first in range(0, min(sizes.rows, MMA_ROWS), ROW_SLAB):
            row = warpgroup * MMA_ROWS + first

            @pl.when(row < item.num_rows)
            def _(first=first, row=row, columns=columns):
                rows = pl.ds(pl.multiple_of(item.row + row, ROW_SLAB), ROW_SLAB)
                plgpu.copy_smem_to_gmem(out.at[pl.ds(first, ROW_SLAB)], refs.y.at[rows, columns])


def _gate(x: Array, activation: str) -> Array:
    """Return the activation's factor of x: the sigmoid of x, or of twice the argument of GELU's tanh."""
    if activation == "gelu_pytorch_tanh":
        x = x * (1.5957691216057308 + 0.0713548162726 * x * x)  # 2 sqrt(2 / pi), and 0.044715 times that
    return 1.0 / (1.0 + jnp.exp2(x * -LOG2_E))
