"""What a unit of a kernel's work is given: the addresses of a call's operands, and stretches of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pallas_kernels.native.emitter import NULL


class Operands(NamedTuple):
    """The addresses of a call's operands, and its sizes: rows of x, columns of y, and numbers to a sum."""

    x: Any
    w: Any
    """The address of the weights, or of their codes."""
    plus: Any
    """The address of what is added to the product, or NULL."""
    bias: Any
    """The address of a row that is added to each row of the product, or NULL."""
    y: Any
    t: Any
    n: Any
    k: Any
    parts: Sequence[Any] = ()
    """The addresses of what weights consist of besides their codes."""
    scratch: Any = NULL
    """The address of memory that a call's units share, or NULL."""

    @property
    def own(self) -> tuple[Any, ...]:
        """Return what every matmul has: all but parts and scratch."""
        return self[:8]


class Range(NamedTuple):
    """Numbers from one on to before another."""

    start: Any
    stop: Any
