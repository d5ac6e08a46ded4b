"""A kernel of `linear` is made for a kind; all kinds share the smallest sizes."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

MIN_ROWS = 4
"""The fewest rows of x; fewer are padded."""
MIN_COLUMNS = 4
STEP_BYTES = 64
"""The kernel takes so much of a row at a time."""
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
"""The activations there are, by HF's names."""
MIN_GATES = 8


class Kind(NamedTuple):
    """The dtypes and the activation that a kernel is made for."""

    dtype: DTypeLike
    """The dtype of x."""
    weight_dtype: DTypeLike
    """The dtype of the weights: that of x, or int8."""
    out_dtype: DTypeLike
    activation: str | None = None
    is_gated: bool = True
    """An activation is that of the first half of the columns, which multiplies the second; False: that of all."""

    @property
    def name(self) -> str:
        """Return a name for the kernel."""
        dtypes = (jnp.dtype(dtype).name for dtype in self[:3])
        activation = [] if self.activation is None else [self.activation, *(() if self.is_gated else ("plain",))]
        return "_".join(("linear", *dtypes, *activation))
