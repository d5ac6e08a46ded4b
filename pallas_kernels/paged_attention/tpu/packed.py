"""Stream short sequences, which share the KV tiles of a kernel's ring.

The sequences of a list are taken in groups; the parts of a tile are their blocks from position 0 on. Groups are fetched
`num_buffers - 1` before they are used, as tiles are in `stream.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from .options import ceil_div, rem
from .stream import BlockCopies, Item, Ring, Span


class Member[T: Item](NamedTuple):
    """A sequence of a group."""

    item: T
    exists: Array
    """False past the end of the list, where the last sequence is taken once more, and nothing may be stored."""
    copies: BlockCopies
    span: Span


@dataclass(frozen=True)
class PackedStream[T: Item]:
    """The sequences of a list, each of at most `num_tokens` tokens."""

    pool: Any
    """[l * b, k, o / slab, slab, c] in HBM."""
    ring: Ring
    num_tokens: int
    num_items: Array
    describe: Callable[[Array], T]
    """A function that reads an item's scalars."""
    block_of: Callable[[T, Array | int], Array]
    """A function that returns a block of an item, of the pool."""
    on_fetch: Callable[[T], None]
    """A function that starts the copies of an item's other data."""

    @property
    def group(self) -> int:
        """Return the number of sequences that share a tile."""
        return self.ring.tile_blocks // self._blocks

    @property
    def _blocks(self) -> int:
        _, _, slabs, slab, _ = self.pool.shape
        return self.num_tokens // (slabs * slab)

    def run(self, on_group: Callable[[Sequence[Member[T]]], None]) -> None:
        """Call `on_group` for each group, once its tile is there."""
        ahead, num_groups = self.ring.semaphores.shape[0] - 1, ceil_div(self.num_items, self.group)
        lax.fori_loop(0, jnp.minimum(ahead, num_groups), lambda i, _: self._fetch(i), None)

        def run_group(i: Array, _: None) -> None:
            pl.when(i + ahead < num_groups)(lambda: self._fetch(i + ahead))
            members = self._members(i)
            for member in members:
                member.copies.wait(member.span)
            on_group(members)

        lax.fori_loop(0, num_groups, run_group, None)

    def for_last(self, count: int, body: Callable[[T], None]) -> None:
        """Call `body` for the sequences among the last `count` places of all groups."""
        first = jnp.maximum(ceil_div(self.num_items, self.group) * self.group - count, 0)
        lax.fori_loop(first, self.num_items, lambda i, _: body(self.describe(i)), None)

    def _members(self, index: Array) -> list[Member[T]]:
        buffer = rem(index, self.ring.semaphores.shape[0])
        members: list[Member[T]] = []
        for i in range(self.group):
            number = index * self.group + i
            item: Any = self.describe(jnp.minimum(number, self.num_items - 1))
            first = buffer * self.ring.tile_blocks + i * self._blocks
            copies = BlockCopies(self.pool, self.ring.buffers, self.ring.semaphores.at[buffer], first, self._blocks)
            span = Span.of(item.first, item.end, 0, self.pool, self._blocks)
            members.append(Member(item._replace(number=number), number < self.num_items, copies, span))
        return members

    def _fetch(self, index: Array) -> None:
        for member in self._members(index):
            self.on_fetch(member.item)
            member.copies.start(member.span, lambda i, item=member.item: self.block_of(item, i))
