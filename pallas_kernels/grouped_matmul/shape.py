"""What an implementation must know about a matmul before it is traced."""

from __future__ import annotations

from typing import NamedTuple

from jax.typing import DTypeLike

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
"""The activations that kernels can apply, by HF's names."""


class MatmulShape(NamedTuple):
    """The sizes and dtypes of one of a model's grouped matmuls."""

    num_experts: int
    num_outputs: int
    """The rows of an expert's weights: with an activation, twice the number of columns of the result."""
    num_inputs: int
    dtype: DTypeLike
    """The dtype of x."""
    weight_dtype: DTypeLike
    """The dtype of the weights: that of x, or int8."""
    out_dtype: DTypeLike
    activation: str | None = None

    @property
    def num_columns(self) -> int:
        """Return how many columns the result has."""
        return self.num_outputs // 2 if self.activation else self.num_outputs
