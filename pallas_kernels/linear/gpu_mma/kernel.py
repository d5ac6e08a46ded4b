"""The kernel for GPUs from Ampere on: codes stream through shared memory, and are widened in the registers of an mma.

The product is computed transposed, [outputs, rows], as on Hopper: each of the four threads that share a row of an
operand holds words of codes, and the rows of x come in that order. A thread block of four warps computes one tile, or a
part of its sums: 16 outputs a warp at a time. Asynchronous copies bring codes and rows of the next pieces to a ring of
shared memory meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.paged_attention.gpu.common import interpret_params
from pallas_kernels.paged_attention.gpu_mma.common import Operands as MmaLayouts
from pallas_kernels.paged_attention.gpu_mma.common import (
    add_product,
    along_rows,
    compiler_params,
    store_vector,
    synchronize,
    zeros,
)
from pallas_kernels.weights import WeightFormat

from ..gpu.parts import Held, Parts, as_entries
from ..gpu.registers import EmittedAmpereRegisters
from ..gpu.sizes import DEPTH, depth_of_rows, piece
from ..gpu.widen import TILES, Widening
from ..gpu.words import Operands, words_layout
from .copies import end_group, start_copy, wait_for_groups
from .fragments import as_fragments, fragments_shape, load_operand
from .ring import Ring
from .sizes import OPERAND_ROWS, Sizes, words_side_by_side

_MULTIPLIED = 64
"""The inputs that are widened together."""
_MMA = MmaLayouts.of(jnp.bfloat16, row_warps=4)


def multiply(
    x_tk: Array,
    words_low: Array,
    grouped: Mapping[str, Array],
    layer: Array | int,
    form: WeightFormat,
    dtype: DTypeLike,
    sizes: Sizes,
    *,
    interpret: bool,
) -> Array:
    """Return the sums of products as `dtype`, [parts, o, t]; there is one part if a tile computes whole sums.

    Args:
      x_tk: rows of x in the order of `in_kernel_order`, a multiple of the rows of a tile.
      words_low: codes of all matrices as int32 words, [l, o, words].
      grouped: all parts of the weights but their codes, [l, o, groups].
      layer: the index of the matrix.
      form: the weights' format.
      dtype: the result's dtype.
      sizes: how the call is divided.
      interpret: run it on a CPU.
    """
    widening, num_outputs = Widening(form), words_low.shape[1]
    parts = 1 if sizes.is_whole else sizes.parts
    depth = depth_of_rows(form)
    smem = _Smem(
        x=plgpu.SMEM((sizes.stages, *fragments_shape(sizes.rows, depth)), x_tk.dtype),
        words=plgpu.SMEM((sizes.stages, sizes.outputs, DEPTH), words_low.dtype),
    )

    def body(layer: Any, x: Any, words: Any, *refs: Any, smem: _Smem) -> None:
        *inputs, y = refs
        held = Parts(dict(zip(grouped, inputs, strict=True)), widening, overlaps=True)
        _Tile(layer[0], x, words, held, y, smem, sizes, interpret).run()

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((parts, num_outputs, len(x_tk)), dtype),
        # The tiles of the same weights run side by side and share them in the L2 cache.
        grid=(num_outputs // sizes.outputs, parts, len(x_tk) // sizes.rows),
        grid_names=("outputs", "part", "rows"),
        kernel_name="quantized_linear",
        scratch_types={"smem": smem},
        compiler_params=compiler_params(),
        interpret=interpret_params(interpret),
    )
    entries = [as_entries(part, name, widening) for name, part in grouped.items()]
    return kernel(jnp.asarray(layer, jnp.int32).reshape(1), as_fragments(x_tk, sizes.rows, depth), words_low, *entries)


class _Smem(NamedTuple):
    """The ring of shared memory, by stages."""

    x: Any
    words: Any


class _Tile(NamedTuple):
    """One thread block's refs and static settings."""

    layer: Array
    x: Any
    words: Any
    parts: Parts
    y: Any
    smem: _Smem
    sizes: Sizes
    interpret: bool

    @property
    def widening(self) -> Widening:
        return self.parts.widening

    @property
    def num_pieces(self) -> int:
        return -(-self.words.shape[2] // DEPTH)

    def run(self) -> None:
        """Compute a tile's sums, or a part of them, and store them."""
        part, sizes, form = lax.axis_index("part"), self.sizes, self.widening.form
        sums = tuple(zeros((OPERAND_ROWS, sizes.rows), _MMA.sum) for _ in self.operand_outputs)
        if sizes.is_whole and sizes.parts > 1:
            sums = lax.fori_loop(0, sizes.parts, self._add_part, sums)
        else:
            sums = self._add_part(part, sums)
        rows = pl.ds(pl.multiple_of(lax.axis_index("rows") * sizes.rows, sizes.rows), sizes.rows)
        for outputs, total in zip(self.operand_outputs, sums, strict=True):
            if form.group is None and sizes.is_whole:
                total *= along_rows(self.parts.factors("scales", self.layer, outputs, 0), total, _MMA.sum)
            store_vector(self.y.at[part, outputs, rows], total.astype(self.y.dtype))

    @property
    def operand_outputs(self) -> list[Any]:
        """Return the outputs of the tile, 64 at a time."""
        first = lax.axis_index("outputs") * self.sizes.outputs
        starts = range(0, self.sizes.outputs, OPERAND_ROWS)
        return [pl.ds(pl.multiple_of(first + start, OPERAND_ROWS), OPERAND_ROWS) for start in starts]

    def _add_part(self, part: Array, before: tuple[Array, ...]) -> tuple[Array, ...]:
        """Return `before` plus the sums over a part of the inputs."""
        pieces = -(-self.num_pieces // self.sizes.parts)
        first = part * pieces
        end = lax.min(first + pieces, jnp.int32(self.num_pieces))

        def read(i: Array, stage: Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
            held, sums = state
            following = self._load(lax.min(i + 1, end - 1))
            return following, self._add_piece(stage, held, sums)

        ring = Ring(
            self.sizes.stages,
            start=partial(self._bring, end=end),
            wait=lambda pending: None if self.interpret else wait_for_groups(pending),
            synchronize=partial(synchronize, self.interpret),
        )
        nothing = tuple(zeros(x.shape, _MMA.sum) for x in before)
        _, sums = ring.stream(first, end, read, lambda: (self._load(first), nothing))
        return tuple(x + total * self.widening.unit for x, total in zip(before, sums, strict=True))

    def _load(self, i: Array) -> tuple[Held, ...]:
        return tuple(self.parts.load(self.layer, outputs, i) for outputs in self.operand_outputs)

    def _bring(self, i: Array, stage: Array, end: Array) -> None:
        """Start the copies of a piece's codes and rows; if there is no such piece, of nothing."""
        sizes = self.sizes
        outputs = pl.ds(pl.multiple_of(lax.axis_index("outputs") * sizes.outputs, OPERAND_ROWS), sizes.outputs)
        # The last piece ends where a row of codes does.
        word = lax.min(i * DEPTH, jnp.int32(self.words.shape[2] - DEPTH))
        words = self.words.at[self.layer, outputs, pl.ds(pl.multiple_of(word, 8), DEPTH)]
        x = self.x.at[lax.axis_index("rows"), i]

        @pl.when(i < end)
        def _() -> None:
            for source, ring in ((words, self.smem.words), (x, self.smem.x)):
                if self.interpret:
                    ring[stage] = source[...]
                else:
                    start_copy(source, ring.at[stage])

        if not self.interpret:
            end_group()

    def _add_piece(self, stage: Array, held: tuple[Held, ...], sums: tuple[Array, ...]) -> tuple[Array, ...]:
        """Return sums plus the products of a piece in shared memory."""
        form, widening = self.widening.form, self.widening
        side_by_side = words_side_by_side(form)
        zero = lax.shift_right_logical(self.layer, jnp.int32(31))
        operands = Operands(widening, zero, self.interpret, side_by_side, _MMA.lhs, EmittedAmpereRegisters)
        words = [
            plgpu.load(
                self.smem.words.at[stage, pl.ds(start, OPERAND_ROWS)],
                layout=words_layout(side_by_side),
                optimized=False,
            )
            for start in range(0, self.sizes.outputs, OPERAND_ROWS)
        ]

        def add(numbers: list[Array], column: int, products: tuple[Array, ...]) -> tuple[Array, ...]:
            per_input = self.smem.x.shape[1] / depth_of_rows(form)
            fragments = pl.ds(int(column * per_input), int(numbers[0].shape[1] * per_input))
            x_kr = load_operand(self.smem.x.at[stage, fragments], self.sizes.rows, _MMA.rhs, self.interpret)
            multiplied = zip(products, numbers, strict=True)
            return tuple(add_product(product, some, x_kr, self.interpret) for product, some in multiplied)

        nothing = tuple(zeros(x.shape, _MMA.sum) for x in sums)
        scales = zip(*(x.sum_scales for x in held), strict=True)  # of each accumulator
        products = sums if widening.sum_scales is None else nothing
        tiles_at_once = _MULTIPLIED // widening.depth_of_tile
        tiles_of_sums = TILES if widening.sum_scales is None else TILES // widening.count(widening.sum_scales)
        for tile in range(0, TILES, tiles_at_once):
            tiles = range(tile, tile + tiles_at_once)
            numbers = [operands.numbers(some, x.words, tiles) for some, x in zip(words, held, strict=True)]
            products = add(numbers, tile * widening.depth_of_tile, products)
            is_end = tiles.stop % tiles_of_sums == 0
            if is_end and form.has_mins and not widening.has_own_min_sums:
                products = add([operands.mins(x.words) for x in held], piece(form), products)
            if is_end and widening.sum_scales is not None:
                sums, products = _scaled(sums, products, next(scales)), nothing
        if widening.has_own_min_sums:
            products = add([operands.mins(x.words) for x in held], piece(form), nothing)
            sums = _scaled(sums, products, next(scales))
        return products if widening.sum_scales is None else sums


def _scaled(sums: tuple[Array, ...], products: tuple[Array, ...], scales: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return sums plus products, each of 64 outputs, times the scales of outputs."""
    parts = zip(sums, products, scales, strict=True)
    return tuple(total + x * along_rows(scale, x, _MMA.sum) for total, x, scale in parts)
