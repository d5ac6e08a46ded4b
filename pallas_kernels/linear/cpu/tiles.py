"""Tiles of y [t, n] = x [t, k] times w [n, k], transposed, the core of all kernels that multiply by weights.

No matrix is packed anew. A few rows of x times a few of w are summed up at a time, each number of y in one register: 16
sums, of every 16th product along k, or 8 of every 8th without AVX-512. At the end the sums of one register are added
up. The order of all additions is the same for any number of rows: a row's result does not depend on the rows beside it.

With a gated activation the first half of w's rows are gates: a few of them are taken together with the rows that they
gate, and y [t, n / 2] = activation(gates) * gated, in float32 until it is stored.

Weights of a `WeightFormat` become numbers of x's dtype: with few rows of x in registers, otherwise once for all rows of
a unit, or, with 16 bits and long rows, for a few rows at a time. The sums equal those of plain weights, to the bit. A
scale for each row of w multiplies the sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.native import pairs, processor
from pallas_kernels.native.compiling import num_cores, num_registers
from pallas_kernels.native.emitter import (
    CACHE_LINE,
    F32,
    I8,
    I64,
    LANES,
    NULL,
    POINTER,
    VOID,
    Emitter,
    Variable,
    add_function,
    vector,
)

from .amx import MatrixUnit
from .kind import MIN_COLUMNS, MIN_GATES, MIN_ROWS, STEP_BYTES, Kind
from .multiplier import GATED, UNIT_ROWS, Multiplier
from .operands import Operands, Range
from .unpack import Halves, Plain, Row, Unpacker

_COLUMNS = MIN_COLUMNS
"""The number of rows of w that are multiplied at a time."""
FEW_ROWS = MIN_ROWS
"""The number of rows of x that are multiplied at a time where there are few."""
_MIN_CHUNK, _MAX_CHUNK = 16, 256
"""The number of rows of w in a unit: many, to read memory in long stretches, but enough units for all cores."""
_UNITS_PER_CORE = 4
_GROUP_BYTES = {LANES: 12 << 10, LANES // 2: 128 << 10}
"""The bytes of w that stay in a core's cache for all rows of a unit, by the number of sums: with 16 in the first cache,
where x passes by them, with 8 in the second, from where they pass by x."""
_TILE_BYTES = 18 << 10
"""The bytes of x that are multiplied at a time where there are many rows: longer rows are taken in pieces, and the sums
of some columns are kept in between. So x stays in a core's first cache while w passes by."""
_PIECE_COLUMNS, _PIECE_BYTES = 48, {LANES: 512 << 10, LANES // 2: 160 << 10}
"""The most columns, and the most bytes of w, that are taken at a time where rows are in pieces, by the number of sums.
"""
_GATES = MIN_GATES
"""The number of gates that are taken at a time with the rows that they gate: their activations fill vectors."""
_SCRATCH_BYTES = 256 << 10
"""Bytes of the stack for weights that are unpacked; rows that are too long for it are taken in registers."""
_PACKED_FEW_ROWS = 8
"""The most rows for which packed w is unpacked a few rows at a time, rather than once for all."""
_AHEAD = 2048
"""The distance, in bytes, at which w is fetched ahead."""
_FEW_BYTES = 5
"""With fewer bytes than this in a step, and units of many rows, the next weights are fetched for all steps of a block
at once: fetching in each step would cost 4 %. With fewer rows a block's lines are too many at once, and would be waited
for."""


class _Ahead(NamedTuple):
    """Weights that are fetched while others are multiplied: `_COLUMNS` stretches, some bytes of each in a step."""

    base: Any
    """The address of the first stretch."""
    stride: Any
    """The number of bytes of each stretch that are fetched in a step."""
    distance: Any
    """The distance in bytes from one stretch to the next."""
    apart: Any
    """The distance in bytes from gates to the weights that they gate."""


_AHEAD_TYPES = (POINTER, I64, I64, I64)
_NOTHING_AHEAD = _Ahead(NULL, I64(0), I64(0), I64(0))


class Tiles(NamedTuple):
    """The functions that multiply a few rows of x, from one row on, by a group of w's."""

    few: ir.Function
    many: ir.Function
    one: ir.Function | None = None
    """The function for a single row, if it is not left to `few`."""
    direct: ir.Function | None = None
    """The function for many rows and weights of 16 bits, which it widens for a few rows at a time."""


class _Group(NamedTuple):
    """Some of a unit's rows of w, which stay in a core's cache while all of its rows of x are multiplied."""

    of: Operands
    rows: Range
    """The rows of x."""
    start: Any
    """The first row of w, and one past the last."""
    stop: Any
    size: Any
    """The number of rows of a group, except a unit's last."""


type Functions = Tiles | ir.Function
"""The functions that multiply a unit: tiles, or on a processor with AMX one function."""


class ExactMultiplier(Multiplier[Functions]):
    """Multiplies x by the numbers that weights are or represent, as floats."""

    def __init__(self, kind: Kind) -> None:
        self.dtype, self.out_dtype = jnp.dtype(kind.dtype), jnp.dtype(kind.out_dtype)
        self.plain = Plain(self.dtype)
        super().__init__(kind, _weights_of(kind, self.plain))
        self.storage = self.in_format.storage
        self.is_packed = isinstance(self.weights, Unpacker)
        self.scratch_size = _SCRATCH_BYTES // self.dtype.itemsize
        self.width = _COLUMNS // self.parts
        """The number of columns of y that `_COLUMNS` rows of w give: half of them if the others are gates."""
        present = processor.current()
        self.lanes = LANES if present.has_avx512 else LANES // 2
        """The number of sums of each number of y: a register, or on AArch64 two."""
        self.takes = [_as_is] if self.dtype == jnp.float32 or present.has_bfloat16_dot else [pairs.first, pairs.second]
        """The parts of a step's numbers that are multiplied, one after the other."""
        # 6 rows by 4 columns are 24 sums, which with their operands take 29 of 32 registers; 3 by 4 take all of 16
        # registers, or of 32 that hold half of the sums each. The halves of pairs take a few more.
        self.many_rows = (6 if self.lanes == LANES else 3) - (len(self.takes) - 1)
        """The number of rows of x that are multiplied at a time where there are many."""
        self.piece = _TILE_BYTES // STEP_BYTES // self.many_rows * self.plain.step
        """The numbers of a longer row that are multiplied at a time where there are many rows."""
        self.max_chunk = 2 * _MAX_CHUNK if present.has_matrix_unit else _MAX_CHUNK
        self.has_matrix_unit = self.dtype == jnp.bfloat16 and present.has_matrix_unit

    def add_tiles(self, *, has_one: bool = False) -> Functions:
        """Define the functions that `multiply` calls."""
        if self.has_matrix_unit:
            return MatrixUnit(
                self.module,
                self.weights,
                self.out_dtype,
                self.activate,
                UNIT_ROWS,
                self.max_chunk,
                is_gated=self.is_gated,
            ).add_unit()
        few = self._add_tile(FEW_ROWS, self.weights)
        many = self._add_tile(self.many_rows, self.plain)
        one = self._add_tile(1, self.weights) if has_one or self.is_packed else None
        direct = self._add_tile(self.many_rows, self.weights) if isinstance(self.weights, Halves) else None
        return Tiles(few, many, one, direct)

    def chunk(self, e: Emitter, n: Any, num_parts: Any = 1) -> Any:
        """Return the number of columns of a unit, where each of `num_parts` ranges of n is divided."""
        wanted = _MIN_CHUNK * _UNITS_PER_CORE * num_cores()
        return e.least(e.product(e.ceil_div(e.product(n, num_parts), wanted), _MIN_CHUNK), self.max_chunk)

    def multiply(
        self,
        e: Emitter,
        tiles: Functions,
        of: Operands,
        num_rows: Any,
        rows: Range,
        columns: Range,
    ) -> None:
        """Multiply a unit's rows of x by a unit's rows of w; `num_rows` is the number of all rows of x."""
        if isinstance(tiles, ir.Function):
            e.ir.call(tiles, [*rows, *columns, *of.own, *of.parts])
            return
        cannot_take_many = e.ir.icmp_signed("<", of.t, I64(self.many_rows))
        most = _PACKED_FEW_ROWS if self.is_packed else FEW_ROWS
        is_few = e.ir.or_(e.ir.icmp_signed("<=", num_rows, I64(most)), cannot_take_many)
        scratch = None if self.weights is self.plain else e.array(self.storage, self.scratch_size)
        group = self._group(e, of.k)
        with e.range(*columns, group) as begin:
            stop = e.least(e.sum(begin, group), columns.stop)
            # A unit that would reach beyond the end begins earlier instead, and so do a tile's rows and columns.
            start = e.least(begin, e.ir.sub(of.n, I64(_GATES if self.is_gated else _COLUMNS)))
            takes_few = is_few
            if self.is_packed:
                numbers = e.product(self._columns(e, start, stop), self.parts, of.k)
                takes_few = e.ir.or_(is_few, e.ir.icmp_signed(">", numbers, I64(self.scratch_size)))
            with e.ir.if_else(takes_few) as (by_few, by_many):
                with by_few, e.range(*rows, FEW_ROWS) as row:
                    row = e.least(row, e.ir.sub(of.t, I64(FEW_ROWS)))
                    few = tiles.few
                    if tiles.one:
                        few = e.ir.select(e.ir.icmp_signed("==", num_rows, I64(1)), tiles.one, few)
                    e.ir.call(few, [row, start, stop, of.n, *_flat(of, _NOTHING_AHEAD)])
                with by_many:
                    self._multiply_many(e, tiles, _Group(of, rows, start, stop, group), scratch)

    def _multiply_many(self, e: Emitter, tiles: Tiles, group: _Group, scratch: Any) -> None:
        """Multiply a unit's rows of x by a group of w's, in the way that is faster for rows of their length."""
        if tiles.direct is None:
            self._multiply_group(e, tiles.many, group, scratch)
            return
        # Rows that are taken in pieces are not in the first cache: half of them comes sooner.
        with e.ir.if_else(e.ir.icmp_signed(">", group.of.k, I64(self.piece))) as (in_pieces, in_one):
            with in_pieces:
                self._multiply_group(e, tiles.direct, group, None)
            with in_one:
                self._multiply_group(e, tiles.many, group, scratch)

    def _multiply_group(self, e: Emitter, many: ir.Function, group: _Group, scratch: Any) -> None:
        """Multiply a unit's rows of x by a group of w's, while the next group is fetched."""
        of, rows, start, stop, size = group
        here, apart, weights = of, of.n, self.weights
        if scratch is not None:
            apart = self._columns(e, start, stop)
            for part in range(self.parts):
                first = e.sum(start, e.product(of.n, part))
                target = e.at(scratch, self.storage, e.product(apart, of.k, part))
                weights.write(e, of.w, of.parts, Range(first, e.sum(first, apart)), of.k, target)
            here = of._replace(w=e.at(scratch, self.storage, e.product(start, of.k, -1)))
        ahead = self._ahead(e, of, stop, size, e.most(e.ir.sub(rows.stop, rows.start), 1))
        steps = e.product(e.ceil_div(e.ir.sub(stop, start), self.width), e.ir.udiv(of.k, I64(self.plain.step)))
        with e.range(*rows, self.many_rows) as row:
            tile = e.ir.sdiv(e.ir.sub(row, rows.start), I64(self.many_rows))
            here_ahead = ahead._replace(base=e.at(ahead.base, I8, e.product(tile, steps, ahead.stride)))
            tile_row = e.least(row, e.ir.sub(of.t, I64(self.many_rows)))
            e.ir.call(many, [tile_row, start, stop, apart, *_flat(here, here_ahead)])

    def _ahead(self, e: Emitter, of: Operands, stop: Any, group: Any, num_rows: Any) -> _Ahead:
        """Return the next group, which is fetched while a group of w's is multiplied by `num_rows` rows of x."""
        width = e.product(self.weights.width(e, of.k), self.weights.num_bytes)
        stride = e.ceil_div(I64(self.many_rows * self.plain.step * self.weights.bits // 8), num_rows)
        distance = e.ir.udiv(e.product(group, width), I64(self.width))
        return _Ahead(self.weights.at(e, of.w, stop, of.k), stride, distance, e.product(of.n, width))

    def _columns(self, e: Emitter, start: Any, stop: Any) -> Any:
        return I64(_GATES) if self.is_gated else e.ir.sub(stop, start)

    def _group(self, e: Emitter, k: Any) -> Any:
        """Return the number of columns that are taken at a time for all rows of a unit."""
        if self.is_gated:
            return I64(_GATES)
        size = _SCRATCH_BYTES if self.is_packed else _PIECE_BYTES[self.lanes]
        passing = e.least(self._fitting(e, size, k), _PIECE_COLUMNS)
        staying = self._fitting(e, _GROUP_BYTES[self.lanes], k)
        return e.ir.select(e.ir.icmp_signed(">", k, I64(self.piece)), passing, staying)

    def _fitting(self, e: Emitter, size: int, k: Any) -> Any:
        """Return the number of columns of `size` bytes together, at least `_COLUMNS`."""
        return e.most(e.product(e.ir.sdiv(I64(size // self.dtype.itemsize // _COLUMNS), k), _COLUMNS), _COLUMNS)

    def _add_tile(self, rows: int, weights: Plain) -> ir.Function:
        """Multiply a few rows of x, from `row` on, by a group of w's. Gated rows are `apart` rows behind."""
        block = self._add_block(rows, weights)
        e, (row, start, stop, apart, x, w, plus, bias, y, _, n, k, *others) = add_function(
            self.module,
            f"tile_{rows}_{weights.bits}",
            VOID,
            *[I64] * 4,
            *[POINTER] * 5,
            *[I64] * 3,
            *_AHEAD_TYPES,
            *self._part_types,
        )
        ahead, parts = others[: len(_AHEAD_TYPES)], others[len(_AHEAD_TYPES) :]
        columns = e.ceil_div(e.ir.sub(stop, start), self.width)
        x = e.at(x, self.storage, e.product(row, k))
        y = e.at(y, self.out_format.storage, e.product(row, n))
        size = rows * _COLUMNS * self.lanes
        kept, piece = NULL, k
        if not _is_few(rows):
            kept, piece = e.array(F32, size * _PIECE_COLUMNS // _COLUMNS), e.least(k, self.piece)

        def part(first: Any, kept_index: Any) -> list[Any]:
            """Return a piece's range, the address of a block's sums until the next piece, and the weights to fetch."""
            end = e.least(e.sum(first, piece), k)
            done = e.sum(e.product(first, columns), e.product(kept_index, e.ir.sub(end, first)))
            fetched = e.at(ahead[0], I8, e.product(e.ir.udiv(done, I64(self.plain.step)), ahead[1]))
            # Whole rows take one place in turns.
            kept_index = e.ir.select(e.ir.icmp_signed("<", piece, k), kept_index, I64(0))
            return [first, end, e.at(kept, F32, e.product(kept_index, size)), fetched, *ahead[1:]]

        if self.is_gated:
            sums = e.array(F32, rows * LANES)
            with e.range(0, k, piece) as first, e.range(0, _GATES, self.width) as i:
                target = e.at(sums, F32, e.product(i, self.parts))
                numbers = part(first, e.ir.sdiv(i, I64(self.width)))
                added = [NULL, NULL, target, I64(LANES)]
                e.ir.call(block, [x, w, e.sum(start, i), apart, n, k, *added, *numbers, *parts])
            added = e.at(plus, self.out_format.storage, e.product(row, n, GATED), start)
            added = e.ir.select(e.ir.icmp_unsigned("==", plus, NULL), NULL, added)
            self._activate(e, sums, rows, e.at(y, self.out_format.storage, start), added, n)
        else:
            with e.range(0, k, piece) as first, e.range(start, stop, _COLUMNS) as column:
                numbers = part(first, e.ir.sdiv(e.ir.sub(column, start), I64(_COLUMNS)))
                column = e.least(column, e.ir.sub(n, I64(_COLUMNS)))
                target = e.at(y, self.out_format.storage, column)
                added = [
                    e.ir.select(e.ir.icmp_unsigned("==", base, NULL), NULL, e.at(base, self.out_format.storage, index))
                    for base, index in ((plus, e.sum(e.product(row, n), column)), (bias, column))
                ]
                e.ir.call(block, [x, w, column, apart, n, k, *added, target, n, *numbers, *parts])
        e.ir.ret_void()
        return e.function

    def _activate(self, e: Emitter, sums: Any, num_rows: int, y: Any, plus: Any, n: Any) -> None:
        """Store the results of a vector of sums per row, which has a few gates and then the columns that they gate.

        The addend has a row's gates, and behind all of them the columns that they gate.
        """
        assert self.activate is not None
        assert self.out_format.narrow is not None
        gates = [lane for lane in range(2 * LANES) if lane % _COLUMNS < self.width]
        for first in range(0, num_rows, 2):
            a, b = (e.load_vector(sums, F32, min(row, num_rows - 1) * LANES) for row in (first, first + 1))
            parts = [
                e.variable(vector(F32), e.shuffle(a, b, [lane + offset for lane in gates]))
                for offset in (0, self.width)
            ]
            with e.ir.if_then(e.ir.icmp_unsigned("!=", plus, NULL)):
                for part, total in enumerate(parts):
                    places = [e.product(n, GATED * min(row, num_rows - 1) + part) for row in (first, first + 1)]
                    total.value = e.ir.fadd(self._load_rows(e, plus, places, _GATES), total.value)
            gate, gated = (total.value for total in parts)
            result = self.out_format.narrow(e, e.ir.fmul(self.activate(e, gate), gated))
            for row in range(min(2, num_rows - first)):
                some = e.shuffle(result, result, range(row * _GATES, (row + 1) * _GATES))
                e.store_vector(some, y, e.product(n, first + row))

    @property
    def _part_types(self) -> list[Any]:
        return [POINTER] * len(self.weights.parts)

    def _add_block(self, rows: int, weights: Plain) -> ir.Function:
        """Multiply a few rows of x and of w, from a column on. Scales of whole rows of w multiply only the sums."""
        e, (x, w, column, apart, n, k, plus, bias, y, y_row, start, stop, kept, *others) = add_function(
            self.module,
            f"block_{rows}_{weights.bits}",
            VOID,
            *[*[POINTER] * 2, *[I64] * 4, *[POINTER] * 3, *[I64] * 3, POINTER],
            *_AHEAD_TYPES,
            *self._part_types,
        )
        if self.lanes < LANES:  # with AVX-512 LLVM would then hold more than registers in the loops
            e.function.attributes.add("alwaysinline")  # otherwise the arguments would be passed in memory
        ahead, parts = _Ahead(*others[: len(_AHEAD_TYPES)]), others[len(_AHEAD_TYPES) :]

        def row_of(index: int) -> Any:
            """Return the row of w of a column of the block."""
            return e.sum(column, e.product(apart, index // self.width), index % self.width)

        steps = Range(start, stop)
        if _is_few(rows):
            sums = self._multiply_few(e, rows, (x, k), (w, row_of, parts), steps, weights)
        else:
            sums = self._multiply_piece(e, rows, (x, k), (w, row_of, weights), steps, kept, ahead)
        per_vector = LANES // _COLUMNS
        for first in range(0, rows, per_vector):
            some = list(itertools.chain(*sums[first : first + per_vector]))
            result = add_up(e, some + [e.splat(F32(0.0), self.lanes)] * (LANES - len(some)))
            last = min(rows, first + per_vector)
            if isinstance(self.weights, Unpacker) and self.weights.scales_sums:
                result = e.ir.fmul(result, self._load_scales(e, self.weights, parts[0], column, n))
            if not self.is_gated:
                assert self.out_format.narrow is not None
                total = e.variable(vector(F32), result)
                for base, stride in ((plus, y_row), (bias, I64(0))):
                    with e.ir.if_then(e.ir.icmp_unsigned("!=", base, NULL)):
                        added = self._load_rows(e, base, [e.product(stride, row) for row in range(first, last)])
                        total.value = e.ir.fadd(added, total.value)
                result = self.out_format.narrow(e, self.activate(e, total.value) if self.activate else total.value)
            for row in range(first, last):
                lanes = range((row - first) * _COLUMNS, (row - first + 1) * _COLUMNS)
                e.store_vector(e.shuffle(result, result, lanes), y, e.product(y_row, row))
        e.ir.ret_void()
        return e.function

    def _multiply_few(
        self,
        e: Emitter,
        rows: int,
        of_x: tuple[Any, Any],
        of_w: tuple[Any, Callable[[int], Any], Sequence[Any]],
        steps: Range,
        weights: Plain,
    ) -> list[list[Any]]:
        """Return the sums of a block of few rows."""
        (_, k), (w, row_of, parts) = of_x, of_w
        sums = self._no_sums(e, rows)
        # Reading w takes the time: it is read as one stream, which the processor prefetches. Packed weights take longer
        # to unpack than to read, and x is loaded once for several rows of w; the next of each is `rows` ahead.
        has_all = self.is_packed and (rows == 1 or num_registers() == 32)
        together = _COLUMNS if has_all else 1
        ahead = e.product(self.width, weights.width(e, k)) if has_all else _AHEAD
        for first in range(0, _COLUMNS, together):
            places = [row_of(column) for column in range(first, first + together)]
            held = [weights.open(e, w, each, k) for each in places]
            with weights.pieces(e, *steps) as piece:
                w_rows = [
                    weights.prepare(e, row, parts, each, k, piece) for row, each in zip(held, places, strict=True)
                ]
                with e.range(*(e.ir.udiv(each, I64(weights.step)) for each in piece)) as step:
                    self._add_products(e, sums, of_x, w_rows, first, step, weights, ahead)
        return [[each.value for each in row] for row in sums]

    def _multiply_piece(
        self,
        e: Emitter,
        rows: int,
        of_x: tuple[Any, Any],
        of_w: tuple[Any, Callable[[int], Any], Plain],
        steps: Range,
        kept: Any,
        ahead: _Ahead,
    ) -> list[list[Any]]:
        """Return the sums of a block after its last piece; before that, keep them in memory and return."""
        (x, k), (w, row_of, weights) = of_x, of_w
        w_starts = [e.product(row_of(column), k) for column in range(_COLUMNS)]
        sums = self._no_sums(e, rows)
        kept_at = [(total, number * self.lanes) for number, total in enumerate(itertools.chain(*sums))]
        with e.ir.if_then(e.ir.icmp_signed(">", steps.start, I64(0))):
            for total, index in kept_at:
                total.value = e.load_vector(kept, F32, index, lanes=self.lanes)
        with e.ir.if_else(e.ir.icmp_unsigned("<", ahead.stride, I64(_FEW_BYTES))) as (at_once, by_step):
            with at_once:
                with e.range(0, e.product(self._steps(e, steps), ahead.stride), CACHE_LINE) as offset:
                    self._fetch(e, ahead, offset)
                with e.range(*steps, self.plain.step) as i:
                    self._add_step(e, sums, (x, k), (w, w_starts, weights), i)
            with by_step, e.range(*steps, self.plain.step) as i:
                self._fetch(e, ahead, e.product(self._steps(e, Range(steps.start, i)), ahead.stride))
                self._add_step(e, sums, (x, k), (w, w_starts, weights), i)
        with e.ir.if_then(e.ir.icmp_signed("<", steps.stop, k)):
            for total, index in kept_at:
                e.store_vector(total.value, kept, index)
            e.ir.ret_void()
        return [[each.value for each in row] for row in sums]

    def _no_sums(self, e: Emitter, rows: int) -> list[list[Variable]]:
        """Return the sums of a block before anything is added."""
        zeros = e.splat(F32(0.0), self.lanes)
        return [[e.variable(zeros.type, zeros) for _ in range(_COLUMNS)] for _ in range(rows)]

    def _add_step(
        self,
        e: Emitter,
        sums: Sequence[Sequence[Variable]],
        of_x: tuple[Any, Any],
        of_w: tuple[Any, Sequence[Any], Plain],
        i: Any,
    ) -> None:
        """Add the products of a step's numbers to all sums."""
        (x, k), (w, w_starts, weights) = of_x, of_w
        for begin, take in itertools.product(range(0, LANES, self.lanes), self.takes):
            # LLVM would load all at once, for which there are not enough registers.
            if len(self.takes) > 1 or isinstance(weights, Halves):
                e.ir.fence("acquire", "singlethread")
            x_rows = [
                take(e, self.plain.load_vector(e, x, e.sum(e.product(k, row), i), begin, self.lanes))
                for row in range(len(sums))
            ]
            for column, w_start in enumerate(w_starts):
                w_row = take(e, weights.load_vector(e, w, e.sum(w_start, i), begin, self.lanes))
                for x_row, totals in zip(x_rows, sums, strict=True):
                    self._add_product(e, totals[column], x_row, w_row)

    def _steps(self, e: Emitter, numbers: Range) -> Any:
        return e.ir.udiv(e.ir.sub(numbers.stop, numbers.start), I64(self.plain.step))

    def _fetch(self, e: Emitter, ahead: _Ahead, offset: Any) -> None:
        """Begin to read a line of each stretch of the next weights."""
        for stretch in range(_COLUMNS):
            part, column = divmod(stretch, self.width)
            e.prefetch(ahead.base, I8, offset, e.product(ahead.distance, column), e.product(ahead.apart, part))

    def _add_products(
        self,
        e: Emitter,
        sums: Sequence[Sequence[Variable]],
        x: tuple[Any, Any],
        w_rows: Sequence[Row],
        first: int,
        step: Any,
        weights: Plain,
        ahead: Any,
    ) -> None:
        """Add the products of a step's numbers, of all rows of x and some rows of w, to their sums."""
        base, k = x
        per_load = self.plain.step
        start = e.product(step, weights.step)
        x_rows = [
            [
                self.plain.load_vector(e, base, e.sum(e.product(k, row), start, begin), 0, LANES)
                for begin in range(0, weights.step, per_load)
            ]
            for row in range(len(sums))
        ]
        for column, w_row in enumerate(w_rows, first):
            numbers = weights.load(e, w_row, step)
            weights.fetch(e, w_row, step, ahead)
            for row, x_row in enumerate(x_rows):
                for x_numbers, w_numbers in zip(x_row, numbers, strict=True):
                    self._add_product(e, sums[row][column], x_numbers, w_numbers)

    def _load_scales(self, e: Emitter, weights: Unpacker, scales: Any, column: Any, apart: Any) -> Any:
        """Return the scales of `_COLUMNS` columns, repeated for each row of a vector."""
        parts = [
            weights.load_part(e, "scales", scales, e.sum(column, e.product(apart, part)), self.width)
            for part in range(self.parts)
        ]
        return e.shuffle(parts[0], parts[-1], list(range(_COLUMNS)) * (LANES // _COLUMNS))

    def _load_rows(self, e: Emitter, base: Any, places: Sequence[Any], count: int = _COLUMNS) -> Any:
        """Return a vector of `count` numbers from each address."""
        some = [e.load_vector(base, self.out_format.storage, place, lanes=count) for place in places]
        some += some[-1:] * (LANES // count - len(some))
        return self.out_format.widen(e, e.join(some))

    def _add_product(self, e: Emitter, total: Variable, x: Any, w: Any) -> None:
        for begin in range(0, x.type.count, self.lanes):
            lanes = range(begin, begin + self.lanes)
            some_x, some_w = (each if len(lanes) == x.type.count else e.shuffle(each, each, lanes) for each in (x, w))
            if x.type.element == F32:
                total.value = e.fma(some_x, some_w, total.value)
            else:
                total.value = pairs.add_products(e, total.value, some_x, some_w)


def _weights_of(kind: Kind, plain: Plain) -> Plain:
    if kind.form is None:
        return plain
    return Halves(kind.form) if kind.form.is_half else Unpacker(jnp.dtype(kind.dtype), kind.form)


def _flat(of: Operands, ahead: _Ahead) -> list[Any]:
    """Return operands as functions take them, with the weights to fetch."""
    return [*of.own, *ahead, *of.parts]


def _as_is(_: Emitter, numbers: Any) -> Any:
    return numbers


def _is_few(rows: int) -> bool:
    return rows in (1, FEW_ROWS)


def add_up(e: Emitter, vectors: Sequence[Any]) -> Any:
    """Return a vector of the sums of 16 vectors of 16 or 8 numbers, each summed up as halves of halves."""
    lanes = vectors[0].type.count
    sums = [_add_up(e, vectors[first : first + lanes]) for first in range(0, LANES, lanes)]
    return sums[0] if lanes == LANES else e.shuffle(sums[0], sums[1], range(LANES))


def _add_up(e: Emitter, vectors: Sequence[Any]) -> Any:
    """Return a vector of the sums of vectors, as many as each of them has numbers."""
    lanes = len(vectors)
    size = lanes // 2
    while size:
        # Each holds segments of 2 * size numbers still to be added up, of one vector each.
        starts = range(0, lanes, 2 * size)
        low = [
            lane
            for start in starts
            for lane in (*range(start, start + size), *range(lanes + start, lanes + start + size))
        ]
        high = [lane + size for lane in low]
        half = len(vectors) // 2
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors = [e.ir.fadd(e.shuffle(a, b, low), e.shuffle(a, b, high)) for a, b in pairs]
        size //= 2
    return vectors[0]
