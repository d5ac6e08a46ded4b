"""Tile sizes. The same for every step of an engine, so that a row's sums never depend on its batch."""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """How an implementation cuts its work."""

    decode: int
    """Decode rows attended together."""
    query: int
    """Query rows of one sequence attended together in prefill."""
    kv: int
    """Tokens of K and V read at a time (at least one block)."""


XLA_TILES = Tiles(decode=8, query=64, kv=128)
