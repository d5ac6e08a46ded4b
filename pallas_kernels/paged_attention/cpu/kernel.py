"""The kernel in LLVM IR: rotates and writes K and V, then attends; all sums are in float32.

A unit of work is one decode row; if rows are few, one kv head of it; if those are few too and a context is long, some
spans of that kv head (`spans.py`); or one kv head of one tile of a longer chunk. The query rows of a kv head (`group`
heads of each token) attend a few at a time, so that their sums stay in registers, to the sequence's blocks, several
short ones at a time:

    scores [rows, o] = q [rows, h] @ k [h, o]      masked, exponentiated: online softmax
    acc    [rows, h] = p [rows, o] @ v [o, h]

Both are one loop, `_multiply`: in each step a few vectors of the right matrix are multiplied by a number of each row.
In bfloat16 it is two numbers, of pairs that the pool holds side by side, and q and p are rounded to bfloat16; otherwise
the pool's numbers are widened to float32. The order of a row's sums does not depend on the rows beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.native import pairs
from pallas_kernels.native.compiling import num_cores, num_registers
from pallas_kernels.native.emitter import (
    CACHE_LINE,
    F32,
    I32,
    I64,
    LANES,
    NULL,
    POINTER,
    VOID,
    Emitter,
    add_function,
    vector,
)
from pallas_kernels.native.handler import add_handler
from pallas_kernels.native.number_formats import FORMATS

from ..layout import AttentionShape
from .buffers import BUFFERS, Call
from .spans import MASKED, SPAN, Kept, State, merge
from .write import Writer

_MAX_ROWS = 6
"""The number of query rows that are attended at a time."""
_TILE = 64
"""The number of tokens that are attended at a time, unless blocks are longer; the online softmax goes on each time."""
_MAX_NARROW = 64
"""Up to this head_dim the rows of a chunk, which come past the same blocks again and again, fetch nothing ahead."""
ROWS_PER_CORE = 4
"""With this many decode rows per core, a row's heads stay together, and the next head's keys are fetched early."""
_UNITS_PER_CORE = 4
"""Where decode rows times kv heads are fewer than this per core, the spans of a long row are divided among units."""


class _Parts(NamedTuple):
    """Rows that pass by a sequence's blocks together, `num_rows` of a kv head in each part.

    All parts are rows of the same tokens, in the same order.
    """

    count: Any
    positions: list[Any]
    """The position of each row of a part."""
    ends: list[Any]
    """One past the last position that each row sees."""
    heads: Any
    """An array: the kv head of each part. The others hold all rows."""
    places: Any
    """The index of each row among all queries, and of its result among all results."""
    queries: Any
    """The queries in the dtype in which they are multiplied: bfloat16 if the pool is, otherwise float32."""
    span: State
    """Arrays: the softmax state of each row in the span that it attends."""
    merged: State
    """Arrays: the merged state of each row in the spans before, with its sink. Unused where spans are kept separately.
    """


class Rows(NamedTuple):
    """One part: its slices of the arrays of all parts, and room for its scores."""

    queries: Any
    states: list[State]
    """The softmax state of each row; their sums of values lie one behind the other."""
    scores: Any
    probs: Any
    """The probabilities that `scores` become, in the same dtype as `queries`."""

    @property
    def acc(self) -> Any:
        """Return the address of the first row's sum of values."""
        return self.states[0].acc


class _Past(NamedTuple):
    """The positions of a sequence that some rows attend: all that they see, or one unit's share of them."""

    table: Any
    """The sequence's row of the block tables."""
    begin: Any
    """The first position, and one past the last."""
    end: Any


class _Blocks(NamedTuple):
    """One kv head's share of a tile's blocks."""

    keys: Any
    """The pool from this head's keys on."""
    values: Any
    places: Any
    """An array: the address of each block in the pool."""
    live: Any
    """The number of tokens of the sequence that they hold."""


