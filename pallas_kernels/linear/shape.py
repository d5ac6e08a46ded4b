"""The facts about a matmul that an implementation needs before it is traced."""

from __future__ import annotations

from typing import NamedTuple

from jax.typing import DTypeLike

from pallas_kernels.weights import WeightFormat

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
"""The activations that kernels can apply, by HF's names."""


class LinearShape(NamedTuple):
    """The sizes and dtypes of one of a model's matmuls."""

    num_outputs: int
    """The rows of the weights: with a gated activation, twice the columns of the result."""
    num_inputs: int
    dtype: DTypeLike
    """The dtype of x."""
    out_dtype: DTypeLike
    format: WeightFormat | None = None
    """The format of the weights; None for weights of x's dtype."""
    activation: str | None = None
    is_gated: bool = True
    """True: the activation of the first half of the columns multiplies the second half. False: all columns are
    activated."""

    @property
    def num_columns(self) -> int:
        """Return the number of columns of the result."""
        return self.num_outputs // 2 if self.activation and self.is_gated else self.num_outputs


def linear_name(form: WeightFormat | None) -> str:
    """Return the name of the matmul by weights of a format, such as "linear of int4/32+mins"."""
    return "linear" if form is None else f"linear of {form.name}"
