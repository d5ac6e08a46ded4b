"""Multiply the rows of each expert by its weights, which stream through VMEM once.

The work is a flat list of (span, tile): a span is up to `Sizes.span` rows of one expert, a tile some rows of its
weights. A tile is multiplied while the next ones are in flight, whichever experts they belong to. A span's rows stay in
VMEM for all tiles, and the next span's rows come meanwhile. Rows of no span are neither read nor written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.linear.tpu.values import unit, values
from pallas_kernels.weights import WeightFormat

from .sizes import LANES, MATMUL_ROWS, ROW_SLAB, SUBLANES, Sizes, weight_slab

CHUNKS_AT_ONCE = 2
"""The number of chunks of 128 inputs that an iteration over them takes."""


class SpanRefs(NamedTuple):
    """The spans: refs in SMEM inside the kernel, arrays outside of it."""

    layer_and_total: Any
    """The layer, and the number of spans."""
    experts_n: Any
    first_slabs_n: Any
    """The first slab of rows of each span."""
    num_slabs_n: Any


class Operands(NamedTuple):
    """The operands in HBM."""

    x: Any
    """[r / 16, 16, in]."""
    w: Any
    """[l, e, out / slab, slab, in], or [l, e, in, out] if the weights lie transposed."""
    scales: Any = None
    """[e, parts, 8, padded columns] of the layer, each scale eight times; [l, e, groups, out] for scales of groups; or
    None."""


class _Scratch(NamedTuple):
    """The scratch in VMEM, and the semaphores of copies."""

    rows: Any
    """[2, span / 16, 16, in]."""
    row_semaphores: Any
    weights: Any
    """[num_buffers, parts, columns / slab, slab, in], or [num_buffers, parts, in, columns]."""
    weight_semaphores: Any
    out: Any
    """[2, span / 16, 16, columns]."""
    out_semaphores: Any
    scales: Any
    """[num_buffers, parts, 8, columns], [num_buffers, parts, groups, columns], or None."""
    scale_semaphores: Any


def scratch_shapes(
    sizes: Sizes, depth: int, row_dtype: Any, weight_dtype: Any, out_dtype: Any, form: WeightFormat | None
) -> _Scratch:
    """Return the shapes of the scratch."""
    slabs, slab = sizes.span // ROW_SLAB, weight_slab(weight_dtype)
    is_scaled = form is not None
    scale_rows = SUBLANES if form is None or form.group is None else depth // form.group
    scales = (sizes.num_buffers, sizes.parts, scale_rows, sizes.columns)
    tile = (depth, sizes.columns) if sizes.is_transposed else (sizes.columns // slab, slab, depth)
    return _Scratch(
        rows=pltpu.VMEM((2, slabs, ROW_SLAB, depth), row_dtype),
        row_semaphores=pltpu.SemaphoreType.DMA((2,)),
        weights=pltpu.VMEM((sizes.num_buffers, sizes.parts, *tile), weight_dtype),
        weight_semaphores=pltpu.SemaphoreType.DMA((sizes.num_buffers,)),
        out=pltpu.VMEM((2, slabs, ROW_SLAB, sizes.columns), out_dtype),
        out_semaphores=pltpu.SemaphoreType.DMA((2,)),
        scales=pltpu.VMEM(scales, jnp.float32) if is_scaled else None,
        scale_semaphores=pltpu.SemaphoreType.DMA((sizes.num_buffers,)) if is_scaled else None,
    )


def column_block(columns: int) -> int:
    """Return the number of columns of a tile that are multiplied at a time, where the sums of groups are scaled."""
    return next(x for x in (4 * LANES, 2 * LANES, LANES) if columns % x == 0)


@dataclass(frozen=True)
class Kernel:
    """One call's refs and static settings."""

    spans: SpanRefs
    operands: Operands
    y: Any
    """[r / 16, 16, padded columns] in HBM."""
    scratch: _Scratch
    sizes: Sizes
    form: WeightFormat | None
    """The format of the weights; None for weights of x's dtype."""
    activate: Callable[[Array], Array] | None

    def run(self) -> None:
        """Multiply all spans by all tiles."""
        ahead = self.sizes.num_buffers - 1
        num_items = self.spans.layer_and_total[1] * self.sizes.num_tiles

        def start(item: Array) -> None:
            @pl.when(item < num_items)
            def _() -> None:
                for copy in self._tile_copies(item):
                    copy.start()

        def run_item(item: Array, _: None) -> None:
            span, tile = self._span(item), lax.rem(item, self.sizes.num_tiles)
            start(item + ahead)

            @pl.when(tile == 0)
            def _() -> None:
                pl.when(span + 1 < self.spans.layer_and_total[1])(lambda: self._row_copy(span + 1).start())
                self._row_copy(span).wait()

            for copy in self._tile_copies(item):
                copy.wait()
            pl.when(item >= 2)(lambda: self._out_copy(item - 2).wait())
            self._multiply(item)
            self._out_copy(item).start()

        pl.when(num_items > 0)(lambda: self._row_copy(jnp.int32(0)).start())
        lax.fori_loop(0, ahead, lambda item, _: start(item), None)
        lax.fori_loop(0, num_items, run_item, None)
        for back in (2, 1):
            pl.when(num_items >= back)(lambda back=back: self._out_copy(num_items - back).wait())

    def _span(self, item: Array) -> Array:
        return lax.div(item, jnp.int32(self.sizes.num_tiles))

    def _row_copy(self, span: Array) -> Any:
        count, buffer = self.spans.num_slabs_n[span], lax.rem(span, 2)
        return pltpu.make_async_copy(
            self.operands.x.at[pl.ds(self.spans.first_slabs_n[span], count)],
            self.scratch.rows.at[buffer, pl.ds(0, count)],
            self.scratch.row_semaphores.at[buffer],
        )

    def _tile_copies(self, item: Array) -> list[Any]:
        """Return the copies of an item's weights. The last tile may have fewer columns."""
        expert, tile = self.spans.experts_n[self._span(item)], lax.rem(item, self.sizes.num_tiles)
        buffer = lax.rem(item, self.sizes.num_buffers)
        weights = self.operands.w.at[self.spans.layer_and_total[0], expert]
        copies = [
            pltpu.make_async_copy(
                source, self.scratch.weights.at[buffer, part, *target], self.scratch.weight_semaphores.at[buffer]
            )
            for part in range(self.sizes.parts)
            for source, target in [self._tile_of(weights, part, tile)]
        ]
        return copies + self._scale_copies(expert, tile, buffer)

    def _scale_copies(self, expert: Array, tile: Array, buffer: Array) -> list[Any]:
        """Return the copies of a tile's scales."""
        scales, columns = self.operands.scales, self.sizes.columns
        if self.form is None:
            return []
        target, semaphore = self.scratch.scales.at[buffer], self.scratch.scale_semaphores.at[buffer]
        if self.form.group is None:
            source = scales.at[expert, :, :, pl.ds(pl.multiple_of(tile * columns, columns), columns)]
            return [pltpu.make_async_copy(source, target, semaphore)]
        firsts = [part * (scales.shape[3] // self.sizes.parts) + tile * columns for part in range(self.sizes.parts)]
        lanes = [pl.ds(pl.multiple_of(first, LANES), columns) for first in firsts]
        sources = [scales.at[self.spans.layer_and_total[0], expert, :, each] for each in lanes]
        return [pltpu.make_async_copy(source, target.at[i], semaphore) for i, source in enumerate(sources)]

    def _tile_of(self, weights: Any, part: int, tile: Array) -> tuple[Any, tuple[Any, ...]]:
        """Return a tile of an expert's weights, and the slice of a buffer that it takes."""
        columns = self.sizes.columns
        if self.sizes.is_transposed:  # tiles are all whole
            if columns == weights.shape[1]:
                return weights, ()
            first = pl.multiple_of(part * (weights.shape[1] // self.sizes.parts) + tile * columns, columns)
            return weights.at[:, pl.ds(first, columns)], ()
        per_part, per_tile = weights.shape[0] // self.sizes.parts, columns // weights.shape[1]
        count = per_tile if per_part % per_tile == 0 else jnp.minimum(per_tile, per_part - tile * per_tile)
        return weights.at[pl.ds(part * per_part + tile * per_tile, count)], (pl.ds(0, count),)

    def _out_copy(self, item: Array) -> Any:
        span, buffer, columns = self._span(item), lax.rem(item, 2), self.sizes.columns
        count = self.spans.num_slabs_n[span]
        first = pl.multiple_of(lax.rem(item, self.sizes.num_tiles) * columns, columns)
        # A single tile may have any number of columns.
        target_columns = slice(None) if self.sizes.num_tiles == 1 else pl.ds(first, columns)
        return pltpu.make_async_copy(
            self.scratch.out.at[buffer, pl.ds(0, count)],
            self.y.at[pl.ds(self.spans.first_slabs_n[span], count), :, target_columns],
            self.scratch.out_semaphores.at[buffer],
        )

    def _multiply(self, item: Array) -> None:
        """Multiply a span's rows by a tile, in matmuls of the sizes of `MATMUL_ROWS`.

        The last matmul may take rows that are not the span's; their results are not stored.
        """
        slabs = self.spans.num_slabs_n[self._span(item)]
        most = min(MATMUL_ROWS[-1], self.sizes.span) // ROW_SLAB
        num_whole = lax.div(slabs, jnp.int32(most))
        lax.fori_loop(0, num_whole, lambda i, _: self._matmul(item, i * most, most), None)
        rest, below = slabs - num_whole * most, 0
        for count in (rows // ROW_SLAB for rows in MATMUL_ROWS if rows <= self.sizes.span):
            is_next = (below < rest) & (rest <= count)
            pl.when(is_next)(lambda count=count: self._matmul(item, num_whole * most, count))
            below = count

    def _matmul(self, item: Array, first: Array, count: int) -> None:
        """Multiply `count` slabs of rows by a tile."""
        if self.form is not None and self.form.group is not None:
            self._multiply_groups(item, first, count, self.form)
            return
        buffer, scratch, columns = lax.rem(item, self.sizes.num_buffers), self.scratch, self.sizes.columns
        slabs = pl.ds(first, count)
        x = scratch.rows[lax.rem(self._span(item), 2), slabs].reshape(count * ROW_SLAB, -1)
        parts = [self._product(x, scratch.weights[buffer, part]) for part in range(self.sizes.parts)]
        if self.form is not None:
            parts = [part * (unit(self.form) * scratch.scales[buffer, i, :1]) for i, part in enumerate(parts)]
        scratch.out[lax.rem(item, 2), slabs] = self._finish(parts).reshape(count, ROW_SLAB, columns)

    def _finish(self, parts: Sequence[Array]) -> Array:
        """Return the result of the sums of the parts: scaled, activated and rounded."""
        y = parts[0] if self.activate is None else self.activate(parts[0]) * parts[1]
        return y.astype(self.scratch.out.dtype)

    def _multiply_groups(self, item: Array, first: Array, count: int, form: WeightFormat) -> None:
        """Multiply `count` slabs of rows by a tile, 128 inputs at a time, and scale the sums of each.

        There are fewer sums than weights, and the weights' numbers stay exact.
        """
        buffer, scratch, slabs = lax.rem(item, self.sizes.num_buffers), self.scratch, pl.ds(first, count)
        depth, group = scratch.rows.shape[-1], form.group or LANES
        block = column_block(self.sizes.columns)
        weight_slabs = block // scratch.weights.shape[3]

        def multiply(number: Array, _: None) -> None:
            columns = pl.ds(pl.multiple_of(number * block, block), block)

            def add(chunk: Array, sums: list[Array]) -> list[Array]:
                lanes = pl.ds(pl.multiple_of(chunk * LANES, LANES), LANES)
                x = scratch.rows[lax.rem(self._span(item), 2), slabs, :, lanes].reshape(count * ROW_SLAB, LANES)
                scales = pl.ds(lax.div(chunk, group // LANES), 1)
                totals = []
                for part, total in enumerate(sums):
                    w = scratch.weights[buffer, part, pl.ds(number * weight_slabs, weight_slabs), :, lanes]
                    product = self._dot(x, values(w.reshape(block, LANES), form, x.dtype))
                    totals.append(total + product * scratch.scales[buffer, part, scales, columns])
                return totals

            zeros = [jnp.zeros((count * ROW_SLAB, block), jnp.float32)] * self.sizes.parts
            sums = lax.fori_loop(0, depth // LANES, add, zeros, unroll=min(CHUNKS_AT_ONCE, depth // LANES))
            sums = [unit(form) * total for total in sums]
            scratch.out[lax.rem(item, 2), slabs, :, columns] = self._finish(sums).reshape(count, ROW_SLAB, block)

        lax.fori_loop(0, self.sizes.columns // block, multiply, None)

    def _product(self, x: Array, w: Array) -> Array:
        """Return the product of rows with a part of a tile, in float32."""
        if not self.sizes.is_transposed:
            w = w.reshape(self.sizes.columns, -1)
        return self._dot(x, w if self.form is None else values(w, self.form, x.dtype))

    def _dot(self, x: Array, w: Array) -> Array:
        """Return the product of rows with weights of their dtype, in float32."""
        return lax.dot_general(
            x,
            w,
            (((1,), (0 if self.sizes.is_transposed else 1,)), ((), ())),
            precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
