"""Tile sizes. The same for every step, so that a row's sums never depend on its batch."""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """How the XLA path cuts its work."""

    decode: int = 32
    """Decode rows attended together; a group runs as long as its longest row."""
    query: int = 64
    """Query rows of one sequence attended together in prefill."""
    kv: int = 128
    """Tokens of K and V read at a time (at least one block)."""


DEFAULT_TILES = Tiles()
