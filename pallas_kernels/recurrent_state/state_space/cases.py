"""Named shapes of real models, shared by tests and benchmarks."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from .shape import StateSpaceShape


class Case(NamedTuple):
    """The layers of one model."""

    num_heads: int
    head_dim: int = 64
    num_groups: int = 8
    state_dim: int = 128

    def shape(self, dtype: Any = jnp.bfloat16) -> StateSpaceShape:
        """Return the shape that the op is compiled for."""
        return StateSpaceShape(*self, jnp.dtype(dtype))


CASES: dict[str, Case] = {
    "tiny": Case(4, 48, 2, 32),
    "mamba2-2.7b": Case(80, num_groups=1),
    "nemotron-h-8b": Case(128),
    "nemotron-3-nano-30b-a3b": Case(64),
    "granite-4-h-tiny": Case(48, num_groups=1),
    "granite-4-h-small": Case(128, num_groups=1),
    "falcon-h1-7b": Case(24, 128, 1, 256),
}
