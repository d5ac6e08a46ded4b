"""What the two ways of attending have in common: a unit of work, and the tiles of tokens that it goes past."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp

from pallas_kernels.native.emitter import I64, Emitter

MASKED = float(jnp.finfo(jnp.float32).min)
PIECE = 16
"""How many tokens lie one after the other in the pool wherever they begin at a multiple of it."""


class Unit(NamedTuple):
    """A unit of work, some lanes: the heads of one row after those of the other. Arrays of what is kept of each lane.

    Lanes go past the tokens in groups. What a group lacks beyond the last lane is that lane again.
    """

    queries: Any
    acc: Any
    """The sums of latents."""
    largest: Any
    """The largest score so far."""
    sums: Any
    """The sums of probabilities."""
    seen: Any
    """How many tokens each lane sees, as int32."""
    scale: Any
    num_groups: Any


class Tile(NamedTuple):
    """Some tokens of a sequence, from a multiple of the tile's size on."""

    start: Any
    live: Any
    """How many there are that a lane of the unit sees."""
    places: Any
    """An array: the address of each `PIECE` of tokens. That of the last one which is seen stands in for those beyond.
    """
    following: Any
    """An array of the same for the next tile."""
    has_next: Any


class Way(Protocol):
    """A way of attending: how a unit's numbers are laid out, and what is done with them."""

    lanes: int
    """How many lanes are a group."""
    tile: int
    """How many tokens are a tile."""
    acc_step: int
    """How many numbers of the sums `numbers` returns."""

    def make(self, e: Emitter, num_groups: int) -> tuple[Any, Any]:
        """Make room for a unit's queries and sums of latents, and get ready."""
        ...

    def begin(self, e: Emitter, unit: Unit, group: Any, queries: Sequence[Any]) -> None:
        """Lay out a group's queries, which lie at these addresses, and clear its sums of latents."""
        ...

    def attend(self, e: Emitter, unit: Unit, tile: Tile) -> None:
        """Let all groups go past a tile."""
        ...

    def numbers(self, e: Emitter, unit: Unit, group: Any, lane: Any, start: Any) -> list[Any]:
        """Return some of a lane's sums of latents, in order."""
        ...

    def end(self, e: Emitter) -> None:
        """Clean up."""
        ...


@contextmanager
def each_group(e: Emitter, unit: Unit, lanes: int, tile: Tile) -> Iterator[tuple[Any, Any]]:
    """Loop over the groups that see any of a tile, and how many of its tokens each of them sees at most."""
    with e.range(0, unit.num_groups) as group:
        of_last = e.load_int(unit.seen, e.sum(e.product(group, lanes), lanes - 1))
        live = e.least(e.ir.sub(of_last, tile.start), tile.live)
        with e.ir.if_then(e.ir.icmp_signed(">", live, I64(0))):
            yield group, live
