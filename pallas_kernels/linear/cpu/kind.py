"""A kernel of `linear` is made for a kind. Here are the smallest sizes of kinds that do not round; `rounding.py` has
those of the others.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.weights import WeightFormat
from pallas_kernels.weights.format import CHUNK

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
"""The dtypes of x and of the result that there are kernels for."""
MIN_ROWS = 4
"""The fewest rows of x; fewer are padded. Kinds that round take any number."""
MIN_COLUMNS = 4
STEP_BYTES = 64
"""The kernel takes so much of a row at a time."""
MIN_GATES = 8
MIN_GROUP = 16
"""The fewest numbers that share a scale: a vector of them."""


class Kind(NamedTuple):
    """The dtypes, the format of the weights and the activation that a kernel is made for."""

    dtype: DTypeLike
    """The dtype of x."""
    form: WeightFormat | None
    """The format of the weights; None if they are numbers of x's dtype."""
    out_dtype: DTypeLike
    activation: str | None = None
    is_gated: bool = True
    """An activation is that of the first half of the columns, which multiplies the second; False: that of all."""
    rounds: bool = False
    """Rows of x are rounded to 8 bits."""

    @property
    def name(self) -> str:
        """Return a name for the kernel."""
        dtypes = (jnp.dtype(dtype).name for dtype in (self.dtype, self.out_dtype))
        form = () if self.form is None else map(str, astuple(self.form))
        activation = [] if self.activation is None else [self.activation, *(() if self.is_gated else ("plain",))]
        return "_".join(("linear", *dtypes, *form, *activation, *(("rounded",) if self.rounds else ())))


def can_unpack(form: WeightFormat, num_inputs: int) -> bool:
    """Say whether rows of so many numbers of a format are whole chunks, groups and groups of factors."""
    if form.group is None:
        return True
    per_chunk, factor_group = CHUNK % form.group == 0 and form.group >= MIN_GROUP, form.factor_group or form.group
    is_whole = all(num_inputs % each == 0 for each in (CHUNK, form.group, factor_group))
    return (per_chunk or form.group % CHUNK == 0) and factor_group % form.group == 0 and is_whole
