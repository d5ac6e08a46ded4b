"""Attend decode rows: sequences with one new token each.

One program. A sequence's last KV tile is fetched without the new token, which is put into it in VMEM; the slab of rows
around it goes back to the pool while the tile is attended. Short contexts share a tile, of as many sequences as fit;
which ones depends on a sequence's own length, and no sum has terms of two sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from .options import LANES, SUBLANES, Options, hbm, matmul_dtype, present, rem, take
from .packed import Member, PackedStream
from .stream import KVStream, Ring, Tile, read_blocks, ring_scratch
from .write import TokenWriter

_UNROLL = 8
"""The most heads that are attended together: the latencies of each hide behind the others."""
_OUTPUTS = 16
"""The number of results, and of slabs with new tokens, on their way to HBM: a power of two."""


class _Scalars(NamedTuple):
    """Scalars, in SMEM."""

    first_and_window: Any
    """The first block of the layer, and the window."""
    lens_s: Any
    slots_s: Any
    num_decodes: Any
    short_blocks: Any
    """The blocks of each sequence's first positions, as many as the longest of short contexts has."""


class _Scratch(NamedTuple):
    """Scratch, in VMEM."""

    q: Any
    """[num_inputs, n, r, c]: n is the number of heads or of pairs of heads, r their rows, padded."""
    new_kv: Any
    """[num_inputs, k, columns of the pool]."""
    chosen: Any
    """[num_inputs, w / 128, 128], if positions are chosen."""
    input_semaphores: Any
    slabs: Any
    """[_OUTPUTS, k, slab, columns of the pool], on the way to the pool."""
    slab_semaphores: Any
    out: Any
    """[_OUTPUTS, n, r, v]."""
    out_semaphores: Any
    lists: Any
    """[lists * s] in SMEM: the numbers of the sequences of each length."""
    maxima: Any
    """[n / unroll, unroll * r, 128], as for the sums."""
    sums: Any
    values: Any
    """[n / unroll, unroll * r, v]."""


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
    heads = 2 if options.has_pairs else 1
    n, used = k // heads, heads * g
    rows, unroll = pl.cdiv(used, SUBLANES) * SUBLANES, _together(n, heads)
    q_snrc = jnp.pad(q_skgc.astype(dtype).reshape(s, n, used, c), ((0, 0), (0, 0), (0, rows - used), (0, 0)))
    num_short = max(options.short, default=options.block_size) // options.block_size
    short_blocks = jnp.pad(tables.reshape(s, -1), ((0, 0), (0, num_short)))[:, :num_short].reshape(-1)
    scalars = _Scalars(
        first_and_window, batch.context_lens_s, batch.slots_t[:s], batch.num_decodes.reshape(1), short_blocks
    )
    inputs = [tables, q_snrc, new_skc, pool]
    in_specs = [hbm()] * len(inputs)
    if sinks_kg is not None:
        sinks_nr = jnp.pad(sinks_kg.astype(jnp.float32).reshape(n, used), ((0, 0), (0, rows - used)))
        sinks_nr = sinks_nr.reshape(n // unroll, unroll * rows)
        inputs.append(jnp.broadcast_to(sinks_nr[..., None], (*sinks_nr.shape, LANES)))
        in_specs.append(pl.BlockSpec(memory_space=pltpu.VMEM))
    words = None if chosen_sw is None else chosen_sw.reshape(s, -1, LANES)
    if words is not None:
        inputs.append(words)
        in_specs.append(hbm())
    num_buffers, slab = options.tiles.decode, pool.shape[3]
    num_inputs = num_buffers * (options.kv_tile // min(options.short, default=options.kv_tile))
    float32 = partial(pltpu.VMEM, dtype=jnp.float32)
    ring = ring_scratch(num_buffers, options.kv_tile, pool, tables)
    scratch = _Scratch(
        pltpu.VMEM((num_inputs, n, rows, c), dtype),
        pltpu.VMEM((num_inputs, *new_skc.shape[1:]), new_skc.dtype),
        None if words is None else pltpu.VMEM((num_inputs, *words.shape[1:]), words.dtype),
        pltpu.SemaphoreType.DMA((num_inputs,)),
        pltpu.VMEM((_OUTPUTS, k, slab, pool.shape[4]), pool.dtype),
        pltpu.SemaphoreType.DMA((_OUTPUTS,)),
        pltpu.VMEM((_OUTPUTS, n, rows, v), q_skgc.dtype),
        pltpu.SemaphoreType.DMA((_OUTPUTS,)),
        pltpu.SMEM(((len(options.short) + 1) * s,), jnp.int32),
        float32((n // unroll, unroll * rows, LANES)),
        float32((n // unroll, unroll * rows, LANES)),
        float32((n // unroll, unroll * rows, v)),
    )
    out_snrv, pool = pl.pallas_call(
        partial(_kernel, options=options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(),
            in_specs=in_specs,
            out_specs=[hbm(), hbm()],
            scratch_shapes=[*ring, *present(scratch)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((s, n, rows, v), q_skgc.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={len(scalars) + 3: 1},
        name=f"{options.name}_decode",
        **options.pallas_options(),
    )(*scalars, *inputs)
    return out_snrv[:, :, :used].reshape(s, k, g, v), pool


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
    """[n / unroll, unroll * r, 128]."""
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
        *counts, num_long = self.sort()
        for i, (num_tokens, count) in enumerate(zip(self.options.short, counts, strict=True)):
            pl.when(count > 0)(partial(self.run_short, i, num_tokens, count))
        pl.when(num_long > 0)(lambda: self.run_long(len(counts), num_long))

    def sort(self) -> list[Array]:
        """Write the lists of the sequences that are short, up to each length, and of the others; return their sizes."""
        sizes, size = self.options.short, self.scalars.lens_s.shape[0]

        def add(sequence: Array, counts: tuple[Array, ...]) -> tuple[Array, ...]:
            length = self.scalars.lens_s[sequence]
            number, index = jnp.int32(len(sizes)), counts[-1]
            for i in reversed(range(len(sizes))):
                number = jnp.where(length <= sizes[i], i, number)
                index = jnp.where(length <= sizes[i], counts[i], index)
            self.scratch.lists[number * size + index] = sequence
            return tuple(count + (number == i).astype(jnp.int32) for i, count in enumerate(counts))

        return list(lax.fori_loop(0, self.num_items, add, (jnp.int32(0),) * (len(sizes) + 1)))

    def run_long(self, number: int, count: Array) -> None:
        """Attend sequences of whole tiles."""
        stream = KVStream(
            self.operands.pool,
            self.operands.tables,
            self.ring,
            first_block=self.scalars.first_and_window[0],
            num_items=count,
            describe=partial(self.describe, number),
            on_fetch=self.fetch_inputs,
        )
        stream.run(self.start, partial(self.attend, stream), self.end)
        stream.for_last(_OUTPUTS, self.wait)

    def run_short(self, number: int, num_tokens: int, count: Array) -> None:
        """Attend sequences of at most `num_tokens` tokens."""
        num_blocks = self.scalars.short_blocks.shape[0] // self.scalars.lens_s.shape[0]

        def block_of(item: _Sequence, i: Array | int) -> Array:
            return self.scalars.first_and_window[0] + self.scalars.short_blocks[item.sequence * num_blocks + i]

        stream = PackedStream(
            self.operands.pool,
            self.ring,
            num_tokens,
            num_items=count,
            describe=partial(self.describe, number),
            block_of=block_of,
            on_fetch=self.fetch_inputs,
        )
        stream.run(partial(self.attend_group, num_tokens))
        stream.for_last(_OUTPUTS, self.wait)

    def wait(self, item: _Sequence) -> None:
        """Wait until an item's results are in HBM."""
        self.out_copy(item).wait()
        self.writer.copy(item).wait()

    def describe(self, number: int, index: Array) -> _Sequence:
        """Return an item of a list: the new token attends to the positions from `first` to its own."""
        sequence = self.scratch.lists[number * self.scalars.lens_s.shape[0] + index]
        end = jnp.maximum(self.scalars.lens_s[sequence], 1)
        first = jnp.maximum(end - self.scalars.first_and_window[1], 0)
        return _Sequence(index, sequence, first, end, self.scalars.slots_s[sequence])

    def fetch_inputs(self, item: _Sequence) -> None:
        for copy in self.input_copies(item):
            copy.start()

    def input_copies(self, item: _Sequence) -> list[Any]:
        scratch, buffer = self.scratch, rem(item.number, self.scratch.q.shape[0])
        pairs = (self.operands.q, scratch.q), (self.operands.new_kv, scratch.new_kv)
        if self.options.has_chosen:
            pairs = *pairs, (self.operands.chosen, scratch.chosen)
        semaphore = scratch.input_semaphores.at[buffer]
        return [
            pltpu.make_async_copy(source.at[item.sequence], target.at[buffer], semaphore) for source, target in pairs
        ]

    def out_copy(self, item: _Sequence) -> Any:
        buffer = rem(item.number, _OUTPUTS)
        return pltpu.make_async_copy(
            self.scratch.out.at[buffer], self.operands.out.at[item.sequence], self.scratch.out_semaphores.at[buffer]
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
        stream.copies(tile).clear(stream.span(item, tile.tile))
        first_block = (tile.buffer - tile.tile) * self.ring.tile_blocks
        pl.when(item.end <= (tile.tile + 1) * num_tokens)(lambda: self.writer.write(item, first_block))
        _, n, rows, _ = self.scratch.q.shape
        num_groups = self.scratch.maxima.shape[0]
        unroll = n // num_groups
        keep_rt = self._keep(tile, rows)

        def attend_heads(i: Array | int, _: None) -> None:
            first_block = tile.buffer * self.ring.tile_blocks
            heads = [self.operands_of(item, i * unroll + j, first_block, num_tokens, keep_rt) for j in range(unroll)]
            softmax.attend(self.states.at(i), heads, self.options)

        if num_groups == 1:
            attend_heads(0, None)
        else:
            lax.fori_loop(0, num_groups, attend_heads, None)

    def operands_of(
        self, item: _Sequence, i: Array | int, first_block: Array, num_tokens: int, keep_rt: Array
    ) -> softmax.Operands:
        """Return the operands of head i, or of the i-th pair."""
        num_heads = 2 if self.options.has_pairs else 1
        heads = (i * num_heads + j for j in range(num_heads))
        q_rc = self.scratch.q[rem(item.number, self.scratch.q.shape[0]), i]
        kv = tuple(read_blocks(self.ring.buffers, first_block, head, num_tokens) for head in heads)
        return softmax.Operands(q_rc, kv, keep_rt, self.options.group)

    def attend_group(self, num_tokens: int, members: Sequence[Member[_Sequence]]) -> None:
        """Attend short sequences together, from their first position to their last."""
        for item, exists, copies, span in members:
            for copy in self.input_copies(item):
                copy.wait()
            copies.clear(span)
            self.writer.write(item, copies.first, exists)
            # A copy of the same size used this buffer before.
            pl.when(item.number >= _OUTPUTS)(lambda item=item: self.out_copy(item).wait())
        _, n, rows, columns = self.scratch.out.shape
        num_groups = self.scratch.maxima.shape[0]
        unroll = n // num_groups
        outputs = [rem(item.number, _OUTPUTS) for item, *_ in members]
        position = lax.broadcasted_iota(jnp.int32, (rows, num_tokens), 1)
        masks = [(position >= item.first) & (position < item.end) for item, *_ in members]
        sinks_krx = self.operands.sinks_krx

        def attend_heads(i: Array | int, _: None) -> None:
            heads = [
                self.operands_of(member.item, i * unroll + j, member.copies.first, num_tokens, keep_rt)
                for j in range(unroll)
                for member, keep_rt in zip(members, masks, strict=True)
            ]
            sinks = None
            if sinks_krx is not None:
                by_head = sinks_krx[i].reshape(unroll, 1, rows, LANES)
                sinks = jnp.concatenate([by_head] * len(members), axis=1).reshape(-1, LANES)
            state = softmax.unseen((len(heads) * rows, columns), sinks)
            values = softmax.result(softmax.add(state, heads, self.options), self.options)
            values = values.reshape(unroll, len(members), rows, columns).astype(self.scratch.out.dtype)
            for j, row in enumerate(outputs):
                self.scratch.out[row, pl.ds(i * unroll, unroll)] = values[:, j]

        if num_groups == 1:
            attend_heads(0, None)
        else:
            lax.fori_loop(0, num_groups, attend_heads, None)
        for item, exists, *_ in members:
            pl.when(exists)(lambda item=item: self.out_copy(item).start())

    def _keep(self, tile: Tile[_Sequence], rows: int) -> Array:
        """Return the mask [rows, num_tokens] of a tile, which is the same for all heads."""
        item, num_tokens = tile.item, self.options.kv_tile
        if self.options.has_chosen:
            buffer = rem(item.number, self.scratch.chosen.shape[0])
            words = self.scratch.chosen[buffer, pl.ds(chosen.row_of(tile.tile, num_tokens), 1)]
            words = jnp.broadcast_to(words, (SUBLANES, LANES))
            bits = chosen.unpack(words, tile.tile, num_tokens, num_tokens)
            return jnp.concatenate([bits] * (rows // SUBLANES), axis=0) != 0
        position = tile.tile * num_tokens + lax.broadcasted_iota(jnp.int32, (rows, num_tokens), 1)
        return (position >= item.first) & (position < item.end)

    def end(self, item: _Sequence) -> None:
        # All copies are of one size: waiting for this one is waiting for the one that used its buffer before.
        pl.when(item.number >= _OUTPUTS)(lambda: self.out_copy(item).wait())
        out, buffer = self.scratch.out, rem(item.number, _OUTPUTS)
        _, n, rows, columns = out.shape
        num_groups = self.scratch.maxima.shape[0]
        for i in range(num_groups):
            values = softmax.result(self.states.at(i), self.options).reshape(n // num_groups, rows, columns)
            out[buffer, pl.ds(i * (n // num_groups), n // num_groups)] = values.astype(out.dtype)
        self.out_copy(item).start()


def _together(n: int, num_heads: int) -> int:
    """Return the number of heads, or of pairs of heads, that are attended together."""
    return max(x for x in range(1, _UNROLL // num_heads + 1) if n % x == 0)
