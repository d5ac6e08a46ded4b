"""What ops of matmuls have in common that run what they can, and leave the rest to plain XLA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class MatmulOp:
    """An op of matmuls in one implementation. What that cannot run is left to plain XLA."""

    implementation: str = "xla"

    @property
    def _implementations(self) -> Mapping[str, Any]:
        raise NotImplementedError

    @property
    def _entry(self) -> Any:
        return self._implementations[self.implementation]

    @property
    def platform(self) -> str | None:
        """Return the platform whose own kernels the implementation is, None for plain XLA."""
        return self._entry.platform

    def refusal(self, shape: Any) -> str | None:
        """Say why a matmul is left to plain XLA, None if it is not."""
        return self._entry.refusal(shape)

    def prepare(self, shapes: Sequence[Any], folder: Path | None = None) -> None:
        """Compile and register what programs with these matmuls call, so that this process can load such programs.

        Machine code is kept in `folder`, if given, for other processes.
        """
        for shape in shapes:
            if self.refusal(shape) is None:
                self._entry.prepare(shape, folder)
