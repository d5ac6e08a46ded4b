"""Tile sizes are the same for every step of an engine, so that a row's sums never depend on its batch."""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """The sizes by which an implementation cuts its work."""

    decode: int
    """How many decode rows are attended together."""
    query: int
    """How many query rows of one sequence are attended together in prefill."""
    kv: int
    """How many tokens of K and V are read at a time (at least one block)."""


XLA_TILES = Tiles(decode=8, query=64, kv=128)
