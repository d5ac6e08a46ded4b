"""The base of all ways to multiply a unit's rows of x [t, k] by a unit's rows of w [n, k]."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.native.emitter import Emitter
from pallas_kernels.native.number_formats import FORMATS

from .activations import ACTIVATIONS
from .kind import Kind
from .operands import Operands, Range
from .unpack import Plain

UNIT_ROWS = 96
"""The number of rows of x of a unit of work; they stay in a core's cache."""
GATED = 2
"""The halves of w's rows where the result is gated: the gates, and what they gate."""


class Multiplier[F](ABC):
    """Writes the functions that kernels of one kind share; `F` holds the functions that `multiply` calls."""

    has_matrix_unit = False
    """True if the processor's matrix unit multiplies; then w is divided for all stretches of x's rows together."""
    has_scratch = False
    """True if a call has memory that its units share."""

    def __init__(self, kind: Kind, weights: Plain) -> None:
        self.module = ir.Module()
        self.weights = weights
        self.in_format, self.out_format = FORMATS[jnp.dtype(kind.dtype)], FORMATS[jnp.dtype(kind.out_dtype)]
        self.activate = ACTIVATIONS[kind.activation] if kind.activation else None
        self.is_gated = kind.activation is not None and kind.is_gated
        self.parts = GATED if self.is_gated else 1

    def operands(self, e: Emitter, w: Any, parts: Sequence[Any], first: Any, k: Any) -> tuple[Any, list[Any]]:
        """Return the addresses of the weights and of their parts from a row on."""
        return self.weights.at(e, w, first, k), self.weights.parts_at(e, parts, first, k)

    def begin(self, e: Emitter, scratch: Any) -> None:
        """Do what must come before all units; by default nothing."""
        del e, scratch

    @abstractmethod
    def add_tiles(self) -> F:
        """Define the functions that `multiply` calls."""

    @abstractmethod
    def chunk(self, e: Emitter, n: Any, num_parts: Any) -> Any:
        """Return the number of columns of a unit, where each of `num_parts` ranges of n is divided."""

    @abstractmethod
    def multiply(self, e: Emitter, tiles: F, of: Operands, num_rows: Any, rows: Range, columns: Range) -> None:
        """Multiply a unit's rows of x by a unit's rows of w; `num_rows` is the number of all rows of x."""
