"""The base of matmul ops: the choice of an implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from .implementations import Implementation, Implementations, load


@dataclass(frozen=True)
class MatmulOp:
    """A matmul op in one implementation."""

    implementations: ClassVar[Implementations]

    implementation: str = "xla"

    @property
    def _entry(self) -> Implementation:
        return self.implementations[self.implementation]

    @property
    def platform(self) -> str | None:
        """Return the platform whose own kernels the implementation is, None for plain XLA."""
        return self._entry.platform

    def refusal(self, shape: Any) -> str | None:
        """Return why the implementation cannot run a matmul, None if it can."""
        return self._entry.refusal(shape)

    def prepare(self, shapes: Sequence[Any], folder: Path | None = None) -> None:
        """Compile and register what programs with these matmuls call, so that this process can load such programs.

        Machine code is kept in `folder`, if it is not None, for other processes.
        """
        for shape in shapes:
            if self._entry.prepare and self.refusal(shape) is None:
                load(self._entry.prepare)(shape, folder)
