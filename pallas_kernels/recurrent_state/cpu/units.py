"""Divide a step into units of work: each updates a part of one sequence's state by all of the sequence's rows.

Parts of a state do not depend on each other. A unit of a longer chunk is one part of one sequence; a unit of decodes is
several parts side by side, if there are many, so that the next one can be fetched from memory meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir

from pallas_kernels.native.cores import num_cores
from pallas_kernels.native.emitter import I8, I64, POINTER, VOID, Emitter, add_function
from pallas_kernels.native.handler import add_handler
from pallas_kernels.native.number_formats import Format

_BATCH = (
    "starts",
    "ends",
    "num_decodes",
    "read_slots",
    "write_slots",
    "save_ends",
    "save_slots",
    "row_slots",
    "first_slot",
)
_UNITS_PER_CORE = 8
"""The least number of units of decodes for each core, as far as they have enough parts."""


class States(NamedTuple):
    """One sequence's rows, and the addresses of its states' slots."""

    start: Any
    end: Any
    begins: Any
    """True if the state before is zeros, and not in the pool."""
    before: Any
    after: Any
    is_saved: Any
    save_end: Any
    saved: Any


class StateKernel:
    """Writes the functions of one kernel. Kernels differ in `add_part`."""

    def __init__(
        self,
        inputs: Sequence[str],
        *,
        out_format: Format,
        row_size: int,
        pool_type: ir.Type,
        slot_size: int,
        parts: int,
    ) -> None:
        self.buffers = ["pool", *inputs, *_BATCH, "pool_after", "out"]
        """The call's arguments and results, in order."""
        self.out_format, self.row_size = out_format, row_size
        self.pool_type, self.slot_size = pool_type, slot_size
        self.num_parts = parts
        """The number of parts of a sequence's state."""
        self.module = ir.Module()

    def build(self, name: str) -> ir.Module:
        """Return the module, with a function of this name that XLA calls."""
        part = self.add_part()
        add_handler(self.module, name, self._add_prepare(), self._add_run(part))
        return self.module

    def add_part(self) -> ir.Function:
        """Define the function that updates a part of a state by all rows of its sequence.

        void (ptr buffers, i64 sequence, i64 part, i64 has_next); `has_next` is 1 if the part that follows in memory
        comes next, on the same core.
        """
        raise NotImplementedError

    def of(self, e: Emitter, buffers: Any) -> dict[str, Any]:
        """Return the addresses of the buffers."""
        return {name: e.load(buffers, POINTER, index) for index, name in enumerate(self.buffers)}

    def states(self, e: Emitter, of: dict[str, Any], seq: Any) -> States:
        """Return a sequence's rows and the addresses of its states."""
        slot = partial(self._slot, e, of)
        read, write, save = (e.load_int(of[name], seq) for name in ("read_slots", "write_slots", "save_slots"))
        return States(
            start=e.load_int(of["starts"], seq),
            end=e.load_int(of["ends"], seq),
            begins=e.ir.icmp_signed("==", read, I64(0)),
            before=slot(read),
            after=slot(write),
            is_saved=e.ir.icmp_signed("!=", save, I64(0)),
            save_end=e.load_int(of["save_ends"], seq),
            saved=slot(save),
        )

    def _slot(self, e: Emitter, of: dict[str, Any], number: Any) -> Any:
        """Return the address of a slot of the layer."""
        first = e.load_int(of["first_slot"], 0)
        return e.at(of["pool"], self.pool_type, e.product(e.sum(first, number), self.slot_size))

    @contextmanager
    def slot_of_row(self, e: Emitter, of: dict[str, Any], row: Any) -> Iterator[Any]:
        """Give the address of the slot that keeps the state after a row; what follows is done if there is one."""
        number = e.load_int(of["row_slots"], row)
        with e.ir.if_then(e.ir.icmp_signed("!=", number, I64(0))):
            yield self._slot(e, of, number)

    def _size(self, e: Emitter, dims: Any, name: str, axis: int) -> Any:
        return e.load(e.load(dims, POINTER, self.buffers.index(name)), I64, axis)

    def _ranges(self, e: Emitter, decodes: Any) -> tuple[Any, Any, Any]:
        """Return the number of parts of all decodes, of parts in a unit, and of units."""
        total = e.product(decodes, self.num_parts)
        most = e.most(e.ir.sdiv(total, I64(num_cores() * _UNITS_PER_CORE)), 1)
        size = e.least(most, self.num_parts)
        return total, size, e.ceil_div(total, size)

    def _add_prepare(self) -> ir.Function:
        """Clear the output of rows of padding, and count the work."""
        e, (buffers, dims) = add_function(self.module, "prepare", I64, POINTER, POINTER)
        of = self.of(e, buffers)
        decodes = e.load_int(of["num_decodes"], 0)
        done, live = e.variable(I64, decodes), e.variable(I64, decodes)

        def clear(stop: Any) -> None:
            with e.ir.if_then(e.ir.icmp_signed(">", stop, done.value)):
                count = e.product(e.ir.sub(stop, done.value), self.row_size * self.out_format.num_bytes)
                e.clear(e.at(of["out"], self.out_format.storage, e.product(done.value, self.row_size)), count)
                done.value = stop

        with e.range(decodes, self._size(e, dims, "starts", 0)) as seq:
            start, end = e.load_int(of["starts"], seq), e.load_int(of["ends"], seq)
            with e.ir.if_then(e.ir.icmp_signed(">", end, start)):
                clear(start)
                done.value, live.value = end, e.sum(seq, 1)
        clear(self._size(e, dims, "out", 0))
        _, _, ranges = self._ranges(e, decodes)
        e.ir.ret(e.sum(ranges, e.product(e.ir.sub(live.value, decodes), self.num_parts)))
        return e.function

    def _add_run(self, part: ir.Function) -> ir.Function:
        """Do one unit; those of decodes come first."""
        e, (buffers, _, unit) = add_function(self.module, "run", VOID, POINTER, POINTER, I64)
        of, count = self.of(e, buffers), I64(self.num_parts)
        decodes = e.load_int(of["num_decodes"], 0)
        total, size, ranges = self._ranges(e, decodes)
        with e.ir.if_else(e.ir.icmp_signed("<", unit, ranges)) as (is_decodes, is_chunk):
            with is_decodes:
                first = e.product(unit, size)
                last = e.least(e.sum(first, size), total)
                with e.range(first, last) as number:
                    seq, part_index = e.ir.sdiv(number, count), e.ir.srem(number, count)
                    # Another sequence's state may be anywhere.
                    is_last = e.least(e.ir.sub(e.sum(last, -1), number), e.ir.sub(e.sum(count, -1), part_index))
                    has_next = e.least(is_last, 1)
                    e.ir.call(part, [buffers, seq, part_index, has_next])
            with is_chunk:
                number = e.ir.sub(unit, ranges)
                seq, part_index = e.sum(decodes, e.ir.sdiv(number, count)), e.ir.srem(number, count)
                e.ir.call(part, [buffers, seq, part_index, I64(0)])
        e.ir.ret_void()
        return e.function


def copy(e: Emitter, source: Any, target: Any, num_bytes: Any) -> None:
    """Copy memory that does not overlap."""
    e.call_named("llvm.memcpy.p0.p0.i64", target, source, e.i64(num_bytes), ir.IntType(1)(0), result=VOID)


def add_zeros(module: ir.Module, num_bytes: int) -> Any:
    """Return the address of zeros that nobody writes to."""
    kind = ir.ArrayType(I8, num_bytes)
    zeros: Any = ir.GlobalVariable(module, kind, "zeros")
    zeros.linkage, zeros.global_constant, zeros.align = "internal", True, 64
    zeros.initializer = ir.Constant(kind, None)
    zeros.type = POINTER
    return zeros
