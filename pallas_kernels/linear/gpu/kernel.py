"""The kernel in Mosaic GPU: weights stream through shared memory as codes and are widened in registers.

The product is computed transposed, [out, rows], so that a wgmma takes weights from registers: each of the four threads
that share a row of an operand holds a word of 32 bits, with codes of several inputs, and the rows of x come in that
order. As many thread blocks as there are SMs each walk their share of the tiles: a producer warpgroup brings codes and
rows by TMA into a ring of shared memory, and begins the next tile's before this one ends. Consumer warpgroups widen and
multiply 64 outputs each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.paged_attention.gpu.common import MMA_ROWS, compiler_params, interpret_params, tiled_smem
from pallas_kernels.weights import WeightFormat

from .parts import Held, Parts, as_entries
from .sizes import CONSUMERS, DEPTH, ROW_SLAB, Sizes, depth_of_rows, piece
from .widen import TILES, Widening
from .words import Operands, words_layout

COLUMNS = CONSUMERS * MMA_ROWS
_MULTIPLIED = 64
"""The inputs that are multiplied together: as many as fill a swizzled row of shared memory."""
_LAYOUT = plgpu.Layout.WGMMA
_WORDS = words_layout()


def multiply_tiles(
    x_tk: Array,
    words_low: Array,
    grouped: Mapping[str, Array],
    items: Items,
    form: WeightFormat,
    *,
    out_dtype: DTypeLike,
    sizes: Sizes,
    interpret: bool,
) -> Array:
    """Return [parts, o, t], or with `is_by_row` [parts, t, o]; there is one part if a tile computes whole sums.

    Args:
      x_tk: rows of x in the order of `in_kernel_order`.
      words_low: codes of all matrices as int32 words, [l, o, words].
      grouped: all parts of the weights but their codes, [l, o, groups].
      items: the tiles.
      form: the weight's format.
      out_dtype: the result's dtype.
      sizes: how the call is divided.
      interpret: run it on a CPU.
    """
    num_rows, num_outputs, by_row = x_tk.shape[0], words_low.shape[1], is_by_row(out_dtype)
    widening = Widening(form)
    smem = _Smem(
        x=tiled_smem((sizes.stages, sizes.rows, depth_of_rows(form)), x_tk.dtype),
        # A row of codes must be a multiple of a tile.
        words=tiled_smem((sizes.stages, COLUMNS, DEPTH), words_low.dtype, columns=math.gcd(words_low.shape[2], DEPTH)),
        out=plgpu.SMEM((CONSUMERS, *((sizes.rows, MMA_ROWS) if by_row else (MMA_ROWS, sizes.rows))), out_dtype),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=sizes.stages),
        free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=sizes.stages),
        weights=tiled_smem((CONSUMERS, MMA_ROWS, _MULTIPLIED), x_tk.dtype) if interpret else None,
    )

    def body(x: Any, words: Any, *refs: Any, smem: _Smem) -> None:
        *inputs, y = refs
        held, operands = dict(zip(grouped, inputs, strict=False)), tuple(inputs[len(grouped) :])
        own_items = items._replace(operands=operands)
        _Program(x, words, Parts(held, widening), own_items, y, smem, widening, sizes).run()

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(
            (1 if sizes.is_whole else sizes.parts, *((num_rows, num_outputs) if by_row else (num_outputs, num_rows))),
            out_dtype,
        ),
        grid=(sizes.workers,),
        grid_names=("worker",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="quantized_linear",
        scratch_types={"smem": smem},
        compiler_params=compiler_params(),
        interpret=interpret_params(interpret),
    )
    entries = [as_entries(part, name, widening) for name, part in grouped.items()]
    return kernel(x_tk, words_low, *entries, *items.operands)


class _Smem(NamedTuple):
    """The shared memory and barriers."""

    x: Any
    words: Any
    out: Any
    full: Any
    free: Any
    weights: Any = None
    """The place where the interpreter puts widened weights, since it multiplies only from shared memory."""


class Item(NamedTuple):
    """A tile; int32 scalars."""

    matrix: Array
    """The index of the matrix that it multiplies by."""
    output: Array
    """Its first output."""
    row: Array
    """Its first row of x."""
    part: Array
    """The part of its sums, 0 if it computes whole sums."""
    num_rows: Array | None = None
    """The number of rows that it stores, in slabs of 16; None: all."""


class Items(NamedTuple):
    """The tiles of a call, by number.

    Tiles of the same weights follow one another, so that the weights come once from memory and then from the cache.
    """

    operands: tuple[Array, ...]
    """The arrays that describe the tiles."""
    total: Callable[[tuple[Any, ...]], Array | int]
    """A function of the operands' refs that returns the number of tiles."""
    locate: Callable[[tuple[Any, ...], Array], Item]
    """A function of the operands' refs and a number that returns a tile."""


