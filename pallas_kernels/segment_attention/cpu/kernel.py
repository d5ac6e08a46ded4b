"""The kernel in LLVM IR; all sums are in float32.

A unit of work is one head of a block of query rows. It goes over the tiles of keys that its rows see. A tile is laid
out once for all rows of the block: keys with a number (in bfloat16 a pair of numbers) of all tokens side by side,
values with pairs of tokens side by side. Then a few rows at a time compute

    scores [rows, tile] = q [rows, h] @ k [h, tile]      masked, exponentiated: online softmax
    acc    [rows, h]    = p [rows, tile] @ v [tile, h]

with their sums in registers. Tiles begin at multiples of their size, and a tile that a row does not see changes none of
its bits: they depend on its segment and on where it begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.native import pairs, processor
from pallas_kernels.native.compiling import num_registers
from pallas_kernels.native.emitter import F32, I32, I64, LANES, POINTER, VOID, Emitter, add_function, vector
from pallas_kernels.native.handler import add_handler
from pallas_kernels.native.number_formats import FORMATS

from ..shape import SegmentShape

BUFFERS = ("q", "k", "v", "starts", "ends", "scale", "out")
"""The call's arguments and result, in order."""
_ROWS = 6
"""The number of query rows that are attended at a time."""
_TILE = 64
"""The number of tokens of a tile of keys."""
_BLOCK_NUMBERS = 16_384
"""The numbers of the queries of a block: with their sums they stay in a core's second cache."""
_MASKED = float(jnp.finfo(jnp.float32).min)
"""The score of a token that a row does not see."""


class _Block(NamedTuple):
    """Arrays on the stack: the rows of a unit, and a tile of keys and values for all of them."""

    queries: Any
    starts: Any
    """The first token that each row sees, int32."""
    lengths: Any
    """The number of tokens that each row sees, int32; 0 for padding."""
    firsts: Any
    """The first token that any row of a group sees, int64; a group is the rows that are attended together."""
    lasts: Any
    """One past the last token that any row of a group sees."""
    largest: Any
    """The largest score of each row so far."""
    totals: Any
    """A vector of sums of probabilities of each row."""
    acc: Any
    """The sum of values of each row, times their probabilities."""
    keys: Any
    values: Any
    scores: Any
    """The scores of a group, then their probabilities."""


