"""The facts about a matmul that an implementation needs before it is traced."""

from __future__ import annotations

from typing import NamedTuple

from jax.typing import DTypeLike

from pallas_kernels.weights import WeightFormat

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
"""The activations that kernels can apply, by HF's names."""


class MatmulShape(NamedTuple):
    """The sizes and dtypes of one of a model's grouped matmuls."""

    num_experts: int
    num_outputs: int
    """The rows of an expert's weights: with an activation, twice the columns of the result."""
    num_inputs: int
    dtype: DTypeLike
    """The dtype of x."""
    format: WeightFormat | None
    """How the weights are held; None for weights of x's dtype."""
    out_dtype: DTypeLike
    activation: str | None = None

    @property
    def weight_dtype(self) -> DTypeLike:
        """Return the dtype of the weights, or of their codes."""
        return self.dtype if self.format is None else self.format.code_dtype

    @property
    def num_columns(self) -> int:
        """Return the number of columns of the result."""
        return self.num_outputs // 2 if self.activation else self.num_outputs
