"""The kernel in LLVM IR: writes keys, then scores and chooses positions, one row after the other.

A unit of work is a row. Its scores of all positions, as integers of the same order, lie in memory of the unit. Their
sums have an order that depends on the shape alone: a row has the same bits in a decode or a chunk, and beside any rows.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from pallas_kernels.native.emitter import I32, I64, LANES, POINTER, VOID, Emitter, add_function
from pallas_kernels.native.handler import add_handler, libc
from pallas_kernels.native.number_formats import FORMATS

from ..layout import IndexerShape
from .choice import choose
from .scores import Scores

BUFFERS = [
    "pool",
    "q",
    "k",
    "weights",
    "slots",
    "tables",
    "lens",
    "ends",
    "num_decodes",
    "tile_seqs",
    "tile_rows",
    "num_tiles",
    "first_block",
    "pool_after",
    "out",
]
"""The call's arguments and results, in order."""


class Kernel:
    """Writes the functions of one kernel."""

    def __init__(self, shape: IndexerShape) -> None:
        self.shape, self.storage = shape, FORMATS[shape.kv_dtype].storage
        self.scores = Scores(shape)
        self.module = ir.Module()

    def build(self, name: str) -> ir.Module:
        """Return the module, with a function of this name that XLA calls."""
        add_handler(self.module, name, self._add_prepare(), self._add_run(self._add_choose()))
        return self.module

    def _buffers(self, e: Emitter, buffers: Any) -> dict[str, Any]:
        return {name: e.load(buffers, POINTER, index) for index, name in enumerate(BUFFERS)}

    def _size(self, e: Emitter, dims: Any, name: str, axis: int) -> Any:
        return e.load(e.load(dims, POINTER, BUFFERS.index(name)), I64, axis)

    def _add_prepare(self) -> ir.Function:
        """Write the keys of all tokens, clear the output, and count the work."""
        shape, h = self.shape, self.shape.head_dim
        e, (buffers, dims) = add_function(self.module, "prepare", I64, POINTER, POINTER)
        of = self._buffers(e, buffers)
        first_slot = e.product(e.load_int(of["first_block"], 0), shape.block_size)
        e.clear(of["out"], e.product(self._size(e, dims, "out", 0), self._size(e, dims, "out", 1), 4))
        with e.range(0, self._size(e, dims, "q", 0)) as token:
            slot = e.load_int(of["slots"], token)
            with e.ir.if_then(e.ir.icmp_signed("!=", slot, I64(0))):
                source = e.at(of["k"], self.storage, e.product(token, h))
                target = e.at(of["pool"], self.storage, e.product(e.sum(first_slot, slot), h))
                with e.range(0, h, LANES) as i:
                    e.store_vector(e.load_vector(source, self.storage, i), target, i)
        e.ir.ret(e.sum(e.load_int(of["num_tiles"], 0), e.load_int(of["num_decodes"], 0)))
        return e.function

    def _add_run(self, choose_for: ir.Function) -> ir.Function:
        """Do one unit: rows of longer chunks come first."""
        e, (buffers, dims, unit) = add_function(self.module, "run", VOID, POINTER, POINTER, I64)
        of = self._buffers(e, buffers)
        num_tiles = e.load_int(of["num_tiles"], 0)
        with e.ir.if_else(e.ir.icmp_signed("<", unit, num_tiles)) as (is_tile, is_decode):
            with is_tile:
                seq, row = e.load_int(of["tile_seqs"], unit), e.load_int(of["tile_rows"], unit)
                e.ir.call(choose_for, [buffers, dims, seq, row])
            with is_decode:
                row = e.ir.sub(unit, num_tiles)
                e.ir.call(choose_for, [buffers, dims, row, row])
        e.ir.ret_void()
        return e.function

    def _add_choose(self) -> ir.Function:
        """Choose the positions of a row of a sequence."""
        top_k = self.shape.top_k
        e, (buffers, dims, seq, row) = add_function(self.module, "choose", VOID, POINTER, POINTER, I64, I64)
        of = self._buffers(e, buffers)
        target = e.at(of["out"], I32, e.product(row, self._size(e, dims, "out", 1)))
        seen = e.sum(e.ir.sub(e.load_int(of["lens"], seq), e.load_int(of["ends"], seq)), row, 1)
        with e.ir.if_else(e.ir.icmp_signed("<=", seen, I64(top_k))) as (takes_all, takes_best):
            with takes_all, e.range(0, seen, 32) as start:
                # Bits below 32, and all of them in a word that the row sees whole.
                unseen = e.ir.sub(I64(32), e.least(e.ir.sub(seen, start), 32))
                word = e.ir.lshr(I32(-1), e.ir.trunc(unseen, I32))
                e.store(word, target, e.ir.lshr(start, I64(5)))
            with takes_best:
                size = e.product(e.ceil_div(seen, LANES), LANES * 4)
                scores = e.ir.call(libc(self.module, "malloc", POINTER, [I64]), [size])
                self.scores.begin(e, of["q"], of["weights"], row)
                table = e.at(of["tables"], I32, e.product(seq, self._size(e, dims, "tables", 1)))
                with e.range(0, seen, LANES) as start:
                    self.scores.add(e, self._find(e, of, table, start), scores, start)
                choose(e, scores, seen, target, top_k)
                e.ir.call(libc(self.module, "free", VOID, [POINTER]), [scores])
        e.ir.ret_void()
        return e.function

    def _find(self, e: Emitter, of: dict[str, Any], table: Any, start: Any) -> Any:
        """Return the address of the keys of 16 tokens from `start` on."""
        o, h = self.shape.block_size, self.shape.head_dim
        block = e.sum(e.load_int(of["first_block"], 0), e.load_int(table, e.ir.udiv(start, I64(o))))
        slot = e.sum(e.product(block, o), e.ir.urem(start, I64(o)))
        return e.at(of["pool"], self.storage, e.product(slot, h))