class Kernel:
    """Writes the functions of one kernel."""

    def __init__(self, shape: SegmentShape) -> None:
        self.shape, self.format = shape, FORMATS[shape.dtype]
        self.width = 2 if shape.dtype == jnp.bfloat16 and processor.current().has_bfloat16_dot else 1
        """The number of numbers that one step of a sum takes."""
        self.kind = I32 if self.width == 2 else F32
        """The type of a step's operands: pairs of bfloat16, or float32."""
        self.columns = -(-shape.head_dim // LANES) * LANES
        """The numbers of a row of values, with padding."""
        self.block = max(1, _BLOCK_NUMBERS // self.columns // _ROWS) * _ROWS
        """The number of rows of a unit."""
        self.vectors = max(1, num_registers() * 3 // 4 // _ROWS)
        """The number of vectors of sums of each row at a time; the other registers hold their operands."""
        self.module = ir.Module()

    def build(self, name: str) -> ir.Module:
        """Return the module, with a function of this name that XLA calls."""
        add_handler(self.module, name, self._add_prepare(), self._add_run())
        return self.module

    def _num_blocks(self, e: Emitter, dims: Any) -> tuple[Any, Any]:
        """Return the number of rows, and of blocks of them."""
        p = e.load(e.load(dims, POINTER, 0), I64, 0)
        return p, e.ceil_div(p, self.block)

    def _add_prepare(self) -> ir.Function:
        """Count the work."""
        e, (_, dims) = add_function(self.module, "prepare", I64, POINTER, POINTER)
        e.ir.ret(e.product(self._num_blocks(e, dims)[1], self.shape.num_heads))
        return e.function

    def _add_run(self) -> ir.Function:
        """Attend one head of a block of rows."""
        e, (buffers, dims, unit) = add_function(self.module, "run", VOID, POINTER, POINTER, I64)
        of = {name: e.load(buffers, POINTER, index) for index, name in enumerate(BUFFERS)}
        p, num_blocks = self._num_blocks(e, dims)
        head, first_row = e.ir.sdiv(unit, num_blocks), e.product(e.ir.srem(unit, num_blocks), self.block)
        for name in ("q", "k", "v", "out"):
            of[name] = e.at(of[name], self.format.storage, e.product(head, self.shape.head_dim))
        block = self._make_block(e)
        begin, end = self._begin(e, of, block, first_row, p)
        scale = e.splat(e.load(of["scale"], F32, 0))
        with e.range(e.product(e.ir.sdiv(begin, I64(_TILE)), _TILE), end, _TILE) as start:
            self._lay_out(e, of, block, start, p)
            with e.range(0, self.block // _ROWS) as group:
                first, last = (e.ir.sub(e.load(each, I64, group), start) for each in (block.firsts, block.lasts))
                is_seen = e.ir.and_(e.ir.icmp_signed("<", first, I64(_TILE)), e.ir.icmp_signed(">", last, I64(0)))
                with e.ir.if_then(is_seen):
                    self._attend(e, block, group, start, (e.most(first, 0), e.least(last, _TILE)), scale)
        with e.range(0, e.least(e.ir.sub(p, first_row), self.block)) as row:
            self._store(e, block, row, e.at(of["out"], self.format.storage, self._place(e, e.sum(first_row, row))))
        e.ir.ret_void()
        return e.function

    def _place(self, e: Emitter, row: Any) -> Any:
        """Return the place of a row among the numbers of its array."""
        return e.product(row, self.shape.num_heads * self.shape.head_dim)

    def _make_block(self, e: Emitter) -> _Block:
        rows, groups, steps = self.block, self.block // _ROWS, self.shape.head_dim // self.width
        return _Block(
            queries=e.array(self.kind, rows * steps),
            starts=e.array(I32, rows),
            lengths=e.array(I32, rows),
            firsts=e.array(I64, groups),
            lasts=e.array(I64, groups),
            largest=e.array(F32, rows),
            totals=e.array(F32, rows * LANES),
            acc=e.array(F32, rows * self.columns),
            keys=e.array(self.kind, steps * _TILE),
            values=e.array(self.kind, _TILE // self.width * self.columns),
            scores=e.array(F32, _ROWS * _TILE),
        )

    def _begin(self, e: Emitter, of: dict[str, Any], block: _Block, first_row: Any, p: Any) -> tuple[Any, Any]:
        """Copy the rows' queries, and clear their sums; return the first token that a row sees, and one past the last.

        Rows beyond the last are padding.
        """
        h, begin, end = self.shape.head_dim, e.variable(I64, p), e.variable(I64, I64(0))
        with e.range(0, self.block // _ROWS) as group:
            first, last = e.variable(I64, p), e.variable(I64, I64(0))
            with e.range(e.product(group, _ROWS), e.product(e.sum(group, 1), _ROWS)) as i:
                row = e.least(e.sum(first_row, i), e.sum(p, -1))
                start, stop = e.load_int(of["starts"], row), e.load_int(of["ends"], row)
                exists = e.ir.icmp_signed("<", e.sum(first_row, i), p)
                is_used = e.ir.and_(exists, e.ir.icmp_signed("<", start, stop))
                first.value = e.ir.select(is_used, e.least(first.value, start), first.value)
                last.value = e.ir.select(is_used, e.most(last.value, stop), last.value)
                e.store(e.ir.trunc(start, I32), block.starts, i)
                length = e.ir.select(is_used, e.ir.sub(stop, start), I64(0))
                e.store(e.ir.trunc(length, I32), block.lengths, i)
                e.store(F32(_MASKED), block.largest, i)
                source = e.at(of["q"], self.format.storage, self._place(e, row))
                for column in range(0, h, LANES // 2):
                    numbers = e.load_vector(source, self.format.storage, column, lanes=LANES // 2)
                    if self.width == 1:
                        numbers = self.format.widen(e, numbers)
                    target = e.at(block.queries, self.kind, e.product(i, h // self.width), column // self.width)
                    e.store_vector(numbers, target)
            e.store(first.value, block.firsts, group)
            e.store(last.value, block.lasts, group)
            begin.value, end.value = e.least(begin.value, first.value), e.most(end.value, last.value)
        e.clear(block.totals, self.block * LANES * 4)
        e.clear(block.acc, self.block * self.columns * 4)
        return begin.value, end.value

    def _lay_out(self, e: Emitter, of: dict[str, Any], block: _Block, start: Any, p: Any) -> None:
        """Lay out the keys and values of a tile. Values of padding are 0, as 0 x NaN is NaN."""
        h, storage = self.shape.head_dim, self.format.storage
        words = h * self.format.num_bytes // 4

        def row(base: Any, token: Any) -> Any:
            return e.at(base, storage, self._place(e, e.least(e.sum(start, token), e.sum(p, -1))))

        with e.range(0, _TILE, LANES) as token:
            rows = [row(of["k"], e.sum(token, i)) for i in range(LANES)]
            for word, count in _powers(words):
                columns = e.load_columns([e.at(each, I32, word) for each in rows], count)
                for j, column in enumerate(columns, word):
                    for step, numbers in self._steps(e, j, column):
                        e.store_vector(numbers, block.keys, token, step * _TILE)
        with e.range(0, _TILE, self.width) as token:
            rows = [row(of["v"], e.sum(token, i)) for i in range(self.width)]
            used = [self._is_used(e, of, e.sum(start, token, i), p) for i in range(self.width)]
            for column in range(0, h, LANES):
                loaded = [self._load_values(e, each, column, is_used) for each, is_used in zip(rows, used, strict=True)]
                values = loaded[0]
                if self.width == 2:
                    early, late = (e.ir.zext(each, vector(I32)) for each in loaded)
                    values = e.ir.or_(early, e.ir.shl(late, e.constant(16, late)))
                target = e.product(e.ir.udiv(token, I64(self.width)), self.columns)
                e.store_vector(values, block.values, target, column)

    def _steps(self, e: Emitter, word: int, column: Any) -> list[tuple[int, Any]]:
        """Return the steps that a word of 16 keys takes part in, each with its operand."""
        if self.width == 2:
            return [(word, column)]
        if self.format.num_bytes == 4:
            return [(word, e.ir.bitcast(column, vector(F32)))]
        return [(2 * word, pairs.first(e, column)), (2 * word + 1, pairs.second(e, column))]

    def _is_used(self, e: Emitter, of: dict[str, Any], token: Any, p: Any) -> Any:
        """Return whether a token exists and is not padding."""
        row = e.least(token, e.sum(p, -1))
        is_used = e.ir.icmp_signed("<", e.load_int(of["starts"], row), e.load_int(of["ends"], row))
        return e.ir.and_(is_used, e.ir.icmp_signed("<", token, p))

    def _load_values(self, e: Emitter, row: Any, column: int, is_used: Any) -> Any:
        """Return 16 numbers of a token's value, 0 beyond its last one: as they are stored, or as float32."""
        count = min(LANES, self.shape.head_dim - column)
        numbers = e.load_vector(row, self.format.storage, column, lanes=count)
        zeros = ir.Constant(numbers.type, None)
        numbers = e.ir.select(is_used, numbers, zeros)
        if count < LANES:
            numbers = e.shuffle(numbers, zeros, range(LANES))
        return numbers if self.width == 2 else self.format.widen(e, numbers)

    def _attend(self, e: Emitter, block: _Block, group: Any, start: Any, seen: tuple[Any, Any], scale: Any) -> None:
        """Attend a tile with the rows of a group. `seen` is the first of its tokens that any of them sees, and one past
        the last."""
        steps, first = self.shape.head_dim // self.width, e.product(group, _ROWS)
        queries = e.at(block.queries, self.kind, e.product(first, steps))
        for column in range(0, _TILE, self.vectors * LANES):
            self._multiply(
                e,
                min(self.vectors, (_TILE - column) // LANES),
                (I64(0), I64(steps)),
                left=lambda r, i: e.load(queries, self.kind, r * steps, i),
                right=lambda i, j, column=column: e.load_vector(
                    block.keys, self.kind, e.product(i, _TILE), column + j * LANES
                ),
                target=lambda r, j, column=column: e.at(block.scores, F32, r * _TILE + column + j * LANES),
            )
        decays = [self._softmax(e, block, e.sum(first, r), r, start, scale) for r in range(_ROWS)]
        acc = e.at(block.acc, F32, e.product(first, self.columns))
        probs = block.scores
        begin, end = e.ir.sdiv(seen[0], I64(self.width)), e.ceil_div(seen[1], self.width)
        for column in range(0, self.columns, self.vectors * LANES):
            self._multiply(
                e,
                min(self.vectors, (self.columns - column) // LANES),
                (begin, end),
                left=lambda r, i: e.load(probs, self.kind, r * _TILE, i),
                right=lambda i, j, column=column: e.load_vector(
                    block.values, self.kind, e.product(i, self.columns), column + j * LANES
                ),
                target=lambda r, j, column=column: e.at(acc, F32, r * self.columns + column + j * LANES),
                decays=decays,
            )

    def _softmax(self, e: Emitter, block: _Block, row: Any, r: int, start: Any, scale: Any) -> Any:
        """Turn the scores of a group's row `r` into probabilities, not divided by their sums.

        Return the decay of older ones.
        """
        scores, lanes = e.at(block.scores, F32, r * _TILE), ir.Constant(vector(I32), list(range(LANES)))
        shift = e.ir.sub(e.ir.trunc(start, I32), e.load(block.starts, I32, row))
        places, length = e.ir.add(lanes, e.splat(shift)), e.splat(e.load(block.lengths, I32, row))
        parts, seen = [], []
        for column in range(0, _TILE, LANES):
            seen.append(e.ir.icmp_unsigned("<", e.ir.add(places, e.constant(column, places)), length))
            score = e.ir.fmul(e.load_vector(scores, F32, column), scale)
            parts.append(e.ir.select(seen[-1], score, e.constant(_MASKED, score)))
        most = parts
        while len(most) > 1:
            most = [e.larger(a, b) for a, b in zip(most[::2], most[1::2], strict=True)]
        before = e.load(block.largest, F32, row)
        after = e.larger(before, e.reduce(e.larger, most[0]))
        e.store(after, block.largest, row)
        # Nothing that is masked counts as exp(0) where a row has seen nothing yet.
        probs = [
            e.ir.select(is_seen, e.exp(e.ir.fsub(part, e.splat(after))), e.splat(F32(0.0)))
            for part, is_seen in zip(parts, seen, strict=True)
        ]
        decay = e.splat(e.exp(e.ir.fsub(before, after)))
        total = e.ir.fmul(e.load_vector(block.totals, F32, e.product(row, LANES)), decay)
        for numbers in probs:
            total = e.ir.fadd(total, numbers)
        e.store_vector(total, block.totals, e.product(row, LANES))
        for column, numbers in self._round(e, probs):
            e.store_vector(numbers, e.at(scores, self.kind, column))
        return decay

    def _round(self, e: Emitter, probs: list[Any]) -> list[tuple[int, Any]]:
        """Return a row's probabilities as the operands of steps, each vector with its first step."""
        if self.width == 1:
            return [(i * LANES, numbers) for i, numbers in enumerate(probs)]
        if processor.current().is_x86:
            joined = zip(probs[::2], probs[1::2], strict=True)
            return [(i * LANES, pairs.narrow(e, early, late)) for i, (early, late) in enumerate(joined)]
        assert self.format.narrow is not None
        return [(i * LANES // 2, self.format.narrow(e, numbers)) for i, numbers in enumerate(probs)]

    def _multiply(
        self,
        e: Emitter,
        vectors: int,
        steps: tuple[Any, Any],
        *,
        left: Callable[[int, Any], Any],
        right: Callable[[Any, int], Any],
        target: Callable[[int, int], Any],
        decays: list[Any] | None = None,
    ) -> None:
        """Store at target(r, j) the sum of left(r, i) * right(i, j) over steps i, in order.

        With `decays`, one for each row, the sums go on from what is there, times the decay.
        """
        zeros = e.splat(F32(0.0))
        targets = [[target(r, j) for j in range(vectors)] for r in range(_ROWS)]
        sums = [
            [
                e.variable(vector(F32), zeros if decays is None else e.ir.fmul(e.load_vector(x, F32), decays[r]))
                for x in row
            ]
            for r, row in enumerate(targets)
        ]
        with e.range(*steps) as i:
            operands = [right(i, j) for j in range(vectors)]
            for r, row in enumerate(sums):
                factor = e.splat(left(r, i))
                for total, operand in zip(row, operands, strict=True):
                    if self.width == 2:
                        total.value = pairs.add_products(e, total.value, factor, operand)
                    else:
                        total.value = e.fma(factor, operand, total.value)
        for total, address in zip(itertools.chain(*sums), itertools.chain(*targets), strict=True):
            e.store_vector(total.value, address)

    def _store(self, e: Emitter, block: _Block, row: Any, out: Any) -> None:
        """Divide a row's sum of values by its sum of probabilities, and store the result; 0 for padding."""
        assert self.format.narrow is not None
        total = e.reduce(e.ir.fadd, e.load_vector(block.totals, F32, e.product(row, LANES)))
        factor = e.splat(e.ir.fdiv(F32(1.0), e.larger(total, F32(1e-30))))
        for column in range(0, self.shape.head_dim, LANES):
            numbers = e.ir.fmul(e.load_vector(block.acc, F32, e.product(row, self.columns), column), factor)
            numbers = self.format.narrow(e, numbers)
            count = min(LANES, self.shape.head_dim - column)
            e.store_vector(e.shuffle(numbers, numbers, range(count)) if count < LANES else numbers, out, column)


def _powers(size: int) -> list[tuple[int, int]]:
    """Return the starts and sizes of parts whose sizes are powers of two, of 16 at most."""
    parts, start = [], 0
    while start < size:
        count = min(LANES, 1 << ((size - start).bit_length() - 1))
        parts.append((start, count))
        start += count
    return parts
