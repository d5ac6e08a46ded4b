"""Named shapes of real models, shared by tests and benchmarks."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from .shape import ConvShape


class Case(NamedTuple):
    """The layers of one model."""

    num_channels: int
    kernel_size: int = 4
    activation: Literal["silu"] | None = "silu"
    has_bias: bool = False

    def shape(self, dtype: Any = jnp.bfloat16) -> ConvShape:
        """Return the shape that the op is compiled for."""
        return ConvShape(self.num_channels, self.kernel_size, jnp.dtype(dtype))


CASES: dict[str, Case] = {
    "tiny": Case(48, has_bias=True),
    "tiny-short": Case(544, 3, None),
    "lfm2-1.2b": Case(2048, 3, None),
    "qwen3-next-80b-a3b": Case(8192),
    "qwen3.5-27b": Case(10240),
    "nemotron-h-8b": Case(10240, has_bias=True),
    "granite-4-h-tiny": Case(3328, has_bias=True),
    "granite-4-h-small": Case(8448, has_bias=True),
}
