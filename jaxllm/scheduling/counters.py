"""Counters of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """The counts since the scheduler was made."""

    num_arrivals: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    num_queries: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
