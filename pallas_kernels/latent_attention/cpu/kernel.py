"""The kernel in LLVM IR: writes latents, then attends; all sums are in float32.

A lane is a head of a row, with its own query and sums. A unit of work is the lanes of a decode row, or of some rows of
a chunk. The lanes go past the tokens together, a tile of tokens at a time, and for each tile one group of lanes after
the other computes

    scores [lanes, tile] = q [lanes, h] . latents [tile, h]      masked, exponentiated: online softmax
    acc    [lanes, l]    = p [lanes, tile] @ latents [tile, l]

So a tile's latents are read from memory once, for scores and for values of all lanes. There are two ways: `vectors.py`,
and `matrices.py` for processors with AMX. In both, the order of a lane's sums depends only on the positions of its
tokens: a row has the same bits in a decode or a chunk, and beside any rows.

Where a row attends to chosen positions, a unit has lanes of one row. The latents of a tile of its positions are copied
side by side, and are attended as tokens in order are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.native import processor
from pallas_kernels.native.compiling import num_cores
from pallas_kernels.native.emitter import F32, I1, I32, I64, LANES, POINTER, VOID, Emitter, add_function
from pallas_kernels.native.handler import add_handler
from pallas_kernels.native.number_formats import FORMATS

from ..layout import LatentShape
from .matrices import Matrices
from .unit import MASKED, PIECE, Tile, Unit, Way
from .vectors import Vectors

ROWS_PER_CORE = 4
"""With this many decode rows per core, a row's heads stay together, so that its latents are read once."""

BUFFERS = [
    "pool",
    "q",
    "latents",
    "slots",
    "tables",
    "lens",
    "ends",
    "num_decodes",
    "tile_seqs",
    "tile_rows",
    "num_tiles",
    "first_block",
    "scale",
    "pool_after",
    "out",
]
"""The call's arguments and results, in order."""
CHOSEN_BUFFERS = [*BUFFERS[:-2], "chosen", *BUFFERS[-2:]]
"""The same for shapes with `top_k`."""


def _choose_way(shape: LatentShape) -> Way:
    """Return the way to attend a shape on this processor."""
    if processor.current().has_matrix_unit and shape.dtype == jnp.bfloat16 and Matrices.takes(shape):
        return Matrices(shape)
    return Vectors(shape)


