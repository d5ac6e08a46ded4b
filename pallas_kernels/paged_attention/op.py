"""What attention over a block pool has in common, whatever the pool holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pallas_kernels.implementations import load
from pallas_kernels.pool_op import PoolOp

from .tiles import XLA_TILES, Tiles


@dataclass(frozen=True)
class PoolAttention(PoolOp):
    """An attention op for one shape in one implementation."""

    @property
    def cuts_pool(self) -> bool:
        """Say whether devices that share out query heads have a part of the pool each; else each has it whole."""
        raise NotImplementedError

    @property
    def is_invariant(self) -> bool:
        """Say whether on a CPU, in bfloat16, a row has the same bits whatever is beside it, decoded or in a chunk."""
        raise NotImplementedError

    @property
    def tiles(self) -> Tiles:
        """Return how the host cuts chunks for it, and how it cuts its work."""
        return load(self._entry.tiles)(self.shape, **self._device) if self._entry.tiles else XLA_TILES

    @property
    def _device(self) -> dict[str, Any]:
        return {"architecture": self.architecture} if self._entry.takes_architecture else {}

    @property
    def row_alignment(self) -> int:
        """Longer chunks must start at a multiple of this row."""
        return self._entry.row_alignment

    @property
    def takes_decodes_alone(self) -> bool:
        """Say whether steps of decodes alone should come without room for tiles: they take less so."""
        return self._entry.takes_decodes_alone
