"""Multiply the rows of each expert by its weights, which stream through VMEM once.

The work is a flat list of (span, tile): a span is up to `Sizes.span` rows of one expert, a tile a number of the rows of
its weights. A tile is multiplied while the next ones are in flight, whichever experts they belong to; a span's rows
stay in VMEM for all tiles, and the next span's come meanwhile. What belongs to no span is neither read nor written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .sizes import MATMUL_ROWS, ROW_SLAB, SUBLANES, Sizes, weight_slab


class SpanRefs(NamedTuple):
    """The spans, in SMEM; their arrays outside."""

    place: Any
    """The layer, and the number of spans."""
    experts_n: Any
    first_slabs_n: Any
    """The first slab of rows of each."""
    num_slabs_n: Any


class Operands(NamedTuple):
    """What is in HBM."""

    x: Any
    """[r / 16, 16, in]."""
    w: Any
    """[l, e, out / slab, slab, in], or [l, e, in, out] where it lies so."""
    scales: Any = None
    """[e, parts, 8, padded columns] of the layer, each scale eight times, or None."""


class Scratch(NamedTuple):
    """What is in VMEM, and the semaphores of copies."""

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
    """[num_buffers, parts, 8, columns], or None."""
    scale_semaphores: Any


def scratch_shapes(sizes: Sizes, depth: int, row_dtype: Any, weight_dtype: Any, out_dtype: Any) -> Scratch:
    """Return the shapes of the scratch."""
    slabs, slab = sizes.span // ROW_SLAB, weight_slab(weight_dtype)
    is_scaled = jnp.dtype(weight_dtype) == jnp.int8
    scales = (sizes.num_buffers, sizes.parts, SUBLANES, sizes.columns)
    tile = (depth, sizes.columns) if sizes.is_transposed else (sizes.columns // slab, slab, depth)
    return Scratch(
        rows=pltpu.VMEM((2, slabs, ROW_SLAB, depth), row_dtype),
        row_semaphores=pltpu.SemaphoreType.DMA((2,)),
        weights=pltpu.VMEM((sizes.num_buffers, sizes.parts, *tile), weight_dtype),
        weight_semaphores=pltpu.SemaphoreType.DMA((sizes.num_buffers,)),
        out=pltpu.VMEM((2, slabs, ROW_SLAB, sizes.columns), out_dtype),
        out_semaphores=pltpu.SemaphoreType.DMA((2,)),
        scales=pltpu.VMEM(scales, jnp.float32) if is_scaled else None,
        scale_semaphores=pltpu.SemaphoreType.DMA((sizes.num_buffers,)) if is_scaled else None,
    )


@dataclass(frozen=True)
class Kernel:
    """One call's refs and static settings."""

    spans: SpanRefs
    operands: Operands
    y: Any
    """[r / 16, 16, padded columns] in HBM."""
    scratch: Scratch
    sizes: Sizes
    activate: Callable[[Array], Array] | None

    def run(self) -> None:
        """Multiply all spans by all tiles."""
        ahead = self.sizes.num_buffers - 1
        num_items = self.spans.place[1] * self.sizes.num_tiles

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
                pl.when(span + 1 < self.spans.place[1])(lambda: self._row_copy(span + 1).start())
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
        """Return the copies of an item's weights: of the last tile only what there is."""
        expert, tile = self.spans.experts_n[self._span(item)], lax.rem(item, self.sizes.num_tiles)
        buffer = lax.rem(item, self.sizes.num_buffers)
        weights = self.operands.w.at[self.spans.place[0], expert]
        copies = [
            pltpu.make_async_copy(
                source, self.scratch.weights.at[buffer, part, *target], self.scratch.weight_semaphores.at[buffer]
            )
            for part in range(self.sizes.parts)
            for source, target in [self._tile_of(weights, part, tile)]
        ]
        if self.operands.scales is not None:
            columns = pl.ds(pl.multiple_of(tile * self.sizes.columns, self.sizes.columns), self.sizes.columns)
            source = self.operands.scales.at[expert, :, :, columns]
            semaphore = self.scratch.scale_semaphores.at[buffer]
            copies.append(pltpu.make_async_copy(source, self.scratch.scales.at[buffer], semaphore))
        return copies

    def _tile_of(self, weights: Any, part: int, tile: Array) -> tuple[Any, tuple[Any, ...]]:
        """Return a tile of an expert's weights, and the place in a buffer that it takes."""
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
        place = slice(None) if self.sizes.num_tiles == 1 else pl.ds(first, columns)
        return pltpu.make_async_copy(
            self.scratch.out.at[buffer, pl.ds(0, count)],
            self.y.at[pl.ds(self.spans.first_slabs_n[span], count), :, place],
            self.scratch.out_semaphores.at[buffer],
        )

    def _multiply(self, item: Array) -> None:
        """Multiply a span's rows by a tile: as many at a time as there are, and then the rest.

        The matmul of the rest may take rows that are not the span's; what they become is not stored.
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
        buffer, scratch, columns = lax.rem(item, self.sizes.num_buffers), self.scratch, self.sizes.columns
        slabs = pl.ds(first, count)
        x = scratch.rows[lax.rem(self._span(item), 2), slabs].reshape(count * ROW_SLAB, -1)
        parts = [self._product(x, scratch.weights[buffer, part]) for part in range(self.sizes.parts)]
        if scratch.scales is not None:
            parts = [part * scratch.scales[buffer, i, :1] for i, part in enumerate(parts)]
        y = parts[0] if self.activate is None else self.activate(parts[0]) * parts[1]
        scratch.out[lax.rem(item, 2), slabs] = y.astype(scratch.out.dtype).reshape(count, ROW_SLAB, columns)

    def _product(self, x: Array, w: Array) -> Array:
        """Return the product of rows with a part of a tile, in float32."""
        if not self.sizes.is_transposed:
            w = w.reshape(self.sizes.columns, -1)
        return lax.dot_general(
            x,
            w.astype(x.dtype),
            (((1,), (0 if self.sizes.is_transposed else 1,)), ((), ())),
            precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
