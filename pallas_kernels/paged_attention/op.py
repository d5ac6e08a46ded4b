"""The base of attention ops over a block pool, whatever the pool holds."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from jax.typing import DTypeLike

from pallas_kernels.implementations import Implementation, load
from pallas_kernels.pool_op import PoolOp

from .tiles import XLA_TILES, Tiles


@dataclass(frozen=True)
class PoolAttention(PoolOp):
    """An attention op for one shape in one implementation."""

    @property
    def cuts_pool(self) -> bool:
        """Return whether devices that divide the query heads divide the pool too; otherwise each has all of it."""
        raise NotImplementedError

    @property
    def is_invariant(self) -> bool:
        """Return whether, on a CPU in bfloat16, a row has the same bits in any batch, decoded or in a chunk."""
        raise NotImplementedError

    @property
    def tiles(self) -> Tiles:
        """Return how the host cuts chunks for it, and how it cuts its work."""
        return load(self._entry.tiles)(self.shape, **self._architecture) if self._entry.tiles else XLA_TILES

    @property
    def _architecture(self) -> dict[str, Any]:
        return {"architecture": self.architecture} if self._entry.takes_architecture else {}

    @property
    def _device(self) -> dict[str, Any]:
        """What the implementation's function takes of the device."""
        return self._architecture | ({"num_cores": self.num_cores} if self._entry.takes_cores else {})

    @property
    def row_alignment(self) -> int:
        """Return the number of rows that the start of a longer chunk must be a multiple of."""
        return self._entry.row_alignment

    @property
    def takes_decodes_alone(self) -> bool:
        """Return whether steps of decodes alone are faster without room for tiles."""
        return self._entry.takes_decodes_alone


class BlockShape(NamedTuple):
    """The form of blocks that hold nothing."""

    block_size: int
    kv_dtype: DTypeLike
    """The dtype that keys and values would have."""


@dataclass(frozen=True)
class NoAttention(PoolAttention):
    """The op of a cache group without layers that read it: its pool has no arrays, and its blocks count tokens.

    Nothing calls it. The implementation is "xla" if the user asked for plain XLA.
    """

    name = "no attention"
    implementations = MappingProxyType({name: Implementation(None, "") for name in ("none", "xla")})

    shape: BlockShape
    implementation: str = "none"
    on_gpu: bool = False

    @property
    def takes_decodes_alone(self) -> bool:
        """Return True on a GPU: layers with recurrent state go through no chunks in such steps, which are shorter."""
        return self.on_gpu

    @property
    def cuts_pool(self) -> bool:
        """Return False: there is nothing to divide."""
        return False

    @property
    def is_invariant(self) -> bool:
        """Return True: no row depends on it."""
        return True

    def pool_spec(self, num_layers: int, num_places: int) -> tuple[()]:
        """Return a pool without arrays."""
        del num_layers, num_places
        return ()

    def missing_kernels(self, platform: str, architecture: str | None = None) -> None:
        """Return None: no kernels are missing."""
        del platform, architecture
