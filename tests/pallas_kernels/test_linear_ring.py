"""Threads that meet only where the ring makes them meet read what has been copied, and nothing is copied over it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.linear.gpu_mma.ring import Ring


class Threads:
    """The copies and reads of threads that are as slow or as fast as they may be.

    A thread does something at any time between the meetings before and after it, which are counted.
    """

    def __init__(self, stages: int) -> None:
        self.meetings = 0
        self.groups: list[int | None] = []
        """The piece of each group of copies; None where nothing is copied."""
        self.waited_for = 0
        """The number of groups that a thread has waited for."""
        self.arrived = 0
        """The number of groups that all threads have waited for."""
        self.held: list[tuple[int, int] | None] = [None] * stages
        """The piece of each stage, and the number of its group."""
        self.read_at = [-1] * stages
        """The meeting after which a stage was read last."""
        self.seen: list[int] = []

    def start(self, piece: int, stage: int, end: int) -> None:
        if piece < end:
            assert self.read_at[stage] < self.meetings, f"piece {piece} is copied over one that is still read"
            held = self.held[stage]
            assert held is None or held[1] < self.arrived, "two copies to a stage at a time"
            self.held[stage] = piece, len(self.groups)
        self.groups.append(piece if piece < end else None)

    def wait(self, pending: int) -> None:
        self.waited_for = max(self.waited_for, len(self.groups) - pending)

    def synchronize(self) -> None:
        self.meetings += 1
        self.arrived = self.waited_for

    def read(self, piece: int, stage: int) -> None:
        held = self.held[stage]
        assert held is not None
        assert held[0] == piece
        assert held[1] < self.arrived, f"piece {piece} is read before all threads have copied it"
        self.read_at[stage] = self.meetings
        self.seen.append(piece)


def stream(stages: int, *parts: tuple[int, int]) -> Threads:
    """Return the threads after they have read the pieces of each part, from its first to the one before its end."""
    threads = Threads(stages)
    for first, end in parts:
        ring = Ring(
            stages,
            start=lambda piece, stage, end=end: threads.start(int(piece), int(stage), end),
            wait=threads.wait,
            synchronize=threads.synchronize,
        )

        def read(piece: Any, stage: Any, state: int) -> int:
            threads.read(int(piece), int(stage))
            return state + 1

        with jax.disable_jit():
            assert ring.stream(jnp.int32(first), jnp.int32(end), read, lambda: 0) == end - first
    assert threads.seen == [piece for first, end in parts for piece in range(first, end)]
    return threads


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("num_pieces", range(1, 12))
def test_pieces_are_there_when_they_are_read(num_pieces: int, stages: int) -> None:
    stream(stages, (5, 5 + num_pieces), (5 + num_pieces, 6 + num_pieces), (20, 20 + num_pieces))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_piece_is_copied_while_those_before_it_are_read(stages: int) -> None:
    """Otherwise the ring would hold fewer pieces than it has room for."""
    threads = stream(stages, (0, 9))
    assert len(threads.groups) - threads.waited_for == stages - 1
