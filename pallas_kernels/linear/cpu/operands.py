"""The operands of a unit of work: the addresses of a call's arrays, and stretches of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pallas_kernels.native.emitter import NULL


class Operands(NamedTuple):
    """The addresses of a call's arrays, and its sizes: rows of x, columns of y, and the length of a sum."""

    x: Any
    w: Any
    """The address of the weights, or of their codes."""
    plus: Any
    """The address of the addend of the product, or NULL."""
    bias: Any
    """The address of a row that is added to each row of the product, or NULL."""
    y: Any
    t: Any
    n: Any
    k: Any
    parts: Sequence[Any] = ()
    """The addresses of the weights' parts besides their codes."""
    scratch: Any = NULL
    """The address of memory that a call's units share, or NULL."""

    @property
    def own(self) -> tuple[Any, ...]:
        """Return the operands that every matmul has: all but parts and scratch."""
        return self[:8]


class Range(NamedTuple):
    """A range of numbers: the first, and one past the last."""

    start: Any
    stop: Any