class Kernel:
    """Writes the functions of one kernel."""

    def __init__(self, shape: LatentShape, query_tile: int) -> None:
        self.shape, self.query_tile = shape, query_tile
        self.format, self.kv_format = FORMATS[shape.dtype], FORMATS[shape.kv_dtype]
        self.way = _choose_way(shape)
        self.buffers = BUFFERS if shape.top_k is None else CHOSEN_BUFFERS
        groups = -(-shape.num_heads // self.way.lanes)
        self.groups_per_part = -(-groups // num_cores())
        self.num_parts = -(-groups // self.groups_per_part)
        """The number of units that a decode row's heads are divided into where rows are few."""
        self.module = ir.Module()

    def build(self, name: str) -> ir.Module:
        """Return the module, with a function of this name that XLA calls."""
        add_handler(self.module, name, self._add_prepare(), self._add_run(self._add_attend()))
        return self.module

    def _buffers(self, e: Emitter, buffers: Any) -> dict[str, Any]:
        return {name: e.load(buffers, POINTER, index) for index, name in enumerate(self.buffers)}

    def _size(self, e: Emitter, dims: Any, name: str, axis: int) -> Any:
        return e.load(e.load(dims, POINTER, self.buffers.index(name)), I64, axis)

    def _add_prepare(self) -> ir.Function:
        """Write the latents of all tokens, clear the output of rows of padding, and count the work."""
        shape, storage = self.shape, self.kv_format.storage
        o, h, width = shape.block_size, shape.key_dim, shape.num_heads * shape.latent_dim
        e, (buffers, dims) = add_function(self.module, "prepare", I64, POINTER, POINTER)
        of = self._buffers(e, buffers)
        first_slot = e.product(e.load_int(of["first_block"], 0), o)
        with e.range(0, self._size(e, dims, "q", 0)) as token:
            slot = e.load_int(of["slots"], token)
            with e.ir.if_else(e.ir.icmp_signed("==", slot, I64(0))) as (is_padding, is_token):
                with is_padding:
                    e.clear(
                        e.at(of["out"], self.format.storage, e.product(token, width)), width * self.format.num_bytes
                    )
                with is_token:
                    source = e.at(of["latents"], storage, e.product(token, h))
                    target = e.at(of["pool"], storage, e.product(e.sum(first_slot, slot), h))
                    with e.range(0, h, LANES) as i:
                        e.store_vector(e.load_vector(source, storage, i), target, i)
        decodes = e.load_int(of["num_decodes"], 0)
        e.ir.ret(e.sum(e.load_int(of["num_tiles"], 0), e.product(decodes, self._parts(e, decodes))))
        return e.function

    def _parts(self, e: Emitter, num_decodes: Any) -> Any:
        """Return the number of units of a decode row."""
        is_enough = e.ir.icmp_signed(">=", num_decodes, I64(ROWS_PER_CORE * num_cores()))
        return e.ir.select(is_enough, I64(1), I64(self.num_parts))

    def _add_run(self, attend: ir.Function) -> ir.Function:
        """Do one unit: the tiles of longer chunks come first, as they are the largest."""
        n = self.shape.num_heads
        e, (buffers, dims, unit) = add_function(self.module, "run", VOID, POINTER, POINTER, I64)
        of = self._buffers(e, buffers)
        num_tiles = e.load_int(of["num_tiles"], 0)
        with e.ir.if_else(e.ir.icmp_signed("<", unit, num_tiles)) as (is_tile, is_decode):
            with is_tile:
                seq, first = e.load_int(of["tile_seqs"], unit), e.load_int(of["tile_rows"], unit)
                end = e.least(e.load_int(of["ends"], seq), e.sum(first, self.query_tile))
                e.ir.call(attend, [buffers, dims, seq, e.product(first, n), e.product(end, n)])
            with is_decode:
                parts = self._parts(e, e.load_int(of["num_decodes"], 0))
                number = e.ir.sub(unit, num_tiles)
                row, part = e.ir.sdiv(number, parts), e.ir.srem(number, parts)
                is_whole = e.ir.icmp_signed("==", parts, I64(1))
                count = e.ir.select(is_whole, I64(n), I64(self.groups_per_part * self.way.lanes))
                first = e.sum(e.product(row, n), e.product(part, count))
                end = e.least(e.sum(first, count), e.product(e.sum(row, 1), n))
                e.ir.call(attend, [buffers, dims, row, first, end])
        e.ir.ret_void()
        return e.function

    def _add_attend(self) -> ir.Function:
        """Attend lanes of a sequence: from the first one to before the end."""
        way, n, top_k = self.way, self.shape.num_heads, self.shape.top_k
        most_groups = -(-self.query_tile * n // way.lanes)
        most_lanes = most_groups * way.lanes
        e, (buffers, dims, seq, first, end) = add_function(self.module, "attend", VOID, *[POINTER] * 2, *[I64] * 3)
        of = self._buffers(e, buffers)
        table = e.at(of["tables"], I32, e.product(seq, self._size(e, dims, "tables", 1)))
        kept = (e.array(F32, most_lanes), e.array(F32, most_lanes), e.array(I32, most_lanes))
        groups, last = e.ceil_div(e.ir.sub(end, first), way.lanes), e.sum(end, -1)
        unit = Unit(*way.make(e, most_groups), *kept, e.splat(e.load(of["scale"], F32, 0)), groups)
        if top_k is None:
            before = e.sum(e.ir.sub(e.load_int(of["lens"], seq), e.load_int(of["ends"], seq)), 1)
            with e.range(0, groups) as group:
                self._begin(e, of, unit, group, (first, last), lambda lane: e.sum(before, e.ir.udiv(lane, I64(n))))
            self._pass_all(e, of, unit, table, e.sum(before, e.ir.udiv(last, I64(n))))
        else:
            chosen = e.array(I32, top_k)
            words = self._size(e, dims, "chosen", 1)
            count = self._unpack(e, e.at(of["chosen"], I32, e.product(e.ir.udiv(first, I64(n)), words)), words, chosen)
            with e.range(0, groups) as group:
                self._begin(e, of, unit, group, (first, last), lambda _: count)
            self._pass_chosen(e, of, unit, table, chosen, count)
        with e.range(0, groups) as group:
            self._finish(e, of, unit, group, (first, last))
        way.end(e)
        e.ir.ret_void()
        return e.function

    def _pass_all(self, e: Emitter, of: dict[str, Any], unit: Unit, table: Any, most: Any) -> None:
        """Attend to the first `most` tokens of a sequence."""
        way, pieces = self.way, self.way.tile // PIECE
        places, following = e.array(POINTER, pieces), e.array(POINTER, pieces)
        with e.range(0, most, way.tile) as start:
            self._find(e, of, table, start, most, places)
            next_start = e.sum(start, way.tile)
            self._find(e, of, table, next_start, most, following)
            has_next = e.ir.icmp_signed("<", next_start, most)
            live = e.least(e.ir.sub(most, start), way.tile)
            way.attend(e, unit, Tile(start, live, places, following, has_next))

    def _pass_chosen(self, e: Emitter, of: dict[str, Any], unit: Unit, table: Any, chosen: Any, count: Any) -> None:
        """Attend to `count` chosen positions of a sequence: copies of a tile of latents lie side by side."""
        way, storage, h = self.way, self.kv_format.storage, self.shape.key_dim
        copies, places = e.array(storage, way.tile * h), e.array(POINTER, way.tile // PIECE)
        for piece in range(way.tile // PIECE):
            e.store(e.at(copies, storage, piece * PIECE * h), places, piece)
        with e.range(0, count, way.tile) as start:
            live = e.least(e.ir.sub(count, start), way.tile)
            with e.range(0, live) as i:
                source = self._address(e, of, table, e.load_int(chosen, start, i))
                target = e.at(copies, storage, e.product(i, h))
                with e.range(0, h, LANES) as j:
                    e.store_vector(e.load_vector(source, storage, j), target, j)
            way.attend(e, unit, Tile(start, live, places, places, I1(0)))

    def _unpack(self, e: Emitter, bits: Any, words: Any, chosen: Any) -> Any:
        """Store the positions whose bits are set, `top_k` of them at most, and return their number."""
        count = e.variable(I64, I64(0))
        with e.range(0, words) as number:
            word = e.load(bits, I32, number)
            is_open = e.ir.icmp_signed("<", count.value, I64(self.shape.top_k))
            with e.ir.if_then(e.ir.and_(e.ir.icmp_signed("!=", word, I32(0)), is_open)), e.range(0, 32) as bit:
                is_set = e.ir.trunc(e.ir.lshr(word, e.ir.trunc(bit, I32)), I1)
                is_open = e.ir.icmp_signed("<", count.value, I64(self.shape.top_k))
                with e.ir.if_then(e.ir.and_(is_set, is_open)):
                    position = e.sum(e.product(number, 32), bit)
                    e.store(e.ir.trunc(position, I32), chosen, count.value)
                    count.value = e.sum(count.value, 1)
        return count.value

    def _begin(
        self,
        e: Emitter,
        of: dict[str, Any],
        unit: Unit,
        group: Any,
        lanes: tuple[Any, Any],
        count_seen: Callable[[Any], Any],
    ) -> None:
        """Store the number of tokens that each lane of a group sees, and lay out its query."""
        (first, last), h = lanes, self.shape.key_dim
        queries = []
        for r in range(self.way.lanes):
            index = e.sum(e.product(group, self.way.lanes), r)
            lane = e.least(e.sum(first, index), last)
            e.store(e.ir.trunc(count_seen(lane), I32), unit.seen, index)
            e.store(F32(MASKED), unit.largest, index)
            e.store(F32(0.0), unit.sums, index)
            queries.append(e.at(of["q"], self.format.storage, e.product(lane, h)))
        self.way.begin(e, unit, group, queries)

    def _find(self, e: Emitter, of: dict[str, Any], table: Any, start: Any, most: Any, places: Any) -> None:
        """Store the addresses of the pieces of the tile that starts at `start`."""
        last = e.product(e.ir.udiv(e.sum(most, -1), I64(PIECE)), PIECE)
        with e.range(0, self.way.tile // PIECE) as which:
            position = e.least(e.sum(start, e.product(which, PIECE)), last)
            e.store(self._address(e, of, table, position), places, which)

    def _address(self, e: Emitter, of: dict[str, Any], table: Any, position: Any) -> Any:
        """Return the address of the latents of a position."""
        o, h = self.shape.block_size, self.shape.key_dim
        block = e.sum(e.load_int(of["first_block"], 0), e.load_int(table, e.ir.udiv(position, I64(o))))
        slot = e.sum(e.product(block, o), e.ir.urem(position, I64(o)))
        return e.at(of["pool"], self.kv_format.storage, e.product(slot, h))

    def _finish(self, e: Emitter, of: dict[str, Any], unit: Unit, group: Any, lanes: tuple[Any, Any]) -> None:
        """Divide by the sums, and store."""
        (first, last), rank = lanes, self.shape.latent_dim
        assert self.format.narrow is not None
        with e.range(0, self.way.lanes) as r:
            index = e.sum(e.product(group, self.way.lanes), r)
            target = e.product(e.least(e.sum(first, index), last), rank)
            factor = e.splat(e.ir.fdiv(F32(1.0), e.larger(e.load(unit.sums, F32, index), F32(1e-30))))
            with e.range(0, rank, self.way.acc_step) as i:
                for j, numbers in enumerate(self.way.numbers(e, unit, group, r, i)):
                    numbers = self.format.narrow(e, e.ir.fmul(numbers, factor))
                    e.store_vector(numbers, of["out"], target, i, j * LANES)
