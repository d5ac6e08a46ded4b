"""Matmuls by quantized weights on Hopper GPUs, in one Mosaic GPU kernel on the codes of all layers.

Codes become bfloat16 in registers, so nothing is widened in device memory. A row's sum runs over its inputs in the same
order whatever other rows there are.
"""

from __future__ import annotations

from functools import reduce

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.paged_attention.gpu.common import TILED_ROWS
from pallas_kernels.weights.held import Quantized

from ..xla import finish
from .kernel import is_by_row, multiply_tiles
from .sizes import DEPTH, Sizes, choose_sizes, codes_per_word

__all__ = ["gpu_linear"]


def gpu_linear(
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

    `interpret` runs the kernel on a CPU, in an interpreter that looks for races. `sizes` is for tests; by default they
    follow from the shapes.
    """
    del num_rows
    (t, i), o = x_ti.shape, weight.shape[1]
    sizes = sizes or choose_sizes(t, o, i, weight.format)
    if interpret:  # idle thread blocks take their time too
        sizes = sizes._replace(workers=2)
    product_to = _multiply(x_ti, weight, layer, jnp.dtype(out_dtype), sizes, interpret=interpret)
    return finish(product_to, activation, plus_to, bias_o, is_gated=is_gated)


def _multiply(
    x_ti: Array, weight: Quantized, layer: Array | int, out_dtype: jnp.dtype, sizes: Sizes, *, interpret: bool
) -> Array:
    form, codes, t = weight.format, weight.codes, x_ti.shape[0]
    if weight.is_packed or codes.dtype.itemsize != 1 or (form.bits == 4) != (codes.dtype == jnp.uint4):
        raise ValueError(f"linear: a GPU takes 4-bit codes as uint4 and others a byte each, not {codes.dtype}")
    planes, dtype = codes_per_word(form), out_dtype if sizes.is_whole else jnp.dtype(jnp.float32)
    # The reinterpretation moves nothing.
    words = lax.bitcast_convert_type(codes.reshape(*codes.shape[:2], -1, planes), jnp.int32)
    padded = jnp.pad(x_ti, ((0, -t % (TILED_ROWS if is_by_row(dtype) else sizes.rows)), (0, 0)))
    x_tckj = padded.reshape(len(padded), -1, DEPTH, planes)
    x_ptk = x_tckj.transpose(1, 3, 0, 2).reshape(-1, len(padded), DEPTH)
    grouped = {name: weight.parts[name] for name in form.parts[1:]}
    options = {"out_dtype": dtype, "sizes": sizes, "interpret": interpret}
    y = multiply_tiles(x_ptk, words, grouped, layer, form, **options)
    sums = reduce(jnp.add, list(y))
    sums = (sums if is_by_row(dtype) else sums.T)[:t]
    if form.group is None and not sizes.is_whole:
        sums = sums * lax.dynamic_index_in_dim(weight.scales, layer, keepdims=False).T
    return sums.astype(out_dtype)
