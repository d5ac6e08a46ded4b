"""The host's slots: for each holder one array of bytes, a row for each slot."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np


class HostPool:
    """The content of slots of one holder; slot 0 is not used.

    Memory is taken when a slot is first written. Rows hold a block's part of each array, one after the other.
    """

    def __init__(self, specs: Sequence[jax.ShapeDtypeStruct], num_slots: int) -> None:
        """Make slots for blocks, which are [m, ...] arrays of `specs`, m blocks at a time."""
        self._parts = [(spec.shape[1:], np.dtype(spec.dtype), spec.sharding) for spec in specs]
        self._sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _ in self._parts]
        self._rows = np.empty((1 + num_slots, sum(self._sizes)), np.uint8)

    @staticmethod
    def block_bytes(specs: Sequence[jax.ShapeDtypeStruct]) -> int:
        """Return the bytes of one block."""
        return sum(math.prod(spec.shape[1:]) * np.dtype(spec.dtype).itemsize for spec in specs)

    def row(self, slot: int) -> np.ndarray:
        """Return the memory of a slot, uint8 [n]."""
        return self._rows[slot]

    def write(self, slots: Sequence[int], content: Sequence[jax.Array]) -> None:
        """Keep the first blocks of some content in slots; waits for the device."""
        start = 0
        for array, size in zip(content, self._sizes, strict=True):
            rows = np.ascontiguousarray(np.asarray(array)).view(np.uint8).reshape(len(array), -1)
            for row, slot in enumerate(slots):
                self._rows[slot, start : start + size] = rows[row]
            start += size

    def read(self, slots: Sequence[int], num_blocks: int) -> tuple[jax.Array, ...]:
        """Send the content of slots to the devices, `num_blocks` blocks of it; those after the slots' hold anything."""
        start, arrays = 0, []
        for (shape, dtype, sharding), size in zip(self._parts, self._sizes, strict=True):
            rows = np.empty((num_blocks, size), np.uint8)
            for row, slot in enumerate(slots):
                rows[row] = self._rows[slot, start : start + size]
            arrays.append(jax.device_put(rows.view(dtype).reshape(num_blocks, *shape), sharding))
            start += size
        return tuple(arrays)
