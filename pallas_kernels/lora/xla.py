"""LoRA in plain XLA: two matmuls for all slots, with zeros between for the slots that are not the row's own.

Zeros add nothing, so a row's result does not depend on the adapters of other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from .rows import Rows


def xla_lora(
    x_ti: Array,
    down_lci: Array,
    up_lco: Array,
    layer: Array | int,
    rows: Rows,
    parts: Sequence[int],
    num_slots: int,
    *,
    plus_to: Array | None = None,
    out_dtype: DTypeLike,
) -> Array:
    """See `Lora`."""
    del parts
    precision = lax.Precision.HIGHEST if x_ti.dtype == jnp.float32 else None
    multiply = partial(jnp.einsum, precision=precision)
    down_ci, up_co = (lax.dynamic_index_in_dim(each, layer, keepdims=False) for each in (down_lci, up_lco))
    found_tc = multiply("ti,ci->tc", x_ti, down_ci, preferred_element_type=x_ti.dtype)
    slots_c = 1 + jnp.arange(len(down_ci)) // (len(down_ci) // num_slots)
    own_tc = jnp.where(slots_c == rows.slots_t[:, None], found_tc, 0)
    out_to = multiply("tc,co->to", own_tc, up_co, preferred_element_type=out_dtype)
    return out_to if plus_to is None else plus_to + out_to
