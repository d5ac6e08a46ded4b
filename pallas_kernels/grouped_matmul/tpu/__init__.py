"""The grouped matmul on TPUs, in one Pallas call on the weights of all layers.

A step of few tokens takes as long as one read of the chosen experts' weights; a step of many tokens takes as long as
the matrix units need. A row's sum over all inputs is one matmul, so its order does not depend on other rows. The number
of rows that share the matmul does; whether that can change a row's bits has not been tried on a TPU.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels.linear.xla import ACTIVATIONS
from pallas_kernels.weights.held import Quantized

from ..groups import Groups
from ..spans import cut
from .kernel import Kernel, Operands, SpanRefs, scratch_shapes
from .sizes import ROW_SLAB, SUBLANES, VMEM_LIMIT, Sizes, choose_sizes, weight_slab

__all__ = ["tpu_grouped_matmul"]


def tpu_grouped_matmul(
    x_ri: Array,
    weight: Array | Quantized,
    layer: Array | int,
    groups: Groups,
    *,
    activation: str | None = None,
    out_dtype: DTypeLike,
    interpret: bool = False,
    sizes: Sizes | None = None,
) -> Array:
    """See `GroupedMatmul`. `interpret` runs the kernel on a CPU, in Pallas' simulation of a TPU.

    `sizes` is for tests; by default they follow from the shapes.
    """
    form = weight.format if isinstance(weight, Quantized) else None
    has_groups = form is not None and form.group is not None
    w_leoi = weight.codes if isinstance(weight, Quantized) else weight
    (r, i), (layers, experts, o, _) = x_ri.shape, w_leoi.shape
    parts = 1 if activation is None else 2
    columns, slab = o // parts, weight_slab(w_leoi.dtype)
    sizes = sizes or choose_sizes(r, i, columns, parts, x_ri.dtype, w_leoi.dtype, has_groups=has_groups)
    # Slabs of rows fill whole tiles of the dtype, so that a DMA can take any number of them. The reshapes move nothing,
    # and neither do transpositions of weights and scales that lie transposed.
    x = x_ri.reshape(r // ROW_SLAB, ROW_SLAB, i)
    w = w_leoi.swapaxes(2, 3) if sizes.is_transposed else w_leoi.reshape(layers, experts, o // slab, slab, i)
    scales = None
    if isinstance(weight, Quantized):
        scales = weight.scales.swapaxes(2, 3) if has_groups else _spread(weight.scales[..., 0], layer, sizes)
    spans = _spans(groups, layer, r, sizes.span)
    operands = [operand for operand in (x, w, scales) if operand is not None]

    def kernel(*refs: Any) -> None:
        *inputs, y, scratch = refs
        own_spans, own_operands = SpanRefs(*inputs[: len(spans)]), Operands(*inputs[len(spans) :])
        activate = None if activation is None else ACTIVATIONS[activation]
        Kernel(own_spans, own_operands, y, scratch, sizes, form, activate).run()

    y = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(spans),
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(operands),
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[scratch_shapes(sizes, i, x.dtype, w.dtype, out_dtype, form)],
        ),
        out_shape=jax.ShapeDtypeStruct((r // ROW_SLAB, ROW_SLAB, sizes.padded_columns), out_dtype),
        name="grouped_matmul",
        **_pallas_options(interpret),
    )(*spans, *operands)
    return y.reshape(r, sizes.padded_columns)[:, :columns]


def _spans(groups: Groups, layer: Array | int, num_rows: int, most: int) -> SpanRefs:
    """Return the spans as the kernel reads them."""
    spans = cut(groups, num_rows, ROW_SLAB, most)
    return SpanRefs(
        layer_and_total=jnp.stack([jnp.asarray(layer, jnp.int32), spans.total]),
        experts_n=spans.experts_n,
        first_slabs_n=spans.rows_n // ROW_SLAB,
        num_slabs_n=-(-spans.counts_n // ROW_SLAB),
    )


def _spread(scales_leo: Array, layer: Array | int, sizes: Sizes) -> Array:
    """Return a layer's scales [e, parts, 8, padded columns]: eight equal rows, as many as a copy takes."""
    scales_eo = lax.dynamic_index_in_dim(scales_leo, layer, keepdims=False).astype(jnp.float32)
    scales_epc = scales_eo.reshape(len(scales_eo), sizes.parts, -1)
    scales_epc = jnp.pad(scales_epc, ((0, 0), (0, 0), (0, sizes.padded_columns - scales_epc.shape[-1])))
    return jnp.broadcast_to(scales_epc[:, :, None], (*scales_epc.shape[:2], SUBLANES, sizes.padded_columns))


def _pallas_options(interpret: bool) -> dict[str, Any]:
    if interpret:
        return {"interpret": pltpu.InterpretParams()}
    # Tests in the interpreter find reads and writes out of bounds; the checks cost as much as a copy's start.
    return {"compiler_params": pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT, disable_bounds_checks=True)}
