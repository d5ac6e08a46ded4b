"""The kind of a kernel of `linear`: what it is compiled for, and the smallest sizes of kinds that do not round.

`rounding.py` has the sizes of kinds that round.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.weights import WeightFormat
from pallas_kernels.weights.format import CHUNK

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
"""The dtypes of x and of the result that kernels support."""
MIN_ROWS = 4
"""The fewest rows of x; fewer are padded. Kinds that round take any number."""
MIN_COLUMNS = 4
STEP_BYTES = 64
"""The number of bytes of a row that the kernel takes at a time."""
MIN_GATES = 8
_MIN_GROUP = 16
"""The fewest numbers that share a scale: a vector of them."""


class Kind(NamedTuple):
    """The dtypes, the format of the weights and the activation that a kernel is compiled for."""

    dtype: DTypeLike
    """The dtype of x."""
    form: WeightFormat | None
    """The format of the weights; None if they are numbers of x's dtype."""
    out_dtype: DTypeLike
    activation: str | None = None
    is_gated: bool = True
    """True: the activation of the first half of the columns multiplies the second half. False: all columns are
    activated."""
    rounds: bool = False
    """True if rows of x are rounded to 8 bits."""

    @property
    def name(self) -> str:
        """Return a name for the kernel."""
        dtypes = (jnp.dtype(dtype).name for dtype in (self.dtype, self.out_dtype))
        form = () if self.form is None else map(str, astuple(self.form))
        activation = [] if self.activation is None else [self.activation, *(() if self.is_gated else ("plain",))]
        return "_".join(("linear", *dtypes, *form, *activation, *(("rounded",) if self.rounds else ())))


def can_unpack(form: WeightFormat, num_inputs: int) -> bool:
    """Return whether a row of `num_inputs` numbers divides into a format's chunks, groups and groups of factors."""
    if form.group is None:
        return True
    per_chunk, factor_group = CHUNK % form.group == 0 and form.group >= _MIN_GROUP, form.factor_group or form.group
    is_whole = all(num_inputs % each == 0 for each in (CHUNK, form.group, factor_group))
    return (per_chunk or form.group % CHUNK == 0) and factor_group % form.group == 0 and is_whole
