"""A kernel is made for a kind; all kinds share the sizes that they can take."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

STEP_BYTES = 64
"""The kernel takes so much of a row of A at a time."""
COLUMNS = 4
"""How many rows of A are multiplied at a time."""
MAX_COLUMNS = 2048
"""The most rows of A that a slot has."""


class Kind(NamedTuple):
    """The dtypes that a kernel is made for, and whether it adds to an array or makes a new one."""

    dtype: DTypeLike
    """The dtype of x, A and B."""
    out_dtype: DTypeLike
    adds: bool

    @property
    def name(self) -> str:
        """Return a name for the kernel."""
        dtypes = (jnp.dtype(dtype).name for dtype in (self.dtype, self.out_dtype))
        return "_".join(("lora", *dtypes, "adds" if self.adds else "makes"))
