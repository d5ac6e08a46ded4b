"""Matmuls by quantized weights on TPUs, in one Pallas call on the codes of all layers.

Plain XLA fuses the widening of weights with one scale for each output into the matmul, and needs no kernel for these.
Scales of groups it spreads over all inputs in memory, in float32, or it writes the widened weights out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels.weights import WeightFormat

from .kernel import LANES, multiply
from .sizes import VMEM_LIMIT, Sizes, choose_sizes

__all__ = ["tpu_product"]


def tpu_product(
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
      x_ti: bfloat16 or float32.
      parts: the weights of all layers, [l, o, width] by name; 4-bit codes are uint4, others have a byte each.
      form: the weights' format, with groups.
      layer: index of the layer, may be traced.
      out_dtype: the result's dtype.
      interpret: run the kernel on a CPU, in Pallas' simulation of a TPU.
      sizes: for tests; by default they follow from the shapes.
    """
    (t, i), o = x_ti.shape, parts["codes"].shape[1]
    sizes = sizes or choose_sizes(t, o, i, x_ti.dtype, form)
    names = form.parts
    parts = {name: lax.bitcast_convert_type(x, jnp.int16) if x.dtype == jnp.float16 else x for name, x in parts.items()}

    def block(name: str) -> pl.BlockSpec:
        return pl.BlockSpec((None, sizes.outputs, parts[name].shape[2]), lambda column, _, place: (place[0], column, 0))

    def body(_: Any, x: Any, *refs: Any) -> None:
        given = dict(zip((*names, "y", "weights", *names[1:]), refs, strict=False))
        spread = dict(zip(names[1:], refs[len(names) + 2 :], strict=True))
        multiply(x, given["y"], given["weights"], {name: given[name] for name in names}, spread, form)

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(o, sizes.outputs), pl.cdiv(t, sizes.rows)),
            in_specs=[pl.BlockSpec((sizes.rows, i), lambda _c, row, _p: (row, 0)), *map(block, names)],
            out_specs=pl.BlockSpec((sizes.rows, sizes.outputs), lambda column, row, _: (row, column)),
            scratch_shapes=[
                pltpu.VMEM((sizes.outputs, i), x_ti.dtype),
                *(pltpu.VMEM((sizes.outputs, -(-parts[name].shape[2] // LANES) * LANES), jnp.float32) for name in names[1:]),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((t, o), out_dtype),
        name="quantized_linear",
        **_options(interpret),
    )(jnp.asarray(layer, jnp.int32).reshape(1), x_ti, *(parts[name] for name in names))


def _options(interpret: bool) -> dict[str, Any]:
    if interpret:
        return {"interpret": pltpu.InterpretParams()}
    return {"compiler_params": pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT)}