@dataclass(frozen=True)
class _Program:
    """One thread block's refs and static settings."""

    x: Any
    words: Any
    parts: Parts
    items: Items
    y: Any
    smem: _Smem
    widening: Widening
    sizes: Sizes

    @property
    def form(self) -> WeightFormat:
        return self.widening.form

    @property
    def num_pieces(self) -> int:
        return -(-self.words.shape[2] // DEPTH)

    @property
    def pieces_of_part(self) -> int:
        return -(-self.num_pieces // self.sizes.parts)

    def run(self) -> None:
        """Produce or consume."""
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < CONSUMERS)
        def _():
            plgpu.set_max_registers(232, action="increase")
            self._for_each_item(partial(self._consume, warpgroup))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == CONSUMERS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            stages = self.sizes.stages
            brought = self._for_each_item(self._produce)

            # No barrier may end with a phase that nobody waited for.
            def drain(index, _):
                plgpu.barrier_wait(self.smem.free.at[lax.rem(index, stages)])

            lax.fori_loop(lax.max(brought - stages, 0), brought, drain, None)

    def _range(self, part: Array) -> tuple[Array, Array]:
        """Return the pieces of a part: the first, and the one after the last."""
        first = part * self.pieces_of_part
        return first, lax.min(first + self.pieces_of_part, jnp.int32(self.num_pieces))

    def _for_each_item(self, body: Callable[[Item, Array], None]) -> Array:
        """Run `body(item, index)` for the worker's tiles, `index` counting pieces before it. Return their number."""
        worker, total = lax.axis_index("worker"), self.items.total(self.items.operands)

        def step(i, index):
            item = self.items.locate(self.items.operands, worker + i * self.sizes.workers)
            body(item, index)
            if self.sizes.is_whole:
                return index + self.num_pieces
            first, end = self._range(item.part)
            return index + (end - first)

        count = lax.div(total - worker + (self.sizes.workers - 1), self.sizes.workers)
        return lax.fori_loop(0, count, step, jnp.int32(0))

    def _produce(self, item: Item, index: Array) -> None:
        """Load a tile's codes and rows."""
        first, end = (0, self.num_pieces) if self.sizes.is_whole else self._range(item.part)
        depth = depth_of_rows(self.form)
        rows = pl.ds(pl.multiple_of(item.row, 8), self.sizes.rows)

        def bring(i, _):
            number = index + (i - first)
            stage = lax.rem(number, self.sizes.stages)

            @pl.when(number >= self.sizes.stages)
            def _():
                plgpu.barrier_wait(self.smem.free.at[stage])

            full = self.smem.full.at[stage]
            outputs = pl.ds(pl.multiple_of(item.output, COLUMNS), COLUMNS)
            source = self.words.at[item.matrix, outputs, pl.ds(pl.multiple_of(i * DEPTH, DEPTH), DEPTH)]
            plgpu.copy_gmem_to_smem(source, self.smem.words.at[stage], full)
            source = self.x.at[rows, pl.ds(pl.multiple_of(i * depth, DEPTH), depth)]
            plgpu.copy_gmem_to_smem(source, self.smem.x.at[stage], full)

        lax.fori_loop(first, end, bring, None)

    def _consume(self, warpgroup: Array, item: Item, index: Array) -> None:
        """Multiply a consumer's 64 outputs of a tile, and store them."""
        rows = pl.ds(pl.multiple_of(warpgroup * MMA_ROWS, MMA_ROWS), MMA_ROWS)
        first_output, num_outputs = item.output + warpgroup * MMA_ROWS, self.words.shape[1]
        # In the last tile a consumer may have no outputs; it computes the last ones again.
        outputs = pl.ds(pl.multiple_of(lax.min(first_output, num_outputs - MMA_ROWS), MMA_ROWS), MMA_ROWS)
        add_part = partial(self._add_part, rows, item.matrix, outputs, warpgroup, index)
        sums = plgpu.layout_cast(jnp.zeros((MMA_ROWS, self.sizes.rows), jnp.float32), _LAYOUT)
        if self.sizes.is_whole and self.sizes.parts > 1:
            sums = lax.fori_loop(0, self.sizes.parts, add_part, sums)
        else:
            sums = add_part(item.part, sums)
        if self.form.group is None and self.sizes.is_whole:
            scales_o = self.parts.factors("scales", item.matrix, outputs, 0)
            sums = sums * lax.broadcast_in_dim(scales_o, sums.shape, (0,))
        pl.when(first_output < num_outputs)(partial(self._store, sums, warpgroup, item, outputs))

    def _store(self, sums: Array, warpgroup: Array, item: Item, outputs: Any) -> None:
        """Write 64 outputs of a tile."""
        out, by_row = self.smem.out.at[warpgroup], is_by_row(self.smem.out.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        (out.transpose((1, 0)) if by_row else out)[...] = sums.astype(out.dtype)
        plgpu.commit_smem()
        if item.num_rows is None:
            rows = pl.ds(pl.multiple_of(item.row, 8), self.sizes.rows)
            plgpu.copy_smem_to_gmem(out, self.y.at[item.part, *((rows, outputs) if by_row else (outputs, rows))])
            return
        for first in range(0, self.sizes.rows, ROW_SLAB):

            @pl.when(first < item.num_rows)
            def _(first=first):
                rows = pl.ds(pl.multiple_of(item.row + first, ROW_SLAB), ROW_SLAB)
                plgpu.copy_smem_to_gmem(out.at[pl.ds(first, ROW_SLAB)], self.y.at[item.part, rows, outputs])

    def _add_part(
        self, rows: Any, matrix: Array, outputs: Any, warpgroup: Array, index: Array, part: Array, before: Array
    ) -> Array:
        """Return `before` plus the sums of 64 outputs over a part of the inputs; `index` counts pieces before it."""
        first, end = self._range(part)
        operands = Operands(
            self.widening, lax.shift_right_logical(matrix, jnp.int32(31)), is_emulated=self._is_emulated
        )
        index = index + (first if self.sizes.is_whole else 0)

        def take(i: Array, held: Held, accumulators: Sequence[Any]) -> Held:
            """Multiply by a piece. Return what the next one is widened with, which is loaded meanwhile."""
            stage = lax.rem(index + (i - first), self.sizes.stages)
            ahead = self.parts.load(matrix, outputs, lax.min(i + 1, jnp.int32(self.num_pieces - 1)))
            plgpu.barrier_wait(self.smem.full.at[stage])
            words = plgpu.load(self.smem.words.at[stage, rows], layout=_WORDS, optimized=False)
            tiles_at_once = _MULTIPLIED // self.widening.depth_of_tile
            for tile in range(0, TILES, tiles_at_once):
                numbers = operands.numbers(words, held.words, range(tile, tile + tiles_at_once))
                sums = accumulators[tile * self.num_accumulators // TILES]
                self._multiply(sums, numbers, stage, tile * self.widening.depth_of_tile, warpgroup)
            if self.form.has_mins:
                self._multiply(accumulators[-1], operands.mins(held.words), stage, piece(self.form), warpgroup)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.smem.free.at[stage])
            return ahead

        held = self.parts.load(matrix, outputs, first)
        if self.widening.sum_scales is None:

            def multiply(sums: Any) -> Array:
                lax.fori_loop(first, end, lambda i, held: take(i, held, [sums]), held)
                return sums[...]

            return before + pl.run_scoped(multiply, self._accumulator) * self.widening.unit
        accumulators = [self._accumulator] * (self.num_accumulators + self.widening.has_own_min_sums)

        def add(i: Array, carry: tuple[Held, Array]) -> tuple[Held, Array]:
            held, sums = carry

            def multiply(*refs: Any) -> tuple[Held, list[Array]]:
                ahead = take(i, held, refs)
                return ahead, [ref[...] for ref in refs]

            ahead, products = pl.run_scoped(multiply, *accumulators)
            for scales, product in zip(held.sum_scales, products, strict=True):
                sums = sums + product * lax.broadcast_in_dim(scales, product.shape, (0,))
            return ahead, sums

        zeros = plgpu.layout_cast(jnp.zeros((MMA_ROWS, self.sizes.rows), jnp.float32), _LAYOUT)
        return before + lax.fori_loop(first, end, add, (held, zeros))[1] * self.widening.unit

    @property
    def _accumulator(self) -> Any:
        return plgpu.WGMMAAccumulatorRef((MMA_ROWS, self.sizes.rows), jnp.float32)

    @property
    def num_accumulators(self) -> int:
        """Return the number of sums of a piece that are scaled on their own."""
        return 1 if self.widening.sum_scales is None else self.widening.count(self.widening.sum_scales)

    @property
    def _is_emulated(self) -> bool:
        return self.smem.weights is not None

    def _multiply(self, sums: Any, weights: Array, stage: Array, first: int, warpgroup: Array) -> None:
        """Add the product of weights and of as many numbers of the rows of x, from the first on."""
        depth = weights.shape[1]
        if self.smem.weights is not None:
            held = self.smem.weights.at[warpgroup, :, pl.ds(0, depth)]
            held[...] = weights
            plgpu.commit_smem()
            weights = held
        plgpu.wgmma(sums, weights, self.smem.x.at[stage, :, pl.ds(first, depth)].transpose((1, 0)))
        if self.smem.weights is not None:
            plgpu.wgmma_wait(0)


def is_by_row(dtype: DTypeLike) -> bool:
    """Return whether results of a dtype are written as [t, o], transposed on their way to shared memory."""
    return jnp.dtype(dtype).itemsize == 2


def divide(x: Array, by: Array | int) -> tuple[Array, Array]:
    """Return the quotient and remainder of numbers that are not negative."""
    quotient = lax.div(x, jnp.asarray(by, jnp.int32))
    return quotient, x - quotient * by
