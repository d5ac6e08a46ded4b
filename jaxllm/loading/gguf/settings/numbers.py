"""Read and check the metadata of a GGUF file under its architecture's prefix."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxllm.loading.gguf.file import GGUFFile


class Numbers:
    """The metadata under one architecture's prefix. A missing or malformed value raises ValueError with its key."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self._file = file
        self._arch = arch

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive integer. An array of equal ones, which some files hold per layer, counts as one."""
        value = self.whole(key, default)
        if value <= 0:
            raise ValueError(f"the metadata key {f'{self._arch}.{key}'!r} is not positive")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        """Return an integer of at least 0. An array of equal ones counts as one."""
        full = f"{self._arch}.{key}"
        if self._file.is_array(full):
            values = np.unique(self._file.array(full))
            if values.dtype.kind not in "iu":
                raise ValueError(f"the metadata key {full!r} holds {values.dtype.name}, not integers")
            if len(values) != 1:
                raise ValueError(f"the metadata key {full!r} differs between layers, which is not supported")
            value: int | None = int(values[0])
        else:
            value = self._file.value(full, int, default)
        if value is None:
            raise ValueError(f"the metadata key {full!r} is missing")
        if value < 0:
            raise ValueError(f"the metadata key {full!r} is negative")
        return value

    def largest(self, key: str, default: int | None = None) -> int:
        """Return the largest of one positive integer per layer, where layers without may have 0; or a single one."""
        full = f"{self._arch}.{key}"
        if not self._file.is_array(full):
            return self.count(key, default)
        values = self._file.array(full)
        if values.dtype.kind not in "iu" or values.max(initial=0) <= 0:
            raise ValueError(f"the metadata key {full!r} holds no positive integer")
        return int(values.max())

    def per_layer(self, key: str, num_layers: int) -> list[int]:
        """Return a positive integer for each layer; a file may hold one for all of them."""
        full = f"{self._arch}.{key}"
        if not self._file.is_array(full):
            return [self.count(key)] * num_layers
        values = self._file.array(full).tolist()
        if len(values) < num_layers or not all(isinstance(each, int) and each > 0 for each in values):
            raise ValueError(f"the metadata key {full!r} does not hold a positive integer for each layer")
        return values[:num_layers]

    def number(self, key: str, default: float | None) -> Any:
        """Return a float or `default`."""
        value = self._file.value(f"{self._arch}.{key}", (int, float), default)
        return default if value is None else float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean or `default`."""
        return self._file.value(f"{self._arch}.{key}", bool, default)

    def __contains__(self, key: str) -> bool:
        return f"{self._arch}.{key}" in self._file
