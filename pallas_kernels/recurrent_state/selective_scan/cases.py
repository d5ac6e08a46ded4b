"""Named shapes of real models, shared by tests and benchmarks."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from .shape import SelectiveScanShape


class Case(NamedTuple):
    """The layers of one model."""

    num_channels: int
    state_dim: int = 16

    def shape(self, dtype: Any = jnp.bfloat16) -> SelectiveScanShape:
        """Return the shape that the op is compiled for."""
        return SelectiveScanShape(*self, jnp.dtype(dtype))


CASES: dict[str, Case] = {
    "tiny": Case(192, 8),
    "mamba-2.8b": Case(5120),
    "falcon-mamba-7b": Case(8192),
    "jamba-mini": Case(8192),
}
