"""How the warpgroups of the attention kernels hand over tiles and results: the way that has run, and its successor.

A mistake in the barriers of a kernel may show on a device alone, so a new way is compiled and interpreted beside the
one that ran right, until it has run too.
"""

from __future__ import annotations

from typing import NamedTuple


class Handover(NamedTuple):
    """Who waits for whom."""

    splits_tiles: bool
    """Decode: a stage of the ring is the part of a KV tile that one group of consumers attends, and frees alone."""
    merges: bool
    """Decode: two groups' results of an item are merged in shared memory, so that it has one part."""
    overlaps: bool
    """Prefill: the product with the next tile's keys runs beside that with a tile's values."""


PROVEN = Handover(splits_tiles=False, merges=False, overlaps=False)
"""It ran right on an H200."""
NEXT = Handover(splits_tiles=True, merges=True, overlaps=True)
"""It has run in the interpreter only."""
CHOSEN = PROVEN
"""The way that kernels take, read when they are traced."""