class Kernel(Call):
    """Writes the functions of one kernel."""

    def __init__(self, shape: AttentionShape, query_tile: int) -> None:
        super().__init__(shape)
        self.query_tile = query_tile
        self._left_storage = self.format.storage if self.width == 2 else F32
        """The dtype of the numbers that the pool's numbers are multiplied by."""
        self.max_sums = num_registers() * 3 // 4
        """The number of vectors of sums at a time; the other registers hold their operands."""
        self.num_blocks = max(1, _TILE // shape.block_size)
        """The number of blocks that are attended at a time: from a multiple of it on, whichever rows attend."""
        self.tile = self.num_blocks * shape.block_size
        self.span = max(1, SPAN // self.tile) * self.tile
        """The number of tokens that have a softmax of their own, which is then merged with the earlier ones."""
        self.kept = Kept(shape.group, shape.head_dim)
        self.module = ir.Module()
        self.writer = Writer(shape, self.module)

    def build(self, name: str) -> ir.Module:
        """Return the module, with a function of this name that XLA calls."""
        group = self.shape.group
        passes = -(-group // _MAX_ROWS)
        writes = {count: self.writer.add(count) for count in ((1, LANES) if self.has_words else (1,))}
        decode = self._add_attend("attend_decode", -(-group // passes), self.shape.num_kv_heads * passes, writes[1])
        prefill = self._add_attend("attend_prefill", min(_MAX_ROWS, group * self.query_tile), 1)
        run = self._add_run(decode, prefill)
        add_handler(self.module, name, self._add_prepare(writes), run, self._add_finish())
        return self.module

    def _add_prepare(self, writes: Mapping[int, ir.Function]) -> ir.Function:
        """Write K and V of longer chunks, clear the output of rows of padding, make room for spans, and count the work.

        No other row reads what a decode row writes.
        """
        shape = self.shape
        k, width = shape.num_kv_heads, shape.num_heads * shape.head_dim
        e, (buffers, dims) = add_function(self.module, "prepare", I64, POINTER, POINTER)
        of = self.buffers(e, buffers)
        num_tokens, decodes = self.size(e, dims, "q", 0), e.load_int(of["num_decodes"], 0)
        done = e.variable(I64, decodes)
        with e.range(decodes, num_tokens) as token, e.ir.if_then(e.ir.icmp_signed("==", token, done.value)):
            done.value = e.sum(token, 1)
            slot = e.load_int(of["slots"], token)
            with e.ir.if_else(e.ir.icmp_signed("==", slot, I64(0))) as (is_padding, is_token):
                with is_padding:
                    row = e.at(of["out"], self.format.storage, e.product(token, width))
                    e.clear(row, width * self.format.num_bytes)
                with is_token:
                    write = writes[1]
                    if self.has_words:
                        is_run = self.writer.begins_run(e, of["slots"], token, num_tokens)
                        write = e.ir.select(is_run, writes[LANES], write)
                        done.value = e.ir.select(is_run, e.sum(token, LANES), done.value)
                    e.ir.call(write, [buffers, dims, token, I64(0), I64(k)])
        tiles, units = e.load_int(of["num_tiles"], 0), e.product(decodes, k)
        heads_per_unit, most = self._heads_per_unit(e, decodes), e.variable(I64, I64(1))
        with e.ir.if_then(e.ir.icmp_signed("==", heads_per_unit, I64(1))), e.range(0, decodes) as row:
            position = self._position(e, of, row, row)
            [end] = self._ends(e, of, dims, [row], [position])
            first, last = self._spans(e, self._first_seen(e, of, position), end)
            most.value = e.most(most.value, e.ir.sub(last, first))
        # There are as many units as cores can share evenly, each of whole spans; the longest row decides.
        wanted = e.ceil_div(_UNITS_PER_CORE * num_cores(), e.most(units, 1))
        per_unit = e.ceil_div(most.value, e.least(wanted, most.value))
        kept = self.kept.make(e, e.product(decodes, k), most.value, per_unit)
        e.store(kept, buffers, len(BUFFERS))
        units = e.product(e.ir.sdiv(units, heads_per_unit), self.kept.num_stretches(e, kept))
        e.ir.ret(e.sum(e.product(tiles, k), units))
        return e.function

    def _position(self, e: Emitter, of: dict[str, Any], seq: Any, token: Any) -> Any:
        """Return the position of a sequence's token."""
        # The sequence's last row, ends - 1, has position lens - 1; the others count back from there.
        return e.sum(e.ir.sub(e.load_int(of["lens"], seq), e.load_int(of["ends"], seq)), token)

    def _first_seen(self, e: Emitter, of: dict[str, Any], position: Any) -> Any:
        """Return the first position that a row at a position sees."""
        return e.most(e.sum(e.ir.sub(position, e.load_int(of["window"], 0)), 1), 0)

    def _ends(self, e: Emitter, of: dict[str, Any], dims: Any, tokens: list[Any], positions: list[Any]) -> list[Any]:
        """Return one past the last position that each of some tokens sees."""
        ends = [e.variable(I64, e.sum(position, 1)) for position in positions]
        with e.ir.if_then(e.ir.icmp_signed(">", self.size(e, dims, "row_ends", 0), I64(0))):
            for token, end in zip(tokens, ends, strict=True):
                end.value = e.load_int(of["row_ends"], token)
        return [end.value for end in ends]

    def _spans(self, e: Emitter, begin: Any, end: Any) -> tuple[Any, Any]:
        """Return the first span of a range of positions, and one past the last."""
        return e.ir.sdiv(begin, I64(self.span)), e.ceil_div(end, self.span)

    def _heads_per_unit(self, e: Emitter, num_decodes: Any) -> Any:
        """Return the number of kv heads of a decode row in one unit: all, if there are rows enough for all cores."""
        is_enough = e.ir.icmp_signed(">=", num_decodes, I64(ROWS_PER_CORE * num_cores()))
        return e.ir.select(is_enough, I64(self.shape.num_kv_heads), I64(1))

    def _add_run(self, decode: ir.Function, prefill: ir.Function) -> ir.Function:
        """Do one unit: the tiles of longer chunks come first, as they are the largest."""
        e, (buffers, dims, unit) = add_function(self.module, "run", VOID, POINTER, POINTER, I64)
        of = self.buffers(e, buffers)
        k = self.shape.num_kv_heads
        tile_units = e.product(e.load_int(of["num_tiles"], 0), k)
        with e.ir.if_else(e.ir.icmp_signed("<", unit, tile_units)) as (is_tile, is_decode):
            with is_tile:
                which, head = e.ir.sdiv(unit, I64(k)), e.ir.srem(unit, I64(k))
                seq, row = e.load_int(of["tile_seqs"], which), e.load_int(of["tile_rows"], which)
                count = e.least(e.ir.sub(e.load_int(of["ends"], seq), row), self.query_tile)
                e.ir.call(prefill, [buffers, dims, seq, head, I64(1), row, count, NULL, I64(0)])
            with is_decode:
                heads_per_unit, kept = self._heads_per_unit(e, e.load_int(of["num_decodes"], 0)), self._kept(e, buffers)
                number, count = e.ir.sub(unit, tile_units), self.kept.num_stretches(e, kept)
                first, stretch = e.product(e.ir.sdiv(number, count), heads_per_unit), e.ir.srem(number, count)
                seq, head = e.ir.sdiv(first, I64(k)), e.ir.srem(first, I64(k))
                e.ir.call(decode, [buffers, dims, seq, head, heads_per_unit, seq, I64(1), kept, stretch])
        e.ir.ret_void()
        return e.function

    def _kept(self, e: Emitter, buffers: Any) -> Any:
        """Return the address, left by `prepare`, of the states of spans that are attended separately, or NULL."""
        return e.load(buffers, POINTER, len(BUFFERS))

    def _share(self, e: Emitter, kept: Any, stretch: Any, begin: Any, end: Any) -> tuple[Any, Any]:
        """Return the positions of a range that a unit attends: all, or its stretch of whole spans.

        Beyond a short row's last span it is empty.
        """
        own_begin, own_end = e.variable(I64, begin), e.variable(I64, end)
        with e.ir.if_then(e.ir.icmp_unsigned("!=", kept, NULL)):
            count = self.kept.spans_per_stretch(e, kept)
            first = e.sum(self._spans(e, begin, end)[0], e.product(stretch, count))
            own_begin.value = e.most(begin, e.product(first, self.span))
            own_end.value = e.least(end, e.product(e.sum(first, count), self.span))
        return own_begin.value, own_end.value

    def _add_finish(self) -> ir.Function:
        """Free the states that were kept."""
        e, (buffers, _) = add_function(self.module, "finish", VOID, *[POINTER] * 2)
        self.kept.free(e, self._kept(e, buffers))
        e.ir.ret_void()
        return e.function

    def _merge_kept(
        self, e: Emitter, of: dict[str, Any], dims: Any, kept: Any, row: Any, kv_head: Any, count: Any
    ) -> None:
        """Merge the states of a decode row's kv head, and store the result, if its other units are done."""
        n, k, h, group = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim, self.shape.group
        with e.ir.if_then(self.kept.is_last(e, kept, e.sum(e.product(row, k), kv_head))), e.range(0, group) as member:
            query_head = e.sum(e.product(kv_head, group), member)
            head, merged = e.sum(e.product(row, n), query_head), State.make(e, 1, h)
            self._clear(e, of, dims, merged, query_head)
            with e.range(0, count) as span:
                merge(e, [merged], [self.kept.state(e, kept, head, span)], h)
            self._store(e, of["out"], merged, e.product(head, h))

    def _clear(self, e: Emitter, of: dict[str, Any], dims: Any, state: State, head: Any) -> None:
        """Begin with nothing, or with the sink of a query head."""
        state.clear(e, self.shape.head_dim)
        with e.ir.if_then(e.ir.icmp_signed(">", self.size(e, dims, "sinks", 0), I64(0))):
            e.store(e.load(of["sinks"], F32, head), state.largest)
            e.store(F32(1.0), state.total)

    def _add_attend(self, name: str, num_rows: int, most_parts: int, write: ir.Function | None = None) -> ir.Function:
        """Attend `count` tokens from row `first` on, all of sequence `seq`, with the query heads of some kv heads.

        With `kept` it is only a stretch of the spans that they see, and the states of the spans are kept. With `write`,
        the unit with the last span writes the token's K and V just before it reads them.
        """
        group, h, storage = self.shape.group, self.shape.head_dim, self._left_storage
        e, (buffers, dims, seq, head, num_heads, first, count, kept, stretch) = add_function(
            self.module, name, VOID, *[POINTER] * 2, *[I64] * 5, POINTER, I64
        )
        of = self.buffers(e, buffers)
        table = e.at(of["tables"], I32, e.product(seq, self.size(e, dims, "tables", 1)))
        size, most = num_rows * h, most_parts * num_rows
        heads, places, queries = e.array(I64, most_parts), e.array(I64, most), e.array(storage, most_parts * size)
        arrays = [heads, places, queries, *(State.make(e, most, h) for _ in range(2))]
        per_head = e.ceil_div(e.product(count, group), num_rows)
        total = e.product(num_heads, per_head)

        def members(which: Any) -> list[Any]:
            """Return the rows of a part among the rows of its head, the last one again beyond the last."""
            part_start, last = e.product(e.ir.srem(which, per_head), num_rows), e.sum(e.product(count, group), -1)
            return [e.least(e.sum(part_start, r), last) for r in range(num_rows)]

        with e.range(0, total, most_parts) as start:
            tokens = [e.sum(first, e.ir.sdiv(each, I64(group))) for each in members(start)]
            positions = [self._position(e, of, seq, token) for token in tokens]
            ends = self._ends(e, of, dims, tokens, positions)
            num_parts = e.least(e.ir.sub(total, start), most_parts)
            parts = _Parts(num_parts, positions, ends, *arrays)
            with e.range(0, num_parts) as part:
                which = e.sum(start, part)
                e.store(e.sum(head, e.ir.sdiv(which, per_head)), heads, part)
                queries = [e.ir.srem(each, I64(group)) for each in members(which)]
                self._begin(e, of, dims, parts, part, tokens, queries)
            begin, end = self._first_seen(e, of, positions[0]), reduce(e.most, ends)
            first_span, _ = self._spans(e, begin, end)
            past = _Past(table, *self._share(e, kept, stretch, begin, end))

            def write_own() -> None:
                if write:
                    with e.ir.if_then(e.ir.icmp_signed("==", past.end, end)):
                        e.ir.call(write, [buffers, dims, first, head, num_heads])

            fetches = write is not None or self.shape.head_dim > _MAX_NARROW

            def end_span(span: Any) -> None:
                self._end_span(e, parts, kept, e.ir.sub(span, first_span))

            self._attend_tiles(e, of, past, parts, write_own, end_span, fetches=fetches)
            with e.ir.if_else(e.ir.icmp_unsigned("!=", kept, NULL)) as (is_kept, is_whole):
                with is_kept:
                    _, last_span = self._spans(e, begin, end)
                    self._merge_kept(e, of, dims, kept, seq, head, e.ir.sub(last_span, first_span))
                with is_whole, e.range(0, e.product(num_parts, num_rows)) as row:
                    self._store(e, of["out"], parts.merged.of(e, row, h), e.load(parts.places, I64, row))
        e.ir.ret_void()
        return e.function

    def _end_span(self, e: Emitter, parts: _Parts, kept: Any, span: Any) -> None:
        """Merge the states of all rows in a span, or keep them, and begin the next span."""
        h, num_rows = self.shape.head_dim, len(parts.ends)
        with e.range(0, parts.count) as part:
            places = [e.sum(e.product(part, num_rows), r) for r in range(num_rows)]
            spans, merged = ([each.of(e, row, h) for row in places] for each in (parts.span, parts.merged))
            with e.ir.if_else(e.ir.icmp_unsigned("!=", kept, NULL)) as (is_kept, is_merged):
                with is_kept:
                    for row, state in zip(places, spans, strict=True):
                        index = e.ir.udiv(e.load(parts.places, I64, row), I64(h))
                        self.kept.state(e, kept, index, span).copy(e, state, h)
                with is_merged:
                    merge(e, merged, spans, h)
            for state in spans:
                state.clear(e, h)

    def _begin(
        self,
        e: Emitter,
        of: dict[str, Any],
        dims: Any,
        parts: _Parts,
        part: Any,
        tokens: list[Any],
        members: list[Any],
    ) -> None:
        """Scale and rotate a part's queries, by their tokens and their indices in the group; begin its states."""
        h, num_rows = self.shape.head_dim, len(tokens)
        scale = e.splat(e.load(of["scale"], F32, 0))
        head, query = e.load(parts.heads, I64, part), e.array(F32, h)
        for r, (token, member) in enumerate(zip(tokens, members, strict=True)):
            row, query_head = e.sum(e.product(part, num_rows), r), e.sum(e.product(head, self.shape.group), member)
            index = e.product(e.sum(e.product(token, self.shape.num_heads), query_head), h)
            e.store(index, parts.places, row)
            parts.span.of(e, row, h).clear(e, h)
            self._clear(e, of, dims, parts.merged.of(e, row, h), query_head)
            with e.range(0, h, LANES) as i:
                numbers = self.format.widen(e, e.load_vector(of["q"], self.format.storage, index, i))
                e.store_vector(e.ir.fmul(numbers, scale), query, i)
            with e.ir.if_then(self.has_rope(e, dims)):
                plain = FORMATS[jnp.dtype(jnp.float32)]
                for some, i in self.rotate(e, of, plain, query, e.product(token, h // 2)):
                    e.store_vector(some, query, i)
            with e.range(0, h, LANES) as i:
                self._store_rounded(e, e.load_vector(query, F32, i), parts.queries, e.product(row, h), i)

    def _attend_tiles(
        self,
        e: Emitter,
        of: dict[str, Any],
        past: _Past,
        parts: _Parts,
        write: Callable[[], None],
        end_span: Callable[[Any], None],
        *,
        fetches: bool,
    ) -> None:
        """Attend the blocks of one sequence, a few at a time, with all parts.

        Write just before the last blocks, which are then near in memory. `end_span` is called with the number of each
        span, counted from position 0, when its last tile is done.
        """
        h, o, tile, num_rows = self.shape.head_dim, self.shape.block_size, self.tile, len(parts.ends)
        soft_cap, window = e.load(of["soft_cap"], F32, 0), e.load_int(of["window"], 0)
        rooms = e.array(F32, num_rows * tile), e.array(self._left_storage, num_rows * tile)
        places, next_places = (e.array(I64, self.num_blocks) for _ in range(2))

        def share(head: Any, places: Any, live: Any) -> _Blocks:
            first, storage = e.product(head, h * o), self.kv_format.storage
            return _Blocks(e.at(of["pool_k"], storage, first), e.at(of["pool_v"], storage, first), places, live)

        end_index = e.ceil_div(past.end, tile)
        with e.range(e.ir.sdiv(past.begin, I64(tile)), end_index) as index:
            start = e.product(index, tile)
            live = self._find(e, of, past, index, places)
            with e.ir.if_then(e.ir.icmp_signed("==", e.sum(index, 1), end_index)):
                write()
            # After the last tile nothing new is fetched.
            next_live = self._find(e, of, past, e.least(e.sum(index, 1), e.sum(end_index, -1)), next_places)
            with e.range(0, parts.count) as part:
                rows = self._rows(e, parts, part, rooms)
                blocks = share(e.load(parts.heads, I64, part), places, live)
                is_last = e.ir.icmp_signed("==", e.sum(part, 1), parts.count)
                next_part = e.ir.select(is_last, I64(0), e.sum(part, 1))
                next_blocks = share(
                    e.load(parts.heads, I64, next_part),
                    e.ir.select(is_last, next_places, places),
                    e.ir.select(is_last, next_live, live),
                )
                self._score(e, rows, blocks, fetches)
                with e.ir.if_then(e.ir.fcmp_ordered(">", soft_cap, F32(0.0))):
                    self._cap(e, rows, live, soft_cap)
                decays = self._softmax(e, parts, rows, start, live, window)
                with e.range(0, h, LANES) as i:
                    for r, decay in enumerate(decays):
                        shrunk = e.ir.fmul(e.load_vector(rows.acc, F32, r * h, i), decay)
                        e.store_vector(shrunk, rows.acc, r * h, i)
                seen = e.most(e.ir.sub(e.product(e.ir.sdiv(past.begin, I64(o)), o), start), 0)
                self._add_values(e, rows, blocks, seen, next_blocks if fetches else None)
            following = e.sum(index, 1)
            ends_span = e.ir.icmp_signed("==", e.ir.srem(following, I64(self.span // tile)), I64(0))
            ends_span = e.ir.or_(ends_span, e.ir.icmp_signed("==", following, end_index))
            with e.ir.if_then(ends_span):
                end_span(e.ir.sdiv(index, I64(self.span // tile)))

    def _find(self, e: Emitter, of: dict[str, Any], past: _Past, index: Any, places: Any) -> Any:
        """Store the address of each block of a tile, and return the number of tokens of the sequence that they hold.

        Blocks that no row sees need not exist: the nearest one that is seen stands in for them.
        """
        k, h, o = self.shape.num_kv_heads, self.shape.head_dim, self.shape.block_size
        first, last = e.ir.sdiv(past.begin, I64(o)), e.ir.sdiv(e.sum(past.end, -1), I64(o))
        for which in range(self.num_blocks):
            column = e.most(e.least(e.sum(e.product(index, self.num_blocks), which), last), first)
            block = e.sum(e.load_int(of["first_block"], 0), e.load_int(past.table, column))
            e.store(e.product(block, k * h * o), places, which)
        return e.least(e.ir.sub(past.end, e.product(index, self.tile)), self.tile)

    def _rows(self, e: Emitter, parts: _Parts, part: Any, rooms: tuple[Any, Any]) -> Rows:
        num_rows, h = len(parts.ends), self.shape.head_dim
        first = e.product(part, num_rows)
        queries = e.at(parts.queries, self._left_storage, e.product(first, h))
        states = [parts.span.of(e, e.sum(first, r), h) for r in range(num_rows)]
        scores, probs = rooms
        return Rows(queries, states, scores, probs if self.width == 2 else scores)

    def _store(self, e: Emitter, out: Any, state: State, index: Any) -> None:
        """Divide the sum of values by the sum of probabilities, and store the result."""
        assert self.format.narrow is not None
        factor = e.splat(e.ir.fdiv(F32(1.0), e.larger(e.load(state.total, F32), F32(1e-30))))
        with e.range(0, self.shape.head_dim, LANES) as i:
            numbers = e.ir.fmul(e.load_vector(state.acc, F32, i), factor)
            e.store_vector(self.format.narrow(e, numbers), out, index, i)

    def _fetch(self, e: Emitter, blocks: _Blocks, is_keys: bool, num_steps: int) -> Callable[[Any], None]:
        """Return a function that begins to read a step's share of keys or values before they are needed."""
        pool, o, h = blocks.keys if is_keys else blocks.values, self.shape.block_size, self.shape.head_dim
        storage, count = self.kv_format.storage, -(-o * h // num_steps)
        starts = [e.at(pool, storage, e.load(blocks.places, I64, which)) for which in range(self.num_blocks)]
        # Of a block that is attended alone only the live part is read: of each key row, and of all values.
        row, live = (o, 1) if is_keys else (o * h // self.width, h // self.width)
        row, most = row * self.width, e.sum(e.product(blocks.live, live * self.width), -1)

        def fetch(step: Any) -> None:
            for first in range(0, count, CACHE_LINE // self.kv_format.num_bytes):
                index = e.sum(e.product(step, count), first)
                if self.num_blocks == 1:
                    column = e.least(e.ir.urem(index, I64(row)), most)
                    index = e.sum(e.ir.sub(index, e.ir.urem(index, I64(row))), column)
                for start in starts:
                    e.prefetch(start, storage, index, cache=1)

        return fetch

    def _block(self, e: Emitter, pool: Any, places: Any, token: Any) -> tuple[Any, Any]:
        """Return the address of the block with a token of the tile, and the token's number in the block."""
        o = I64(self.shape.block_size)
        which, token_of_block = (I64(0), token) if self.num_blocks == 1 else (e.ir.udiv(token, o), e.ir.urem(token, o))
        return e.at(pool, self.kv_format.storage, e.load(places, I64, which)), token_of_block

    def _score(self, e: Emitter, rows: Rows, blocks: _Blocks, fetches: bool) -> None:
        """Multiply queries and keys, and begin to read the values."""
        h, o, tile, num_rows = self.shape.head_dim, self.shape.block_size, self.tile, len(rows.states)
        most = _even(tile // LANES, self.max_sums // num_rows)
        # Of a tile that is not full only the live part is read, rounded up to a cache line or two of each row.
        least = _even(most, CACHE_LINE // self.kv_format.num_bytes // LANES)
        steps = h // self.width
        num_steps = steps * tile // LANES // most
        fetch = self._fetch(e, blocks, False, num_steps) if fetches else None
        with e.ir.if_else(e.ir.icmp_signed("==", blocks.live, I64(tile))) as (is_full, is_part):
            for branch, vectors in ((is_full, most), (is_part, least)):
                with branch:
                    if fetch and branch is is_part:
                        with e.range(0, num_steps) as step:
                            fetch(step)
                    with e.range(0, blocks.live, vectors * LANES) as start:
                        keys = [
                            self._block(e, blocks.keys, blocks.places, e.sum(start, j * LANES)) for j in range(vectors)
                        ]

                        done = e.product(e.ir.udiv(start, I64(most * LANES)), steps)
                        self._multiply(
                            e,
                            num_rows,
                            vectors,
                            steps=(0, steps),
                            left=lambda r, i: self._left(e, rows.queries, r * h, i),
                            right=lambda i, j, keys=keys: self._right(e, keys[j][0], e.product(i, o), keys[j][1]),
                            also=fetch if branch is is_full else None,
                            done=done,
                            target=lambda r, j, start=start: e.at(rows.scores, F32, r * tile, start, j * LANES),
                            adds=False,
                        )

    def _add_values(self, e: Emitter, rows: Rows, blocks: _Blocks, seen: Any, following: _Blocks | None) -> None:
        """Add the values of a tile's tokens from `seen` on, and begin to read the keys that follow."""
        h, tile, live, num_rows = self.shape.head_dim, self.tile, blocks.live, len(rows.states)
        vectors = _even(h // LANES, self.max_sums // num_rows)
        steps = tile // self.width
        num_steps = steps * h // LANES // vectors

        def right(i: Any, j: int, start: Any) -> Any:
            values, token = self._block(e, blocks.values, blocks.places, e.product(i, self.width))
            index = e.product(e.ir.udiv(token, I64(self.width)), h)
            loaded = self._right(e, values, index, start, j * LANES)
            if self.width == 1:
                return loaded
            # Numbers beyond may be anything, and 0 x NaN is NaN.
            is_half = e.ir.icmp_signed("==", e.sum(e.product(i, 2), 1), live)
            return e.ir.and_(loaded, e.splat(e.ir.select(is_half, I32(0xFFFF), I32(-1))))

        first, last = e.ir.sdiv(seen, I64(self.width)), e.ceil_div(live, self.width)
        fetch = self._fetch(e, following, True, num_steps) if following else None
        with e.range(0, h, vectors * LANES) as start:
            done = e.product(e.ir.udiv(start, I64(vectors * LANES)), steps)
            self._multiply(
                e,
                num_rows,
                vectors,
                steps=(first, last),
                left=lambda r, i: self._left(e, rows.probs, r * tile, i),
                right=lambda i, j, start=start: right(i, j, start),
                also=fetch,
                done=done,
                target=lambda r, j: e.at(rows.acc, F32, r * h, start, j * LANES),
                adds=True,
            )
            if fetch:  # the part without a step in a tile that is not full
                for others in ((0, first), (last, steps)):
                    with e.range(*others) as i:
                        fetch(e.sum(done, i))

    def _store_rounded(self, e: Emitter, numbers: Any, base: Any, *index: Any) -> None:
        assert self.format.narrow is not None
        e.store_vector(self.format.narrow(e, numbers) if self.width == 2 else numbers, base, *index)

    def _left(self, e: Emitter, numbers: Any, first: int, step: Any) -> Any:
        """Return the number that a row's step is multiplied by, in each lane."""
        return e.splat(e.load(numbers, F32 if self.width == 1 else I32, first // self.width, step))

    def _right(self, e: Emitter, numbers: Any, *index: Any) -> Any:
        """Return a vector of the pool's numbers, or of pairs."""
        if self.width == 2:
            return e.load_vector(numbers, I32, *index)
        return self.kv_format.widen(e, e.load_vector(numbers, self.kv_format.storage, *index))

    def _add_product(self, e: Emitter, total: Any, left: Any, right: Any) -> Any:
        if self.width == 1:
            return e.fma(left, right, total)
        return pairs.add_products(e, total, left, right)

    def _cap(self, e: Emitter, rows: Rows, live: Any, soft_cap: Any) -> None:
        cap = e.splat(soft_cap)
        for r in range(len(rows.states)):
            row = e.at(rows.scores, F32, r * self.tile)
            with e.range(0, live, LANES) as i:
                inside = e.tanh(e.ir.fdiv(e.load_vector(row, F32, i), cap))
                e.store_vector(e.ir.fmul(inside, cap), row, i)

    def _softmax(self, e: Emitter, parts: _Parts, rows: Rows, first: Any, live: Any, window: Any) -> list[Any]:
        """Turn scores, of tokens from position `first` on, into probabilities, not divided by their sums.

        Return the decay of older probabilities, a vector per row. All rows go through each loop together, as they do
        not wait for each other.
        """
        scores = [e.at(rows.scores, F32, r * self.tile) for r in range(len(rows.states))]
        behind = [e.ir.trunc(e.ir.sub(e.ir.sub(end, first), I64(1)), I32) for end in parts.ends]
        ahead = [
            e.ir.sub(e.ir.sub(end, position), I64(1)) for end, position in zip(parts.ends, parts.positions, strict=True)
        ]
        reaches = [e.splat(e.ir.trunc(e.sum(window, each), I32)) for each in ahead]
        lanes = ir.Constant(vector(I32), list(range(LANES)))
        maxima = [e.variable(vector(F32), e.splat(F32(MASKED))) for _ in scores]
        with e.range(0, live, LANES) as i:
            for row, distance, reach, most in zip(scores, behind, reaches, maxima, strict=True):
                score = e.load_vector(row, F32, i)
                distance = e.ir.sub(e.splat(e.ir.sub(distance, e.ir.trunc(i, I32))), lanes)
                # Unsigned, a position beyond the row's end is farther than every reach.
                is_seen = e.ir.icmp_unsigned("<", distance, reach)
                score = e.ir.select(is_seen, score, e.constant(MASKED, score))
                e.store_vector(score, row, i)
                most.value = e.larger(most.value, score)
        before = [e.load(state.largest, F32) for state in rows.states]
        after = [e.larger(old, e.reduce(e.larger, most.value)) for old, most in zip(before, maxima, strict=True)]
        shifts = [e.splat(largest) for largest in after]
        added = [e.variable(vector(F32), e.splat(F32(0.0))) for _ in scores]
        with e.range(0, live, LANES) as i:
            for r, (row, shift, total) in enumerate(zip(scores, shifts, added, strict=True)):
                score = e.load_vector(row, F32, i)
                is_seen = e.ir.fcmp_ordered(">", score, e.constant(MASKED, score))
                prob = e.ir.select(is_seen, e.exp(e.ir.fsub(score, shift)), e.splat(F32(0.0)))
                self._store_rounded(e, prob, rows.probs, r * self.tile, i)
                total.value = e.ir.fadd(total.value, prob)
        decays = []
        for r, (old, largest, some) in enumerate(zip(before, after, added, strict=True)):
            decay = e.exp(e.ir.fsub(old, largest))
            total = e.fma(e.load(rows.states[r].total, F32), decay, e.reduce(e.ir.fadd, some.value))
            e.store(total, rows.states[r].total)
            e.store(largest, rows.states[r].largest)
            decays.append(e.splat(decay))
        return decays

    def _multiply(
        self,
        e: Emitter,
        rows: int,
        vectors: int,
        *,
        steps: tuple[Any, Any],
        left: Callable[[int, Any], Any],
        right: Callable[[Any, int], Any],
        target: Callable[[int, int], Any],
        adds: bool,
        also: Callable[[Any], None] | None,
        done: Any,
    ) -> None:
        """Store at target(r, j), or add there, the sum of left(r, i) * right(i, j) over steps i, in order.

        `also` is called with the number of each step.
        """
        zeros = e.splat(F32(0.0))
        targets = [[target(r, j) for j in range(vectors)] for r in range(rows)]
        sums = [[e.variable(vector(F32), e.load_vector(x, F32) if adds else zeros) for x in row] for row in targets]
        with e.range(*steps) as i:
            if also:
                also(e.sum(done, i))
            columns = [right(i, j) for j in range(vectors)]
            for r in range(rows):
                factor = left(r, i)
                for column_sum, column in zip(sums[r], columns, strict=True):
                    column_sum.value = self._add_product(e, column_sum.value, factor, column)
        for total, address in zip(itertools.chain(*sums), itertools.chain(*targets), strict=True):
            e.store_vector(total.value, address)


def _even(size: int, most: int = _MAX_ROWS) -> int:
    """Return the largest divisor of `size` that is at most `most`."""
    return next(each for each in range(min(size, most), 0, -1) if size % each == 0)
