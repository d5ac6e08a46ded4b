"""A quantized matrix of a checkpoint: its module, and the tensors that store it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jaxllm.loading.checkpoint import Checkpoint, TensorInfo
from jaxllm.loading.quantized.scheme import Layout
from pallas_kernels.weights import WeightFormat


@dataclass(frozen=True)
class Matrix:
    """One quantized matrix of a checkpoint."""

    module: str
    layout: Layout
    info: TensorInfo
    form: WeightFormat | None
    """The format it can be kept in; None if it can only be dequantized."""
    ends: tuple[str, ...]
    """The endings of its tensors' names."""

    @property
    def stored(self) -> list[str]:
        """Return the full names of its tensors."""
        return [self.module + end for end in self.ends]


class StoredTensors(Mapping[str, np.ndarray]):
    """A module's tensors by the endings of their names, read on access; for a stack, those of one expert."""

    def __init__(self, inner: Checkpoint, module: str, ends: tuple[str, ...], index: int | None = None) -> None:
        self._inner, self._module, self._ends, self._index = inner, module, ends, index

    def __getitem__(self, end: str) -> np.ndarray:
        if end not in self._ends:
            raise KeyError(end)
        return self._inner.read(self._module + end, self._index)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ends)

    def __len__(self) -> int:
        return len(self._ends)
