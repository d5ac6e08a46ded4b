"""Multiply few rows by exact codes, a group at a time, and scale the sums, which are far fewer than the weights.

Widening weights in VMEM takes several times as long as bringing them; for few rows that would be the whole time. Groups
of fewer inputs than a vector register has lanes share a matmul: rows are repeated for each of its groups, with 0 where
inputs belong to other groups.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.weights.held import Quantized

from .options import pallas_options
from .sizes import CHUNKS_AT_ONCE, LANES, few_outputs
from .values import unit, values

ROW_SLAB = 16
"""Rows are padded to a multiple of this: a tile of bfloat16."""


def multiply_few(x_ti: Array, weight: Quantized, layer: Array | int, *, interpret: bool) -> Array:
    """Return the float32 product [t, o] of bfloat16 rows and a layer's weights, without rounding any weight."""
    form, (t, i), o = weight.format, x_ti.shape, weight.shape[1]
    group = form.group
    assert group is not None
    grouped = weight.map(lambda part: lax.dynamic_index_in_dim(part, layer, keepdims=False))
    scales_og, mins_og = grouped.scales_and_mins()
    if form.offset:
        mins_og = form.offset * scales_og + (0 if mins_og is None else mins_og)
    padded = jnp.pad(x_ti, ((0, -t % ROW_SLAB), (0, 0)))
    per_chunk = max(1, LANES // group)
    group_of_lane = jnp.arange(LANES) * per_chunk // LANES
    x_ctv = padded.reshape(len(padded), -1, LANES).swapaxes(0, 1)
    is_own = group_of_lane == jnp.arange(per_chunk)[:, None]
    x_cjtv = jnp.where(is_own[:, None], x_ctv[:, None], 0).reshape(i // LANES, -1, LANES)
    outputs = few_outputs(o, i)

    def body(_: Any, x: Any, codes: Any, scales: Any, y: Any) -> None:
        def add(chunk: Array, sums: Array) -> Array:
            lanes = pl.ds(pl.multiple_of(chunk * LANES, LANES), LANES)
            weights = values(codes[:, lanes], form, x.dtype)
            products = lax.dot_general(
                x[chunk], weights, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            ).reshape(per_chunk, len(padded), outputs)
            first = chunk * per_chunk if group <= LANES else lax.div(chunk * LANES, group)
            for j in range(per_chunk):
                sums = sums + products[j] * scales[pl.ds(first + j, 1), :]
            return sums

        y[...] = lax.fori_loop(0, i // LANES, add, jnp.zeros(y.shape, jnp.float32), unroll=CHUNKS_AT_ONCE)

    product_to = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(o, outputs),),
            in_specs=[
                pl.BlockSpec(x_cjtv.shape, lambda _column, _: (0, 0, 0)),
                pl.BlockSpec((None, outputs, i), lambda column, layer_ref: (layer_ref[0], column, 0)),
                pl.BlockSpec((scales_og.shape[1], outputs), lambda column, _: (0, column)),
            ],
            out_specs=pl.BlockSpec((len(padded), outputs), lambda column, _: (0, column)),
        ),
        out_shape=jax.ShapeDtypeStruct((len(padded), o), jnp.float32),
        name="quantized_linear_few",
        **pallas_options(interpret),
    )(jnp.asarray(layer, jnp.int32).reshape(1), x_cjtv, weight.codes, unit(form) * scales_og.T)[:t]
    if mins_og is None:
        return product_to
    sums_tg = x_ti.astype(jnp.float32).reshape(t, mins_og.shape[1], -1).sum(2)
    return product_to - jnp.einsum("tg,og->to", sums_tg, mins_og, precision=lax.Precision.HIGHEST)
