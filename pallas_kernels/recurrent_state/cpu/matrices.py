"""States that are a matrix of keys by values for each head, in float32.

A pool of them is [slots, heads, values / columns, keys, columns]: a part, of all keys by a few columns of values, lies
in one piece and stays in a core's first cache while tokens go by. Columns do not depend on each other. Tokens come a
few at a time: first the operands that all columns share are computed from their inputs, once; then the tokens pass by
each part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.native.compiling import num_registers
from pallas_kernels.native.emitter import (
    CACHE_LINE,
    F32,
    I64,
    LANES,
    POINTER,
    VOID,
    Emitter,
    Variable,
    add_function,
    vector,
)
from pallas_kernels.native.number_formats import Format

from .units import StateKernel, States, add_zeros, copy

_PART_BYTES = 16 << 10
"""The most bytes of a part with more columns than a vector: half of a small first cache."""
_MAX_COLUMNS = 32
_MAX_PARTS = 2
"""The number of parts of a head in a unit of work."""
_TOKENS = 16
"""The number of tokens that come at a time."""
_UNROLLED_KEYS = 4
"""Keys must be a multiple of this, and of `LANES`."""


def num_columns(keys: int, values: int) -> int:
    """Return the number of columns of values of a part."""
    fits = (each for each in (_MAX_COLUMNS, LANES) if values % each == 0 and keys * each * 4 <= _PART_BYTES)
    return next(fits, LANES)


def matrix_pool_spec(num_layers: int, num_slots: int, heads: int, keys: int, values: int) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a pool of matrices."""
    columns = num_columns(keys, values)
    return jax.ShapeDtypeStruct((num_layers * num_slots, heads, values // columns, keys, columns), jnp.float32)


class MatrixKernel(StateKernel):
    """Writes the functions of one kernel. `add_operands` and `add_token` define what a token does to a part."""

    def __init__(
        self,
        inputs: Sequence[str],
        values_name: str,
        *,
        number_format: Format,
        heads: int,
        keys: int,
        values: int,
        num_operands: int,
        num_scalars: int,
    ) -> None:
        self.format, self.heads, self.keys, self.values = number_format, heads, keys, values
        self.values_name, self.num_operands, self.num_scalars = values_name, num_operands, num_scalars
        self.columns = num_columns(keys, values)
        self.part_size = keys * self.columns
        self.num_vectors = self.columns // LANES
        count = values // self.columns
        self.parts = next(each for each in range(min(_MAX_PARTS, count), 0, -1) if count % each == 0)
        """The number of parts of a head in a unit of work."""
        self.num_chains = min(_UNROLLED_KEYS, max(1, num_registers() // 2 // self.num_vectors))
        """The number of sums of each column, each over some of the keys, which do not wait for each other."""
        super().__init__(
            inputs,
            out_format=number_format,
            row_size=heads * values,
            pool_type=F32,
            slot_size=heads * values * keys,
            parts=heads * count // self.parts,
        )

    def add_operands(self, e: Emitter, of: dict[str, Any], row: Any, head: Any, operands: Any, scalars: Any) -> None:
        """Write a token's operands that all columns of a head share: vectors of keys, and single numbers."""
        raise NotImplementedError

    def fetch_operands(self, e: Emitter, of: dict[str, Any], row: Any, head: Any) -> None:
        """Begin to read the inputs of `add_operands`."""
        raise NotImplementedError

    def add_token(self, fetches: bool) -> ir.Function:
        """Define the function that updates a part of a state by one token.

        void (ptr before, ptr after, ptr next, ptr operands, ptr scalars, ptr values, ptr out); if it fetches, it begins
        to read what is at `next`, as large as a part.
        """
        raise NotImplementedError

    def add_part(self) -> ir.Function:
        """Define the function that updates a few parts of a head by all rows of their sequence."""
        tokens = [self.add_token(fetches) for fetches in (False, True)]
        zeros = add_zeros(self.module, self.part_size * 4)
        e, (buffers, seq, unit, has_next) = add_function(self.module, "part", VOID, POINTER, *[I64] * 3)
        of = self.of(e, buffers)
        states = self.states(e, of, seq)
        head = e.ir.sdiv(unit, I64(self.values // self.columns // self.parts))
        first_part = e.product(unit, self.parts)
        column = e.product(e.ir.srem(first_part, I64(self.values // self.columns)), self.columns)
        operands, scalars = e.array(F32, _TOKENS * self.num_operands), e.array(F32, _TOKENS * self.num_scalars)
        is_single = e.ir.icmp_signed("==", e.ir.sub(states.end, states.start), I64(1))
        fetches = e.ir.and_(is_single, e.ir.xor(states.begins, ir.IntType(1)(1)))
        token = e.ir.select(fetches, tokens[1], tokens[0])
        with e.range(states.start, states.end, _TOKENS) as first:
            last = e.least(e.sum(first, _TOKENS), states.end)
            with e.range(last, e.least(e.sum(last, _TOKENS), states.end)) as row:
                self._fetch_row(e, of, row, head, column)
            with e.range(first, last) as row:
                index = e.ir.sub(row, first)
                self.add_operands(
                    e,
                    of,
                    row,
                    head,
                    e.at(operands, F32, e.product(index, self.num_operands)),
                    e.at(scalars, F32, e.product(index, self.num_scalars)),
                )
            with e.range(0, self.parts) as which:
                offset = e.product(e.sum(first_part, which), self.part_size)
                before, after, saved = (e.at(each, F32, offset) for each in (states.before, states.after, states.saved))
                before = e.ir.select(states.begins, zeros, before)
                is_last = e.ir.icmp_signed("==", e.sum(which, 1), I64(self.parts))
                step = e.ir.select(is_last, has_next, I64(1))
                following = e.at(before, F32, e.product(step, self.part_size))
                with e.range(first, last) as row:
                    index = e.ir.sub(row, first)
                    at = e.product(e.sum(e.product(row, self.heads), head), self.values)
                    at = e.sum(at, column, e.product(which, self.columns))
                    e.ir.call(
                        token,
                        [
                            e.ir.select(e.ir.icmp_signed("==", row, states.start), before, after),
                            after,
                            following,
                            e.at(operands, F32, e.product(index, self.num_operands)),
                            e.at(scalars, F32, e.product(index, self.num_scalars)),
                            e.at(of[self.values_name], self.format.storage, at),
                            e.at(of["out"], self.format.storage, at),
                        ],
                    )
                    self._save(e, states, row, after, saved)
                    with self.slot_of_row(e, of, row) as kept:
                        copy(e, after, e.at(kept, F32, offset), self.part_size * 4)
        e.ir.ret_void()
        return e.function

    def _fetch_row(self, e: Emitter, of: dict[str, Any], row: Any, head: Any, column: Any) -> None:
        """Begin to read and write a token of the next few: rows lie too far apart for a processor to prefetch."""
        self.fetch_operands(e, of, row, head)
        start = e.sum(e.product(e.sum(e.product(row, self.heads), head), self.values), column)
        for name in (self.values_name, "out"):
            self.fetch_numbers(e, of[name], start, self.parts * self.columns, self.format)

    def _save(self, e: Emitter, states: States, row: Any, after: Any, saved: Any) -> None:
        is_end = e.ir.icmp_signed("==", e.sum(row, 1), states.save_end)
        with e.ir.if_then(e.ir.and_(states.is_saved, is_end)):
            copy(e, after, saved, self.part_size * 4)

    # The following methods are for kernels' tokens.

    def fetch_numbers(self, e: Emitter, base: Any, start: Any, count: int, number_format: Format) -> None:
        """Begin to read `count` numbers."""
        for first in range(0, count, CACHE_LINE // number_format.num_bytes):
            e.prefetch(base, number_format.storage, start, first)

    def widened(self, e: Emitter, base: Any, *index: Any) -> Any:
        """Load a vector of an input in the op's dtype."""
        return self.format.widen(e, e.load_vector(base, self.format.storage, *index))

    def store(self, e: Emitter, numbers: Any, base: Any, *index: Any) -> None:
        """Store a vector in the op's dtype."""
        assert self.format.narrow is not None
        e.store_vector(self.format.narrow(e, numbers), base, *index)

    def chains(self, e: Emitter) -> list[list[Variable]]:
        """Return sums that are 0: for each chain one for each vector of columns."""
        zeros = e.splat(F32(0.0))
        return [[e.variable(vector(F32), zeros) for _ in range(self.num_vectors)] for _ in range(self.num_chains)]

    def add_up(self, e: Emitter, chains: list[list[Variable]]) -> list[Any]:
        """Return the chains' sum for each vector of columns."""
        rows = [[each.value for each in chain] for chain in chains]
        while len(rows) > 1:
            halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
            rows = [[e.ir.fadd(a, b) for a, b in zip(*pair, strict=True)] for pair in zip(*halves, strict=True)]
        return rows[0]

    def fetch(self, e: Emitter, following: Any, first: Any, share: int = 0, shares: int = 1) -> None:
        """Begin to read a piece of the part at `following`: the piece for the step at key `first` of a loop over keys.

        If `shares` loops divide the reading among them, this one reads only its share.
        """
        start = e.sum(share * self.part_size // shares, e.product(first, self.columns // shares))
        for offset in range(0, self.num_chains * self.columns // shares, CACHE_LINE // 4):
            e.prefetch(following, F32, start, offset)
