"""Matmuls by quantized weights on TPUs, in Pallas calls on the codes of all layers.

Plain XLA fuses the widening of weights with one scale for each output into the matmul, and needs no kernel for these.
With scales of groups it either repeats the scales for all inputs in memory, in float32, or writes the widened weights
out.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.weights.held import Quantized

from ..xla import finish
from .few import multiply_few
from .kernel import multiply_many
from .sizes import FEW_ROWS, Sizes, choose_sizes

__all__ = ["tpu_linear"]


def tpu_linear(
    x_ti: Array,
    weight: Quantized,
    layer: Array | int,
    *,
    out_dtype: DTypeLike,
    num_rows: Array | int | None = None,
    activation: str | None = None,
    is_gated: bool = True,
    plus_to: Array | None = None,
    bias_o: Array | None = None,
    interpret: bool = False,
    sizes: Sizes | None = None,
) -> Array:
    """See `Linear`; all rows are multiplied. Up to 64 rows of bfloat16 are multiplied by weights that are not rounded.

    `interpret` runs the kernel on a CPU, in Pallas' simulation of a TPU. `sizes` is for tests with many rows; by
    default they follow from the shapes.
    """
    del num_rows
    if sizes is None and len(x_ti) <= FEW_ROWS and x_ti.dtype == jnp.bfloat16:
        product_to = multiply_few(x_ti, weight, layer, interpret=interpret).astype(out_dtype)
    else:
        sizes = sizes or choose_sizes(len(x_ti), weight.shape[1], weight.shape[2], x_ti.dtype)
        options = {"out_dtype": out_dtype, "sizes": sizes, "interpret": interpret}
        product_to = multiply_many(x_ti, weight, layer, **options)
    return finish(product_to, activation, plus_to, bias_o, is_gated=is_gated)
