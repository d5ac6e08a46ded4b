"""The second half of split decode: combine the results of a row's splits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce
from itertools import batched
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .common import LOG2_E, LOWEST, TINY, WARPGROUP_LANES, compiler_params, interpret_params
from .splits import DecodeWork

# The parts of a row that are combined at a time; their loads are in flight together.
_COMBINED = 4
# Up to this number of thread blocks, which leave most of the GPU idle, more loads are in flight together.
_FEW_BLOCKS, _FEW_BLOCKS_LOADS = 512, 16


def heads_at_a_time(head_dim: int) -> int:
    """Return the number of query heads that a thread block combines.

    A warpgroup holds a vector of at least 128 numbers.
    """
    return max(1, WARPGROUP_LANES // head_dim)


def combine_splits(
    parts: Array, logs: Array, work: DecodeWork, sinks_n: Array | None, out_tc: Any, interpret: bool
) -> None:
    """Add up the parts of every decode row, in order.

    Args:
      parts: the normalised result of item i in decode's p-th group of consumers, float32 [i, p, k, g, h]; g is a
        multiple of `heads_at_a_time`, and the query heads that pad it hold anything.
      logs: base-2 logarithms of their weights, float32 [i, p, k, 64].
      work: the items of each row.
      sinks_n: one more score per query head.
      out_tc: a Ref to [t, n * h] that gets the rows; other rows are unchanged.
      interpret: run in the interpreter.
    """
    _, _, k, padded_g, h = parts.shape
    heads, g = heads_at_a_time(h), out_tc.shape[1] // (k * h)
    operands = [parts.reshape(*parts.shape[:3], -1), logs, work.firsts_s, work.lasts_s, out_tc]
    if sinks_n is not None:
        operands.append(sinks_n.astype(jnp.float32))
    grid = (padded_g // heads, k, work.firsts_s.shape[0])
    kernel = plgpu.kernel(
        partial(_combine_kernel, g=g, h=h, has_few_blocks=math.prod(grid) <= _FEW_BLOCKS),
        out_type=(),
        grid=grid,
        grid_names=("heads", "kv_head", "seq"),
        kernel_name="combine_splits",
        scratch_types={} if g == padded_g else {"out_smem": plgpu.SMEM((heads * h,), out_tc.dtype)},
        compiler_params=compiler_params(),
        interpret=interpret_params(interpret),
    )
    kernel(*operands)


def _combine_kernel(
    parts, logs, firsts_s, lasts_s, out_tc, *sinks_n, g: int, h: int, has_few_blocks: bool, out_smem=None
):
    """Combine the parts of some query heads of one kv head of one row; e counts those heads."""
    heads = heads_at_a_time(h)
    step, head, seq = lax.axis_index("heads"), lax.axis_index("kv_head"), lax.axis_index("seq")
    consumers, width = parts.shape[1], heads * h
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // WARPGROUP_LANES)
    columns = pl.ds(step * width, width)
    first = firsts_s[seq]
    num_parts = (lasts_s[seq] - first) * consumers

    def spread(scalars_e: Sequence[Array]) -> Array:
        """Return a vector with each head's number in its columns."""
        result = plgpu.layout_cast(jnp.full((width,), scalars_e[0]), layout)
        for e, scalar in enumerate(scalars_e[1:], 1):
            at = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout)
            result = jnp.where(at >= e * h, scalar, result)
        return result

    def load(part: Array) -> tuple[list[Array], Array]:
        """Return the logarithms of a part's weights, one per head, and its values."""
        # Past the last part the last one comes again, without a weight.
        index = lax.min(part, num_parts - 1)
        at = (first + lax.div(index, consumers), lax.rem(index, consumers), head)
        log_e = [jnp.where(part < num_parts, logs[*at, step * heads + e], 2 * LOWEST) for e in range(heads)]
        return log_e, plgpu.load(parts.at[*at, columns], layout=layout)

    def combine(state, some):
        max_e, sum_e, acc = state
        new_max_e = [reduce(jnp.maximum, (log_e[e] for log_e, _ in some), max_e[e]) for e in range(heads)]
        decay_e = [jnp.exp2(old - new) for old, new in zip(max_e, new_max_e, strict=True)]
        sum_e = [total * decay for total, decay in zip(sum_e, decay_e, strict=True)]
        acc *= spread(decay_e)
        for log_e, value in some:
            weight_e = [jnp.exp2(log - new) for log, new in zip(log_e, new_max_e, strict=True)]
            sum_e = [total + weight for total, weight in zip(sum_e, weight_e, strict=True)]
            acc += value * spread(weight_e)
        return tuple(new_max_e), tuple(sum_e), acc

    def add(start: Array | int, stop: Array, count: int, state):
        """Add the parts from `start` to `stop`, loading `count` at a time."""

        def body(i, state):
            loaded = [load(start + i * count + j) for j in range(count)]
            return reduce(combine, batched(loaded, _COMBINED), state)

        return lax.fori_loop(0, lax.div(stop - start + (count - 1), count), body, state)

    def store(result: Array) -> None:
        """Store the existing heads: with an odd number of heads, half of the last vector is left out."""
        start = head * (g * h) + step * width
        if out_smem is None:
            out_tc[seq, pl.ds(start, width)] = result
            return
        out_smem[...] = result
        plgpu.commit_smem()
        for e in range(heads):
            target = out_tc.at[seq, pl.ds(start + e * h, h)]
            copy = partial(plgpu.copy_smem_to_gmem, out_smem.at[pl.ds(e * h, h)], target)
            pl.when(step * heads + e < g)(copy)
        plgpu.wait_smem_to_gmem(0)

    # Rows that are not decodes have no parts, and are not touched.
    @pl.when(num_parts > 0)
    def _():
        nothing = (jnp.float32(LOWEST),) * heads, (jnp.float32(0),) * heads, spread([jnp.float32(0)])
        start, state = 0, nothing
        if has_few_blocks:
            start = num_parts - lax.rem(num_parts, _FEW_BLOCKS_LOADS)
            state = add(0, start, _FEW_BLOCKS_LOADS, state)
        max_e, sum_e, acc = add(start, num_parts, _COMBINED, state)
        if sinks_n:
            # A sink has a weight and no value.
            sink_e = [sinks_n[0][head * g + lax.min(step * heads + e, g - 1)] * LOG2_E for e in range(heads)]
            new_max_e = [jnp.maximum(*pair) for pair in zip(max_e, sink_e, strict=True)]
            decay_e = [jnp.exp2(old - new) for old, new in zip(max_e, new_max_e, strict=True)]
            sum_e = [
                total * decay + jnp.exp2(sink - new)
                for total, decay, sink, new in zip(sum_e, decay_e, sink_e, new_max_e, strict=True)
            ]
            acc *= spread(decay_e)
        store((acc * spread([1.0 / jnp.maximum(total, TINY) for total in sum_e])).astype(out_tc.dtype))
