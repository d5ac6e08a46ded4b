"""A ring of shared memory, through which pieces stream from device memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

type Start = Callable[[Array, Array], None]
type Read = Callable[[Array, Array, Any], Any]


class Ring(NamedTuple):
    """What fills a ring; each thread copies a part of a piece."""

    stages: int
    """The number of pieces that the ring holds, 2 at least."""
    start: Start
    """Start this thread's copies of a piece to a stage, as one group; if there is no such piece, a group of nothing."""
    wait: Callable[[int], None]
    """Wait for all groups of this thread but as many of the last ones."""
    synchronize: Callable[[], None]
    """Wait for all threads."""

    def stream(self, first: Array, end: Array, read: Read, begin: Callable[[], Any]) -> Any:
        """Return the state after `read(piece, stage, state)` for the pieces from `first` to `end` - 1, in order.

        `begin` returns the state before; it runs while the first pieces are on their way.
        """
        ahead = self.stages - 1

        def stage(piece: Array) -> Array:
            return lax.rem(piece - first, jnp.int32(self.stages))

        def step(piece: Array, state: Any) -> Any:
            # The groups after the piece's own are those of the pieces that follow in the other stages.
            self.wait(ahead - 1)
            # Now all threads' copies are there, and all have read the piece before, whose stage is filled next.
            self.synchronize()
            self.start(piece + ahead, stage(piece + ahead))
            return read(piece, stage(piece), state)

        self.synchronize()  # what the ring held before has been read
        for number in range(ahead):
            self.start(first + number, stage(first + number))
        return lax.fori_loop(first, end, step, begin())
