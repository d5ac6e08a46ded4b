"""Split decode has this second half: it puts together what the splits of a row made of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from .common import LOG2_E, LOWEST, TINY, WARPGROUP_LANES, compiler_params, interpret_params
from .splits import DecodeWork

# Parts of a row combined at a time, their loads in flight together.
COMBINED = 4


def combine_splits(
    parts: Array,
    logs: Array,
    work: DecodeWork,
    sinks_n: Array | None,
    shape: tuple[int, int, int, int],
    dtype: DTypeLike,
    interpret: bool,
) -> Array:
    """Add up the parts of every row, in order. Returns [s, k, g, h], which is `shape`.

    Args:
      parts: what decode made of item i in its p-th group of consumers, normalised, float32 [i, p, k, g, h].
      logs: base-2 logarithms of what they weigh, float32 [i, p, k, 64].
      work: which items are whose.
      sinks_n: one more score per query head.
      shape: (s, k, g, h).
      dtype: of the result.
      interpret: run in the interpreter.
    """
    s, k, g, h = shape
    # A warpgroup holds a vector of at least 128 numbers: two heads of 64.
    heads = max(1, WARPGROUP_LANES // h)
    steps = -(-g // heads)
    operands = [parts.reshape(*parts.shape[:3], -1), logs, work.firsts_s, work.lasts_s]
    if sinks_n is not None:
        sinks_kg = sinks_n.astype(jnp.float32).reshape(k, g) * LOG2_E
        operands.append(jnp.pad(sinks_kg, ((0, 0), (0, steps * heads - g))))
    kernel = plgpu.kernel(
        partial(_combine_kernel, h=h, heads=heads),
        out_type=jax.ShapeDtypeStruct((s, k, steps * heads * h), dtype),
        grid=(steps, k, s),
        grid_names=("heads", "kv_head", "seq"),
        kernel_name="combine_splits",
        compiler_params=compiler_params(),
        interpret=interpret_params(interpret),
    )
    return kernel(*operands).reshape(s, k, steps * heads, h)[:, :, :g]


def _combine_kernel(parts, logs, firsts_s, lasts_s, *sinks_and_out, h: int, heads: int):
    """Combine the parts of `heads` query heads of one kv head of one row; e counts those heads."""
    *sinks_kg, out_skc = sinks_and_out
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

    def add(i, state):
        max_e, sum_e, acc = state
        some = [i * COMBINED + j for j in range(COMBINED)]
        # Past the last part comes the last one again, with no weight.
        indices = [lax.min(part, num_parts - 1) for part in some]
        places = [(first + lax.div(index, consumers), lax.rem(index, consumers), head) for index in indices]
        values = [plgpu.load(parts.at[*place, columns], layout=layout) for place in places]
        logs_pe = [
            [jnp.where(part < num_parts, logs[*place, step * heads + e], 2 * LOWEST) for e in range(heads)]
            for part, place in zip(some, places, strict=True)
        ]
        new_max_e = [reduce(jnp.maximum, (logs_e[e] for logs_e in logs_pe), max_e[e]) for e in range(heads)]
        decay_e = [jnp.exp2(old - new) for old, new in zip(max_e, new_max_e, strict=True)]
        sum_e = [total * decay for total, decay in zip(sum_e, decay_e, strict=True)]
        acc *= spread(decay_e)
        for logs_e, value in zip(logs_pe, values, strict=True):
            weight_e = [jnp.exp2(log - new) for log, new in zip(logs_e, new_max_e, strict=True)]
            sum_e = [total + weight for total, weight in zip(sum_e, weight_e, strict=True)]
            acc += value * spread(weight_e)
        return tuple(new_max_e), tuple(sum_e), acc

    nothing = (jnp.float32(LOWEST),) * heads, (jnp.float32(0),) * heads, spread([jnp.float32(0)])
    max_e, sum_e, acc = lax.fori_loop(0, lax.div(num_parts + (COMBINED - 1), COMBINED), add, nothing)
    if sinks_kg:
        # A sink has a weight and no value.
        sink_e = [sinks_kg[0][head, step * heads + e] for e in range(heads)]
        new_max_e = [jnp.maximum(*pair) for pair in zip(max_e, sink_e, strict=True)]
        decay_e = [jnp.exp2(old - new) for old, new in zip(max_e, new_max_e, strict=True)]
        sum_e = [
            total * decay + jnp.exp2(sink - new)
            for total, decay, sink, new in zip(sum_e, decay_e, sink_e, new_max_e, strict=True)
        ]
        acc *= spread(decay_e)
    out_skc[seq, head, columns] = (acc * spread([1.0 / jnp.maximum(total, TINY) for total in sum_e])).astype(
        out_skc.dtype
    )
