"""What stands in for a `Worker`, but for the answers to its calls."""

from __future__ import annotations

from typing import Self

from benchmarking.worker import Answer


class FakeProcess:
    """A process that was started at second 10 of the machine's clock."""

    spawned = 10.0

    def seconds_to(self, answer: Answer) -> float:
        return answer.ended - self.spawned

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass
