"""Tile sizes. They are the same for every step of an engine, so that a row's sums never depend on its batch."""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """The sizes by which an implementation cuts its work."""

    decode: int
    """The number of decode rows that are attended together."""
    query: int
    """The number of query rows of one sequence that are attended together in prefill."""
    kv: int
    """The number of tokens of K and V that are read at a time (at least one block)."""


XLA_TILES = Tiles(decode=8, query=64, kv=128)
