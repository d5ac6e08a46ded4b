"""Matmuls by quantized weights on Hopper GPUs, in one Mosaic GPU kernel on the codes of all layers.

Codes become bfloat16 in registers, so nothing is widened in device memory. A row's sum runs over its inputs in the same
order whatever other rows there are.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.paged_attention.gpu.common import TILED_ROWS
from pallas_kernels.weights import WeightFormat

from .kernel import is_by_row, multiply_tiles
from .sizes import DEPTH, Sizes, choose_sizes, codes_per_word


def gpu_product(
    x_ti: Array,
    parts: Mapping[str, Array],
    form: WeightFormat,
    layer: Array | int,
    *,
    out_dtype: DTypeLike,
    interpret: bool = False,
    sizes: Sizes | None = None,
) -> Array:
    """Return x times the weights of a layer, transposed, [t, o] in `out_dtype`; sums are float32.

    Args:
      x_ti: bfloat16.
      parts: the weights of all layers, [l, o, width] by name; 4-bit codes are uint4, others have a byte each.
      form: the weights' format.
      layer: index of the layer, may be traced.
      out_dtype: the result's dtype.
      interpret: run the kernel on a CPU, in an interpreter that looks for races.
      sizes: for tests; by default they follow from the shapes.
    """
    t, i = x_ti.shape
    codes = parts["codes"]
    num_layers, o, _ = codes.shape
    sizes = sizes or choose_sizes(t, o, i, form)
    if interpret:  # idle thread blocks take their time too
        sizes = sizes._replace(workers=2)
    planes, dtype = codes_per_word(form), out_dtype if sizes.is_whole else jnp.float32
    words = lax.bitcast_convert_type(codes.reshape(num_layers, o, i // planes, planes), jnp.int32)
    padded = jnp.pad(x_ti, ((0, -t % (TILED_ROWS if is_by_row(dtype) else sizes.rows)), (0, 0)))
    x_ptk = padded.reshape(-1, i // (DEPTH * planes), DEPTH, planes).transpose(1, 3, 0, 2).reshape(-1, len(padded), DEPTH)
    grouped = {name: parts[name] for name in form.parts[1:]}
    options = {"out_dtype": dtype, "sizes": sizes, "interpret": interpret}
    y = multiply_tiles(x_ptk, words, grouped, layer, form, **options)
    sums = y[0]
    for part in y[1:]:
        sums = sums + part
    sums = (sums if is_by_row(dtype) else sums.T)[:t]
    if form.group is None and not sizes.is_whole:
        sums = sums * lax.dynamic_index_in_dim(parts["scales"], layer, keepdims=False).T
    return sums.astype(out_dtype)
