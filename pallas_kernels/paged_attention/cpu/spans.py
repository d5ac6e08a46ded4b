"""Spans of positions: each has a softmax of its own, and the states of a row's spans are merged in order.

A span is a whole number of the kernel's tiles of positions and begins at a multiple of its own length, so that it does
not depend on which rows attend. Where decode rows are few, the spans of a row are attended at the same time on several
cores, and merged by the unit that finishes last; otherwise each is merged as it ends. The result is the same to the
bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.native.emitter import F32, I8, I64, LANES, NULL, POINTER, VOID, Emitter
from pallas_kernels.native.handler import libc

MASKED = float(jnp.finfo(jnp.float32).min)
"""The score of a position that a row does not see."""
SPAN = 256
"""About how many tokens a span has: a core's share of a long context, beside which merging costs little."""
_HEADER_BYTES, _I64_BYTES, _F32_BYTES = 64, 8, 4
"""The header has three integers: the most spans of a row, the spans that a unit attends, and the kv heads of all decode
rows."""


class State(NamedTuple):
    """The addresses of the state of a row's online softmax, or of arrays of states, for several rows."""

    acc: Any
    """The sum of values, each times exp(its score - the largest)."""
    largest: Any
    """The largest score."""
    total: Any
    """The sum of exp(score - the largest)."""

    @staticmethod
    def make(e: Emitter, num_rows: int, head_dim: int) -> State:
        """Return room on the stack for the states of some rows."""
        return State(e.array(F32, num_rows * head_dim), e.array(F32, num_rows), e.array(F32, num_rows))

    def of(self, e: Emitter, row: Any, head_dim: int) -> State:
        """Return the state of one row of several."""
        return State(
            e.at(self.acc, F32, e.product(row, head_dim)), e.at(self.largest, F32, row), e.at(self.total, F32, row)
        )

    def clear(self, e: Emitter, head_dim: int) -> None:
        """Begin without any score."""
        e.store(F32(MASKED), self.largest)
        e.store(F32(0.0), self.total)
        with e.range(0, head_dim, LANES) as i:
            e.store_vector(e.splat(F32(0.0)), self.acc, i)

    def copy(self, e: Emitter, other: State, head_dim: int) -> None:
        """Copy another state into this one."""
        for mine, others in zip(self[1:], other[1:], strict=True):
            e.store(e.load(others, F32), mine)
        with e.range(0, head_dim, LANES) as i:
            e.store_vector(e.load_vector(other.acc, F32, i), self.acc, i)


def merge(e: Emitter, states: Sequence[State], later: Sequence[State], head_dim: int) -> None:
    """Merge a later span's state into that of each of some rows: both are scaled to the larger score, and added."""
    factors = []
    for old, new in zip(states, later, strict=True):
        scores = [e.load(each.largest, F32) for each in (old, new)]
        largest = e.larger(*scores)
        shrink, grow = (e.exp(e.ir.fsub(score, largest)) for score in scores)
        e.store(e.fma(e.load(new.total, F32), grow, e.ir.fmul(e.load(old.total, F32), shrink)), old.total)
        e.store(largest, old.largest)
        factors.append((e.splat(shrink), e.splat(grow)))
    with e.range(0, head_dim, LANES) as i:
        for old, new, (shrink, grow) in zip(states, later, factors, strict=True):
            shrunk = e.ir.fmul(e.load_vector(old.acc, F32, i), shrink)
            e.store_vector(e.fma(e.load_vector(new.acc, F32, i), grow, shrunk), old.acc, i)


class Kept(NamedTuple):
    """How the states of a call lie in memory: one for each query head of each decode row, in each of the row's spans.

    Before them is, for each kv head of each decode row, a count of its units that are done.
    """

    group: int
    """The number of query heads that share a kv head."""
    head_dim: int

    def make(self, e: Emitter, num_kv_rows: Any, num_spans: Any, per_stretch: Any) -> Any:
        """Allocate memory for decode rows times kv heads, with `num_spans` spans at most, and return its address.

        It is NULL if one unit attends all spans, or if there is no memory. One unit attends `per_stretch` spans.
        """
        base = e.variable(POINTER, NULL)
        with e.ir.if_then(e.ir.icmp_signed("<", per_stretch, num_spans)):
            counts = e.product(num_kv_rows, _I64_BYTES)
            states = e.product(num_kv_rows, self.group, num_spans, self._stride, _F32_BYTES)
            size = e.sum(_HEADER_BYTES, counts, states)
            base.value = e.ir.call(libc(e.module, "malloc", POINTER, [I64]), [size])
            with e.ir.if_then(e.ir.icmp_unsigned("!=", base.value, NULL)):
                for index, number in enumerate((num_spans, per_stretch, num_kv_rows)):
                    e.store(number, base.value, index)
                e.clear(self._counts(e, base.value), counts)
        return base.value

    def free(self, e: Emitter, base: Any) -> None:
        """Free the memory, if there is some."""
        e.ir.call(libc(e.module, "free", VOID, [POINTER]), [base])

    def num_stretches(self, e: Emitter, base: Any) -> Any:
        """Return the number of units that attend each kv head of a decode row: one, where nothing is kept."""
        count = e.variable(I64, I64(1))
        with e.ir.if_then(e.ir.icmp_unsigned("!=", base, NULL)):
            count.value = e.ceil_div(e.load(base, I64), self.spans_per_stretch(e, base))
        return count.value

    def spans_per_stretch(self, e: Emitter, base: Any) -> Any:
        """Return the number of spans that one unit attends."""
        return e.load(base, I64, 1)

    def is_last(self, e: Emitter, base: Any, kv_row: Any) -> Any:
        """Count a unit of a decode row's kv head as done, and return whether all are: then all states can be read."""
        before = e.ir.atomic_rmw("add", e.at(self._counts(e, base), I64, kv_row), I64(1), "acq_rel")
        return e.ir.icmp_signed("==", e.sum(before, 1), self.num_stretches(e, base))

    def state(self, e: Emitter, base: Any, head: Any, span: Any) -> State:
        """Return a state: heads are counted through all decode rows, and spans from the first that the row sees."""
        states = e.at(self._counts(e, base), I64, e.load(base, I64, 2))
        address = e.at(states, F32, e.product(e.sum(e.product(head, e.load(base, I64)), span), self._stride))
        return State(address, e.at(address, F32, self.head_dim), e.at(address, F32, self.head_dim + 1))

    def _counts(self, e: Emitter, base: Any) -> Any:
        return e.at(base, I8, _HEADER_BYTES)

    @property
    def _stride(self) -> int:
        return self.head_dim + LANES
