"""Measure contestants in turns, and say how far it has come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from peers.contestants import Contestant


class Run(Protocol):
    """A contestant that can be started with empty caches."""

    @property
    def contestant(self) -> Contestant: ...

    def cold(self) -> dict[str, Any]:
        """Start with empty caches, and return what is measured or compared once, with an empty list of `rounds`."""
        ...


def take_turns[R: Run](
    runs: Sequence[R],
    warm: Callable[[R, Mapping[str, Any]], dict[str, float]],
    *,
    rounds: int,
    compared: str,
    of: str = "",
    after: Callable[[R], object] = lambda _: None,
) -> dict[str, Any]:
    """Start each contestant cold, then all in each round, and return what each run gave, by the contestant's name.

    Args:
      runs: what is started.
      warm: returns a round's figures of a run, given what its cold start gave.
      rounds: how many rounds there are.
      compared: what cold starts compare, in words.
      of: what comes before a contestant's name in what is said.
      after: called after a run's figures are said, in each round.
    """
    results: dict[str, Any] = {}
    for run in runs:
        say(f"{of}{run.contestant.label}: cold start, {compared}")
        results[run.contestant.name] = run.cold()
        say(f"  {results[run.contestant.name]}")
    for number in range(rounds):
        # Another goes first in each round, so that none is always measured after the same one.
        start = number % len(runs)
        for run in [*runs[start:], *runs[:start]]:
            say(f"{of}round {number + 1} of {rounds}: {run.contestant.label}")
            result = results[run.contestant.name]
            figures = warm(run, result)
            result["rounds"].append(figures)
            say("  " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
            after(run)
    return results


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)
