"""What the devices are to do next, as plain arrays: the host that schedules sends the same to every host of a mesh.

A launch holds all that the programs read besides what the devices have already, so hosts that do the same launches in
the same order stay alike. They are encoded by msgspec; an array is its dtype, its shape and its bytes.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np


class StepLaunch(msgspec.Struct, frozen=True, tag=True):
    """A step."""

    program: int
    """The step's program, by its place among those of the model."""
    ints: np.ndarray
    floats: np.ndarray
    rare: list[np.ndarray | None] | None
    """The fields of RareRules, None for one that no row uses; None for all of them where the program reads none."""
    copies: list[np.ndarray]
    """Blocks to copy first, as int32 [group, 2, COPIES]: sources and targets."""
    counts: list[tuple[int, np.ndarray]]
    """Rows of the token counts to write first, uint16 [v], each with its index."""
    is_draft: bool = False
    """True for a step of the draft model."""


class AdapterLaunch(msgspec.Struct, frozen=True, tag=True):
    """An adapter is written into a slot; steps before it read what the slot had."""

    slot: int
    arrays: list[np.ndarray]
    """The leaves of the arrays of one slot."""


type Launch = StepLaunch | AdapterLaunch


def encode_array(value: Any) -> Any:
    """Return an array as msgspec can encode it."""
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} is not part of a launch")
    return value.dtype.name, value.shape, memoryview(np.ascontiguousarray(value).view(np.uint8).reshape(-1))


def decode_array(kind: type, value: Any) -> Any:
    """Return the array that `encode_array` has encoded; it shares the memory of the message."""
    if kind is not np.ndarray:
        raise NotImplementedError(f"{kind.__name__} is not part of a launch")
    dtype, shape, data = value
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
