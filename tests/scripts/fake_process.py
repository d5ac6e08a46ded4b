"""A stand-in for a `Worker`; subclasses give the answers to its calls."""

from __future__ import annotations

from typing import Self

from peers.worker import Worker


class FakeProcess(Worker):
    """A process that was started at second 10 of the machine's clock."""

    def __init__(self) -> None:
        self._name, self.spawned = "X", 10.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass
