"""How the warpgroups of the attention kernels hand over tiles and results: the way that has run, and its successor.

A mistake in the barriers of a kernel may show on a device alone, so a new way is compiled and interpreted beside the
one that ran right, until it has run too.
"""

from __future__ import annotations

from typing import NamedTuple


class Handover(NamedTuple):
    """Who waits for whom."""

    overlaps: bool
    """Prefill: the product with the next tile's keys runs beside that with a tile's values."""


PROVEN = Handover(overlaps=False)
"""It ran right on an H200."""
NEXT = Handover(overlaps=True)
"""It has run in the interpreter only."""
CHOSEN = PROVEN
"""The way that kernels take, read when they are traced."""
