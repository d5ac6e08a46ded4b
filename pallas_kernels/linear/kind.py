"""What a kernel of `linear` is made for, and the smallest sizes that all of them share."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

MIN_ROWS = 4
"""Of x; fewer are padded."""
MIN_COLUMNS = 4
STEP_BYTES = 64
"""The kernel takes so much of a row at a time."""
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
"""By HF's names."""
MIN_GATES = 8


class Kind(NamedTuple):
    """What a kernel is made for."""

    dtype: DTypeLike
    """Of x."""
    weight_dtype: DTypeLike
    """The same, or int8."""
    out_dtype: DTypeLike
    activation: str | None = None

    @property
    def name(self) -> str:
        """XLA's name for it."""
        dtypes = (jnp.dtype(dtype).name for dtype in self[:3])
        return "_".join(("linear", *dtypes, *filter(None, [self.activation])))
