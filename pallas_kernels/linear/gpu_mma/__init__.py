"""Matmuls by quantized weights on NVIDIA's GPUs from Ampere on, in Mosaic GPU: RTX 30 to 50, A100, L4, B200 and others.

Codes become bfloat16 in registers, so nothing is widened in device memory. A row's sum runs over its inputs in the same
order whatever the other rows are. From `WIDENED_ROWS` rows on XLA widens a matrix in device memory and multiplies by it
instead, as on Hopper.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.weights.held import Quantized

from ..gpu.operands import as_words, in_kernel_order
from ..gpu.sizes import WIDENED_ROWS
from ..gpu.sums import add_parts
from ..xla import finish, xla_linear
from .kernel import multiply
from .sizes import Sizes, choose_sizes, refusal, words_side_by_side

__all__ = ["Sizes", "choose_sizes", "gpu_mma_linear", "refusal"]


def gpu_mma_linear(
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
    """See `Linear`; all rows are multiplied.

    `interpret` runs the kernel on a CPU, in an interpreter that knows no `mma`. `sizes` is for tests; by default they
    follow from the shapes.
    """
    del num_rows
    (t, i), o = x_ti.shape, weight.shape[1]
    if sizes is None and t >= WIDENED_ROWS:
        out_to = xla_linear(x_ti, weight, layer, out_dtype=out_dtype)
    else:
        sizes = sizes or choose_sizes(t, o, i, weight.format)
        out_to = _multiply(x_ti, weight, layer, jnp.dtype(out_dtype), sizes, interpret=interpret)
    return finish(out_to, activation, plus_to, bias_o, is_gated=is_gated)


def _multiply(
    x_ti: Array, weight: Quantized, layer: Array | int, out_dtype: jnp.dtype, sizes: Sizes, *, interpret: bool
) -> Array:
    form, t = weight.format, len(x_ti)
    padded = jnp.pad(x_ti, ((0, -t % sizes.rows), (0, 0)))
    ordered = in_kernel_order(padded, form, words_side_by_side(form), overlaps=True)
    grouped = {name: weight.parts[name] for name in form.parts[1:]}
    dtype = out_dtype if sizes.is_whole else jnp.dtype(jnp.float32)
    sums_pot = multiply(ordered, as_words(weight), grouped, layer, form, dtype, sizes, interpret=interpret)
    return add_parts(sums_pot, t, weight, layer, out_dtype, by_row=False, is_whole=sizes.is_whole)
