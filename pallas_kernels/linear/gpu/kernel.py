"""The kernel in Mosaic GPU: weights stream through shared memory as codes and are widened in registers.

The product is computed transposed, [out, rows], so that a wgmma takes weights from registers: a word of 32 bits holds
codes of several inputs. The first codes of 16 words are the weights of one wgmma, the second codes those of the next,
and so on. The rows of x come in that order. As many thread blocks as there are SMs each walk their share of the tiles:
a producer warpgroup brings codes and rows by TMA into a ring of shared memory, and begins the next tile's before this
one ends. Consumer warpgroups widen and multiply 64 outputs each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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

from .sizes import CONSUMERS, DEPTH, ROW_SLAB, Sizes, codes_per_word, piece
from .widen import widen

COLUMNS = CONSUMERS * MMA_ROWS
_LAYOUT = plgpu.Layout.WGMMA
_BY_OUTPUT = _LAYOUT.reduce(1)


def multiply_tiles(
    x_ptk: Array,
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
      x_ptk: rows of x in the order of planes of codes, [i / 16, t, 16].
      words_low: codes of all matrices as int32 words, [l, o, words].
      grouped: all parts of the weights but their codes, [l, o, groups].
      items: the tiles.
      form: the weight's format.
      out_dtype: the result's dtype.
      sizes: how the call is divided.
      interpret: run it on a CPU.
    """
    num_rows, num_outputs, by_row = x_ptk.shape[1], words_low.shape[1], is_by_row(out_dtype)
    planes = codes_per_word(form)
    smem = _Smem(
        x=tiled_smem((sizes.stages, planes, sizes.rows, DEPTH), x_ptk.dtype),
        # A row of codes must be a multiple of a tile.
        words=tiled_smem((sizes.stages, COLUMNS, DEPTH), words_low.dtype, columns=math.gcd(words_low.shape[2], DEPTH)),
        out=plgpu.SMEM((CONSUMERS, *((sizes.rows, MMA_ROWS) if by_row else (MMA_ROWS, sizes.rows))), out_dtype),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=sizes.stages),
        free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=sizes.stages),
        weights=tiled_smem((CONSUMERS, MMA_ROWS, DEPTH), x_ptk.dtype) if interpret else None,
    )

    def body(x: Any, words: Any, *refs: Any, smem: _Smem) -> None:
        *inputs, y = refs
        held, operands = dict(zip(grouped, inputs, strict=False)), tuple(inputs[len(grouped) :])
        own_items = items._replace(operands=operands)
        _Program(x, words, held, own_items, y, smem, form, sizes).run()

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
    return kernel(x_ptk, words_low, *grouped.values(), *items.operands)


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
    grouped: Mapping[str, Any]
    items: Items
    y: Any
    smem: _Smem
    form: WeightFormat
    sizes: Sizes

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
        planes = codes_per_word(self.form)
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
            source = self.x.at[pl.ds(i * planes, planes), rows]
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
            scales_o = self._load("scales", item.matrix, outputs, 0)
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
        zero = lax.shift_right_logical(matrix, jnp.int32(31))
        index = index + (first if self.sizes.is_whole else 0)

        def multiply(sums):
            def add(i, held):
                number = index + (i - first)
                stage = lax.rem(number, self.sizes.stages)
                # Meanwhile the numbers with which the next piece is widened are loaded.
                ahead = self._load_grouped(matrix, outputs, lax.min(i + 1, jnp.int32(self.num_pieces - 1)))
                plgpu.barrier_wait(self.smem.full.at[stage])
                words = plgpu.load(self.smem.words.at[stage, rows], layout=_LAYOUT)
                for plane, weights in enumerate(widen(words, held, self.form, self._spread, zero)):
                    self._multiply(sums, weights, stage, plane, warpgroup)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(self.smem.free.at[stage])
                return ahead

            lax.fori_loop(first, end, add, self._load_grouped(matrix, outputs, first))
            return sums[...]

        return before + pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((MMA_ROWS, self.sizes.rows), jnp.float32))

    def _multiply(self, sums: Any, weights: Array, stage: Array, plane: int, warpgroup: Array) -> None:
        if self.smem.weights is not None:
            held = self.smem.weights.at[warpgroup]
            held[...] = weights
            plgpu.commit_smem()
            weights = held
        plgpu.wgmma(sums, weights, self.smem.x.at[stage, plane].transpose((1, 0)))
        if self.smem.weights is not None:
            plgpu.wgmma_wait(0)

    def _load_grouped(self, matrix: Array, outputs: Any, i: Array) -> dict[str, list[Array]]:
        """Return by name the numbers that a piece is widened with: for each group of the piece, one for each output."""
        group, depth = self.form.group, piece(self.form)
        if group is None:
            return {}
        count = max(1, depth // group)
        held = {}
        for name in self.form.parts[1:]:
            per_entry = (self.form.factor_group or 0) if name.endswith("factors") else group
            count = max(1, depth // per_entry)
            first = i * count if per_entry <= depth else lax.div(i, jnp.int32(per_entry // depth))
            held[name] = [self._load(name, matrix, outputs, first + k) for k in range(count)]
        return held

    def _load(self, name: str, matrix: Array, outputs: Any, index: Array | int) -> Array:
        # The last piece may reach beyond the inputs: its numbers there are finite, and rows are 0.
        ref = self.grouped[name]
        ref = ref.at[matrix, outputs, lax.min(index, ref.shape[2] - 1)]
        return plgpu.load(ref, layout=_BY_OUTPUT, optimized=False).astype(jnp.float32)

    @staticmethod
    def _spread(numbers: list[Array]) -> Array:
        """Return a number for each output and word [64, 16], repeated from one for each output and group."""
        shape = (MMA_ROWS, DEPTH)
        spread = [lax.broadcast_in_dim(x, shape, (0,)) for x in numbers]
        words_of_group = DEPTH // len(numbers)
        word = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_LAYOUT)
        result = spread[-1]
        for k in range(len(numbers) - 2, -1, -1):
            result = jnp.where(word < (k + 1) * words_of_group, spread[k], result)
        return result


def is_by_row(dtype: DTypeLike) -> bool:
    """Return whether results of a dtype are written as [t, o], transposed on their way to shared memory."""
    return jnp.dtype(dtype).itemsize == 2


def divide(x: Array, by: Array | int) -> tuple[Array, Array]:
    """Return the quotient and remainder of numbers that are not negative."""
    quotient = lax.div(x, jnp.asarray(by, jnp.int32))
    return quotient, x - quotient * by
