"""The second half of split decode: combine the results of a row's splits."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..gpu.common import LOG2_E, LOWEST, TINY, WARPGROUP_LANES, interpret_params
from ..gpu.splits import DecodeWork
from .common import compiler_params

# The parts that are combined at a time; their loads are in flight together.
_COMBINED = 8


def combine_splits(
    parts_ikmh: Array, logs_ikm: Array, work: DecodeWork, sinks_n: Array | None, out_tc: Any, interpret: bool
) -> None:
    """Add up the parts of every decode row, in order.

    Args:
      parts_ikmh: the normalised result of each item; query heads beyond a kv head's hold anything.
      logs_ikm: base-2 logarithms of their weights.
      work: the items of each row.
      sinks_n: one more score per query head.
      out_tc: a Ref to [t, n * h] that gets the rows; other rows are unchanged.
      interpret: run in the interpreter.
    """
    _, k, _, h = parts_ikmh.shape
    n = out_tc.shape[1] // h
    operands = [parts_ikmh, logs_ikm, work.firsts_s, work.lasts_s, out_tc]
    if sinks_n is not None:
        operands.append(sinks_n.astype(jnp.float32))
    kernel = plgpu.kernel(
        partial(_combine_kernel, group=n // k),
        out_type=(),
        grid=(n, work.firsts_s.shape[0]),
        grid_names=("head", "seq"),
        kernel_name="combine_splits",
        compiler_params=compiler_params(),
        interpret=interpret_params(interpret),
    )
    kernel(*operands)


def _combine_kernel(
    parts_ikmh: Any, logs_ikm: Any, firsts_s: Any, lasts_s: Any, out_tc: Any, *sinks_n: Any, group: int
) -> None:
    """Combine the parts of one query head of one row."""
    h = parts_ikmh.shape[3]
    layout = _vector_layout(h)
    head, seq = lax.axis_index("head"), lax.axis_index("seq")
    kv_head, row = lax.div(head, group), lax.rem(head, group)
    first = firsts_s[seq]
    num_parts = lasts_s[seq] - first

    def add(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        largest, total, acc = state
        some = [i * _COMBINED + j for j in range(_COMBINED)]
        # Past the last part the last one comes again, without a weight.
        places = [(first + lax.min(part, num_parts - 1), kv_head, row) for part in some]
        values = [plgpu.load(parts_ikmh.at[place], layout=layout, optimized=False) for place in places]
        logs = [
            jnp.where(part < num_parts, logs_ikm[place], 2 * LOWEST) for part, place in zip(some, places, strict=True)
        ]
        new_largest = largest
        for log in logs:
            new_largest = jnp.maximum(new_largest, log)
        decay = jnp.exp2(largest - new_largest)
        total, acc = total * decay, acc * decay
        for log, value in zip(logs, values, strict=True):
            weight = jnp.exp2(log - new_largest)
            total, acc = total + weight, acc + value * weight
        return new_largest, total, acc

    # Rows that are not decodes have no parts, and are not touched.
    @pl.when(num_parts > 0)
    def _() -> None:
        nothing = plgpu.layout_cast(jnp.zeros((h,), jnp.float32), layout)
        steps = lax.div(num_parts + (_COMBINED - 1), _COMBINED)
        state = jnp.float32(LOWEST), jnp.float32(0), nothing
        largest, total, acc = lax.fori_loop(0, steps, add, state)
        if sinks_n:
            # A sink has a weight and no value.
            sink = sinks_n[0][head] * LOG2_E
            new_largest = jnp.maximum(largest, sink)
            decay = jnp.exp2(largest - new_largest)
            total, acc = total * decay + jnp.exp2(sink - new_largest), acc * decay
        result = (acc * (1.0 / jnp.maximum(total, TINY))).astype(out_tc.dtype)
        out_tc[seq, pl.ds(pl.multiple_of(head * h, h), h)] = result


def _vector_layout(length: int) -> Any:
    """Return the layout of a vector: over all threads if it is long enough, otherwise the same in each warp."""
    if length % WARPGROUP_LANES == 0:
        return plgpu.Layout.WG_STRIDED((length,), vec_size=length // WARPGROUP_LANES)
    tiling = plgpu.Tiling(((64,), (2,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1)
