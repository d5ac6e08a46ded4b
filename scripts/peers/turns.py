"""Measure contestants in turns, and print the progress."""

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
        """Start with empty caches, and return the figures that are measured once, with an empty list of `rounds`."""
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
    """Start each contestant cold, then all in each round, and return each run's figures by the contestant's name.

    Args:
      runs: the runs of all contestants.
      warm: returns a round's figures of a run, given its cold start's figures.
      rounds: how many rounds there are.
      compared: the thing that cold starts compare, in words.
      of: the words before a contestant's name in the progress.
      after: called in each round after a run's figures are printed.
    """
    results: dict[str, Any] = {}
    for run in runs:
        say(f"{of}{run.contestant.label}: cold start, {compared}")
        results[run.contestant.name] = run.cold()
        say(f"  {results[run.contestant.name]}")
    for number in range(rounds):
        # Another one is first in each round, so that none always follows the same one.
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
