"""The base of both ways to attend: a unit of work, and the tiles of tokens that it goes past."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp

from pallas_kernels.native.emitter import I64, Emitter

MASKED = float(jnp.finfo(jnp.float32).min)
PIECE = 16
"""The number of tokens that lie one after the other in the pool, wherever they begin at a multiple of it."""


class Unit(NamedTuple):
    """A unit of work, some lanes: the heads of one row after those of the other, and arrays of the state of each lane.

    Lanes attend in groups. A group with too few lanes repeats the last one.
    """

    queries: Any
    acc: Any
    """The sums of latents."""
    largest: Any
    """The largest score so far."""
    sums: Any
    """The sums of probabilities."""
    seen: Any
    """The number of tokens that each lane sees, as int32."""
    scale: Any
    num_groups: Any


class Tile(NamedTuple):
    """Some tokens of a sequence, from a multiple of the tile's size on."""

    start: Any
    live: Any
    """The number of them that any lane of the unit sees."""
    places: Any
    """An array: the address of each `PIECE` of tokens. Beyond the last one that is seen, its address is repeated."""
    following: Any
    """An array of the same for the next tile."""
    has_next: Any


class Way(Protocol):
    """A way to attend: how a unit's numbers are laid out and multiplied."""

    lanes: int
    """The number of lanes of a group."""
    tile: int
    """The number of tokens of a tile."""
    acc_step: int
    """The number of sums that `numbers` returns."""

    def make(self, e: Emitter, num_groups: int) -> tuple[Any, Any]:
        """Make room for a unit's queries and sums of latents, and get ready."""
        ...

    def begin(self, e: Emitter, unit: Unit, group: Any, queries: Sequence[Any]) -> None:
        """Lay out a group's queries, which lie at these addresses, and clear its sums of latents."""
        ...

    def attend(self, e: Emitter, unit: Unit, tile: Tile) -> None:
        """Attend a tile with all groups."""
        ...

    def numbers(self, e: Emitter, unit: Unit, group: Any, lane: Any, start: Any) -> list[Any]:
        """Return some of a lane's sums of latents, in order."""
        ...

    def end(self, e: Emitter) -> None:
        """Clean up."""
        ...


@contextmanager
def each_group(e: Emitter, unit: Unit, lanes: int, tile: Tile) -> Iterator[tuple[Any, Any]]:
    """Loop over the groups that see any of a tile, with the most tokens that each of them sees."""
    with e.range(0, unit.num_groups) as group:
        of_last = e.load_int(unit.seen, e.sum(e.product(group, lanes), lanes - 1))
        live = e.least(e.ir.sub(of_last, tile.start), tile.live)
        with e.ir.if_then(e.ir.icmp_signed(">", live, I64(0))):
            yield group, live
