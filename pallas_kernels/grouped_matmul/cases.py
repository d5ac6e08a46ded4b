"""Named shapes of real mixtures of experts, shared by tests, compile checks and benchmarks."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.weights import WeightFormat

from .shape import MatmulShape


class Case(NamedTuple):
    """One model's experts: their number, the number that a token chooses, and the sizes of their MLPs."""

    num_experts: int
    num_choices: int
    hidden_size: int
    intermediate_size: int
    activation: str | None = "silu"

    def shapes(self, dtype: Any = jnp.bfloat16, form: WeightFormat | None = None) -> tuple[MatmulShape, MatmulShape]:
        """Return the shapes of both matmuls, gate-and-up and down."""
        dtype = jnp.dtype(dtype)
        d, f = self.hidden_size, self.intermediate_size
        return (
            MatmulShape(self.num_experts, 2 * f, d, dtype, form, dtype, self.activation),
            MatmulShape(self.num_experts, d, f, dtype, form, dtype),
        )


CASES: dict[str, Case] = {
    "qwen3-30b-a3b": Case(128, 8, 2048, 768),
    "mixtral-8x7b": Case(8, 2, 4096, 14336),
    "gpt-oss-20b": Case(32, 4, 2880, 2880, None),
    "gemma-4-26b-a4b": Case(128, 8, 2816, 704, "gelu_pytorch_tanh"),
    "deepseek-v3": Case(256, 8, 7168, 2048),
    "deepseek-v3-of-8": Case(256, 8, 7168, 256),
    "qwen1.5-moe-a2.7b": Case(60, 4, 2048, 1408),
    "small": Case(8, 2, 128, 64),
    "tiny": Case(4, 2, 64, 32),
}
"""The models' cases, and small ones for tests. gpt-oss has an activation of its own, which the op does not apply."""
