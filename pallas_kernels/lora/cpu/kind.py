"""The kind of a kernel: what it is compiled for. All kinds share the sizes that they can take."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

STEP_BYTES = 64
"""The number of bytes of a row of A that the kernel takes at a time."""
COLUMNS = 4
"""The number of rows of A that are multiplied at a time."""
MAX_COLUMNS = 2048
"""The most rows of A that a slot has."""


class Kind(NamedTuple):
    """The dtypes that a kernel is compiled for, and whether it adds to an array or makes a new one."""

    dtype: DTypeLike
    """The dtype of x, A and B."""
    out_dtype: DTypeLike
    adds: bool

    @property
    def name(self) -> str:
        """Return a name for the kernel."""
        dtypes = (jnp.dtype(dtype).name for dtype in (self.dtype, self.out_dtype))
        return "_".join(("lora", *dtypes, "adds" if self.adds else "makes"))
