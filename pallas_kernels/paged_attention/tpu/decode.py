"""Attend decode rows: sequences with one new token each.

One program. A sequence's last KV tile is fetched without the new token, which is put into it in VMEM; the slab of rows
around it goes back to the pool while the tile is attended.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..layout import AttentionBatch
from . import chosen, softmax
from .options import LANES, SUBLANES, Options, hbm, matmul_dtype, present, take
from .stream import KVStream, Ring, Tile, clear_slabs, ring_scratch
from .write import BUFFERS, TokenWriter

_UNROLL = 8
"""The most heads that are attended together: the latencies of each hide behind the others."""


class _Scalars(NamedTuple):
    """Scalars, in SMEM."""

    first_and_window: Any
    """The first block of the layer, and the window."""
    lens_s: Any
    slots_s: Any
    num_decodes: Any


class _Scratch(NamedTuple):
    """Scratch, in VMEM."""

    q: Any
    """[num_buffers, k, r, c]: r is the group, padded."""
    new_kv: Any
    """[num_buffers, k, columns of the pool]."""
    chosen: Any
    """[num_buffers, w / 128, 128], if positions are chosen."""
    input_semaphores: Any
    slabs: Any
    """[2, k, slab, columns of the pool], on the way to the pool."""
    slab_semaphores: Any
    out: Any
    """[2, k, r, v]."""
    out_semaphores: Any
    maxima: Any
    """[k / unroll, unroll * r, 128], as for the sums."""
    sums: Any
    values: Any
    """[k / unroll, unroll * r, v]."""


def decode_attention(
    q_skgc: Array,
    new_skc: Array,
    pool: Array,
    tables: Array,
    sinks_kg: Array | None,
    chosen_sw: Array | None,
    batch: AttentionBatch,
    first_and_window: Array,
    options: Options,
) -> tuple[Array, Array]:
    """Write and attend the leading `num_decodes` sequences; return their rows [s, k, g, v] and the pool."""
    (s, k, g, c), v = q_skgc.shape, options.num_values
    dtype = matmul_dtype(q_skgc.dtype, pool.dtype)
    rows, unroll = pl.cdiv(g, SUBLANES) * SUBLANES, _heads_together(k)
    q_skrc = jnp.pad(q_skgc.astype(dtype), ((0, 0), (0, 0), (0, rows - g), (0, 0)))
    scalars = _Scalars(first_and_window, batch.context_lens_s, batch.slots_t[:s], batch.num_decodes.reshape(1))
    inputs = [tables, q_skrc, new_skc, pool]
    in_specs = [hbm()] * len(inputs)
    if sinks_kg is not None:
        sinks_kr = jnp.pad(sinks_kg.astype(jnp.float32), ((0, 0), (0, rows - g)))
        sinks_kr = sinks_kr.reshape(k // unroll, unroll * rows)
        inputs.append(jnp.broadcast_to(sinks_kr[..., None], (*sinks_kr.shape, LANES)))
        in_specs.append(pl.BlockSpec(memory_space=pltpu.VMEM))
    words = None if chosen_sw is None else chosen_sw.reshape(s, -1, LANES)
    if words is not None:
        inputs.append(words)
        in_specs.append(hbm())
    num_buffers, slab = options.tiles.decode, pool.shape[3]
    float32 = partial(pltpu.VMEM, dtype=jnp.float32)
    ring = ring_scratch(num_buffers, options.kv_tile, pool, tables)
    scratch = _Scratch(
        pltpu.VMEM((num_buffers, k, rows, c), dtype),
        pltpu.VMEM((num_buffers, *new_skc.shape[1:]), new_skc.dtype),
        None if words is None else pltpu.VMEM((num_buffers, *words.shape[1:]), words.dtype),
        pltpu.SemaphoreType.DMA((num_buffers,)),
        pltpu.VMEM((BUFFERS, k, slab, pool.shape[4]), pool.dtype),
        pltpu.SemaphoreType.DMA((BUFFERS,)),
        pltpu.VMEM((BUFFERS, k, rows, v), q_skgc.dtype),
        pltpu.SemaphoreType.DMA((BUFFERS,)),
        float32((k // unroll, unroll * rows, LANES)),
        float32((k // unroll, unroll * rows, LANES)),
        float32((k // unroll, unroll * rows, v)),
    )
    out_skrv, pool = pl.pallas_call(
        partial(_kernel, options=options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(),
            in_specs=in_specs,
            out_specs=[hbm(), hbm()],
            scratch_shapes=[*ring, *present(scratch)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((s, k, rows, v), q_skgc.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={len(scalars) + 3: 1},
        name=f"{options.name}_decode",
        **options.pallas_options(),
    )(*scalars, *inputs)
    return out_skrv[:, :, :g], pool


def _kernel(*refs: Any, options: Options) -> None:
    scalars, refs = take(_Scalars, refs)
    operands, refs = take(_Operands, refs, options.absent)
    ring, refs = take(Ring, refs)
    scratch = take(_Scratch, refs, options.absent)[0]
    decode = _Decode(scalars, operands, ring, scratch, options)
    pl.when(decode.num_items > 0)(decode.run)


class _Operands(NamedTuple):
    """The operands, in HBM except the sinks."""

    tables: Any
    q: Any
    new_kv: Any
    pool: Any
    sinks_krx: Any
    """[k / unroll, unroll * r, 128]."""
    chosen: Any
    """[s, w / 128, 128], if positions are chosen."""
    out: Any
    written: Any
    """The pool again, to write."""


class _Sequence(NamedTuple):
    """An item of the stream."""

    number: Array
    sequence: Array
    first: Array
    end: Array
    slot: Array
    """The slot of the new token."""


@dataclass(frozen=True)
class _Decode:
    """The kernel."""

    scalars: _Scalars
    operands: _Operands
    ring: Ring
    scratch: _Scratch
    options: Options

    @property
    def num_items(self) -> Array:
        return self.scalars.num_decodes[0]

    def run(self) -> None:
        stream = KVStream(
            self.operands.pool,
            self.operands.tables,
            self.ring,
            first_block=self.scalars.first_and_window[0],
            num_items=self.num_items,
            describe=self.describe,
            on_fetch=self.fetch_inputs,
        )
        stream.run(self.start, partial(self.attend, stream), self.end)

        def wait(item: _Sequence) -> None:
            self.out_copy(item).wait()
            self.writer.copy(item).wait()

        stream.for_last(BUFFERS, wait)

    def describe(self, index: Array) -> _Sequence:
        """Return an item: the new token attends to the positions from `first` to its own."""
        end = jnp.maximum(self.scalars.lens_s[index], 1)
        first = jnp.maximum(end - self.scalars.first_and_window[1], 0)
        return _Sequence(index, index, first, end, self.scalars.slots_s[index])

    def fetch_inputs(self, item: _Sequence) -> None:
        for copy in self.input_copies(item):
            copy.start()

    def input_copies(self, item: _Sequence) -> list[Any]:
        scratch, buffer = self.scratch, lax.rem(item.number, self.scratch.q.shape[0])
        pairs = (self.operands.q, scratch.q), (self.operands.new_kv, scratch.new_kv)
        if self.options.has_chosen:
            pairs = *pairs, (self.operands.chosen, scratch.chosen)
        semaphore = scratch.input_semaphores.at[buffer]
        return [pltpu.make_async_copy(source.at[item.number], target.at[buffer], semaphore) for source, target in pairs]

    def out_copy(self, item: _Sequence) -> Any:
        buffer = lax.rem(item.number, BUFFERS)
        return pltpu.make_async_copy(
            self.scratch.out.at[buffer], self.operands.out.at[item.number], self.scratch.out_semaphores.at[buffer]
        )

    @property
    def writer(self) -> TokenWriter:
        scratch = self.scratch
        return TokenWriter(
            self.ring.buffers,
            scratch.new_kv,
            scratch.slabs,
            scratch.slab_semaphores,
            self.operands.written,
            self.scalars.first_and_window[0],
        )

    def start(self, item: _Sequence) -> None:
        for copy in self.input_copies(item):
            copy.wait()
        sinks_krx = self.operands.sinks_krx
        softmax.start(self.states, None if sinks_krx is None else sinks_krx[...])

    @property
    def states(self) -> softmax.State:
        """Return the state of all groups of heads that are attended together."""
        return softmax.State(self.scratch.maxima, self.scratch.sums, self.scratch.values)

    def attend(self, stream: KVStream, tile: Tile[_Sequence]) -> None:
        item, num_tokens = tile.item, self.options.kv_tile
        first_slab, end_slab = stream.slabs(item, tile.tile)
        # Slabs that were not fetched may hold NaN, and 0 x NaN is NaN.
        clear_slabs(self.ring.buffers, tile.buffer, jnp.int32(0), first_slab)
        pl.when(item.end <= (tile.tile + 1) * num_tokens)(lambda: self.writer.write(item, tile.tile, tile.buffer))
        clear_slabs(self.ring.buffers, tile.buffer, end_slab, jnp.int32(self.ring.buffers.shape[2]))
        _, k, rows, _ = self.scratch.q.shape
        num_groups = self.scratch.maxima.shape[0]
        unroll = k // num_groups
        keep_rt = self._keep(tile, rows)
        q_place = lax.rem(item.number, self.scratch.q.shape[0])

        def operands(head: Array | int) -> softmax.Operands:
            kv_tc = self.ring.buffers[tile.buffer, head].reshape(num_tokens, -1)
            return softmax.Operands(self.scratch.q[q_place, head], kv_tc)

        def attend_heads(i: Array | int, _: None) -> None:
            heads = [operands(i * unroll + j) for j in range(unroll)]
            softmax.attend(self.states.at(i), heads, keep_rt, self.options)

        if num_groups == 1:
            attend_heads(0, None)
        else:
            lax.fori_loop(0, num_groups, attend_heads, None)

    def _keep(self, tile: Tile[_Sequence], rows: int) -> Array:
        """Return the mask [rows, num_tokens] of a tile, which is the same for all heads."""
        item, num_tokens = tile.item, self.options.kv_tile
        if self.options.has_chosen:
            buffer = lax.rem(item.number, self.scratch.chosen.shape[0])
            words = self.scratch.chosen[buffer, pl.ds(chosen.row_of(tile.tile, num_tokens), 1)]
            words = jnp.broadcast_to(words, (SUBLANES, LANES))
            bits = chosen.unpack(words, tile.tile, num_tokens, num_tokens)
            return jnp.concatenate([bits] * (rows // SUBLANES), axis=0) != 0
        position = tile.tile * num_tokens + lax.broadcasted_iota(jnp.int32, (rows, num_tokens), 1)
        return (position >= item.first) & (position < item.end)

    def end(self, item: _Sequence) -> None:
        # All copies are of one size: waiting for this one is waiting for the one that used its buffer before.
        pl.when(item.number >= BUFFERS)(lambda: self.out_copy(item).wait())
        out, buffer = self.scratch.out, lax.rem(item.number, BUFFERS)
        _, k, rows, columns = out.shape
        num_groups = self.scratch.maxima.shape[0]
        for i in range(num_groups):
            values = softmax.result(self.states.at(i), self.options).reshape(k // num_groups, rows, columns)
            out[buffer, pl.ds(i * (k // num_groups), k // num_groups)] = values.astype(out.dtype)
        self.out_copy(item).start()


def _heads_together(k: int) -> int:
    """Return the number of heads that are attended together."""
    return max(x for x in range(1, _UNROLL + 1) if k % x == 0)
