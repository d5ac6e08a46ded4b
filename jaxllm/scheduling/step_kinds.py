"""Kinds of steps, which take turns: all requests of a step are of one kind."""

from __future__ import annotations

from collections import Counter

from jaxllm.scheduling.plan import StepKind

_ORDER = tuple(StepKind)


class StepKinds:
    """The kinds of the requests that have not ended, and their turns."""

    def __init__(self) -> None:
        self._counts: Counter[StepKind] = Counter()
        self._last = _ORDER[-1]

    def add(self, kind: StepKind) -> None:
        """Count a request."""
        self._counts[kind] += 1

    def remove(self, kind: StepKind) -> None:
        """Stop counting a request."""
        self._counts[kind] -= 1

    def in_turn(self) -> list[StepKind]:
        """Return the kinds that have requests, the one that has waited longest first."""
        first = _ORDER.index(self._last) + 1
        return [kind for kind in (*_ORDER[first:], *_ORDER[:first]) if self._counts[kind]]

    def has_planned(self, kind: StepKind) -> None:
        """Record that a kind was planned; the others come first next time."""
        self._last = kind

    def check(self, kinds: Counter[StepKind]) -> None:
        """Assert that requests are counted right."""
        assert +self._counts == kinds, "the count of kinds is off"
