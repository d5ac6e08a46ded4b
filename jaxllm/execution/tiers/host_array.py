"""Keep a device's array in the host's memory, and put it back as it was."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax import Array
from jax.experimental.layout import Layout

from jaxllm.loading.load import Piece, assemble


class HostArray:
    """The content of an array, read when this is made: the parts of this process's devices, each one once."""

    def __init__(self, array: Array) -> None:
        self._shape, self._sharding, self._layout = array.shape, array.sharding, _layout_of(array)
        self._pieces = _pieces_of(array)
        self._array: Array | None = None

    def put(self) -> Array:
        """Return the array on its devices, the same one at each call; the host's copy goes with the first."""
        if self._array is None:
            self._array = assemble(self._shape, self._sharding, self._pieces, self._layout)
            self._pieces = ()
        return self._array


class HostArrays:
    """Makes the `HostArray` of each array, one for all trees that share the array."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Array, HostArray]] = {}
        """By the array's id, with the array: an id is that of one array as long as that is held."""

    def of(self, array: Array) -> HostArray:
        """Return the array in the host's memory."""
        if id(array) not in self._made:
            self._made[id(array)] = array, HostArray(array)
        return self._made[id(array)][1]


def _layout_of(array: Array) -> Layout | None:
    """Return the layout that was asked for; None if it is the usual one, by rows."""
    order = array.format.layout.major_to_minor  # pyright: ignore[reportAttributeAccessIssue]
    return None if tuple(order) == tuple(range(array.ndim)) else Layout(major_to_minor=tuple(order))


def _pieces_of(array: Array) -> Sequence[Piece]:
    """Read an array; devices with the same part share its piece."""
    shards: dict[tuple[tuple[int, int], ...], list[jax.Shard]] = {}
    for shard in array.addressable_shards:
        ends = (part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True))
        shards.setdefault(tuple(ends), []).append(shard)
    return [
        Piece(np.asarray(alike[0].data), bounds, tuple(shard.device for shard in alike))
        for bounds, alike in shards.items()
    ]
