"""Matmuls by quantized weights on TPUs, in one Pallas call on the codes of all layers.

Plain XLA fuses the widening of weights with one scale for each output into the matmul, and needs no kernel for these.
Scales of groups it spreads over all inputs in memory, in float32, or it writes the widened weights out.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels.weights.held import Quantized

from ..xla import finish
from .few import multiply_few
from .kernel import multiply
from .options import pallas_options
from .sizes import FEW_ROWS, LANES, Sizes, choose_sizes

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
    """See `Linear`; all rows are multiplied. `interpret` runs the kernel on a CPU, in Pallas' simulation of a TPU.

    `sizes` is for tests; by default they follow from the shapes.
    """
    del num_rows
    if len(x_ti) <= FEW_ROWS and x_ti.dtype == jnp.bfloat16 and sizes is None:
        product_to = multiply_few(x_ti, weight, layer, interpret=interpret).astype(out_dtype)
    else:
        sizes = sizes or choose_sizes(len(x_ti), *weight.shape[1:], x_ti.dtype)
        product_to = _multiply(x_ti, weight, layer, out_dtype, sizes, interpret=interpret)
    return finish(product_to, activation, plus_to, bias_o, is_gated=is_gated)


def _multiply(
    x_ti: Array, weight: Quantized, layer: Array | int, out_dtype: DTypeLike, sizes: Sizes, *, interpret: bool
) -> Array:
    (t, i), o, form = x_ti.shape, weight.shape[1], weight.format
    names = form.parts
    # A TPU's kernels take no float16.
    parts = {
        name: lax.bitcast_convert_type(x, jnp.int16) if x.dtype == jnp.float16 else x
        for name, x in weight.parts.items()
    }

    def block(name: str) -> pl.BlockSpec:
        if name == "codes":
            return pl.BlockSpec((None, sizes.outputs, i), lambda column, _, place: (place[0], column, 0))
        return pl.BlockSpec((sizes.outputs, parts[name].shape[1]), lambda column, _row, _place: (column, 0))

    def body(_: Any, x: Any, *refs: Any) -> None:
        given, (y, weights, *spread) = refs[: len(names)], refs[len(names) :]
        multiply(x, y, weights, dict(zip(names, given, strict=True)), dict(zip(names[1:], spread, strict=True)), form)

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(o, sizes.outputs), pl.cdiv(t, sizes.rows)),
            in_specs=[pl.BlockSpec((sizes.rows, i), lambda _c, row, _p: (row, 0)), *map(block, names)],
            out_specs=pl.BlockSpec((sizes.rows, sizes.outputs), lambda column, row, _: (row, column)),
            scratch_shapes=[
                pltpu.VMEM((sizes.outputs, i), x_ti.dtype),
                *(
                    pltpu.VMEM((sizes.outputs, -(-parts[name].shape[2] // LANES) * LANES), jnp.float32)
                    for name in names[1:]
                ),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((t, o), out_dtype),
        name="quantized_linear",
        **pallas_options(interpret),
    )(jnp.asarray(layer, jnp.int32).reshape(1), x_ti, *(parts[name] for name in names))


def _as_integers(part: Array) -> Array:
    """Return the bits of a float16, which a TPU's kernels do not take, and others as they are."""
    return lax.bitcast_convert_type(part, jnp.int16) if part.dtype == jnp.float16 else part
