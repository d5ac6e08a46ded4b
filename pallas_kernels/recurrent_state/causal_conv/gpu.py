"""The convolution on Hopper GPUs: one Mosaic kernel for steps of decodes alone; other steps run in plain XLA.

XLA takes any step without a loop, and chunks as fast as a kernel would. But it gathers states, sums up, and scatters
states to each of two slots in separate launches, which take longer than the decodes' work itself.
"""

from __future__ import annotations

from functools import partial, reduce
from operator import add
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.common import LOG2_E, WARPGROUP_LANES, compiler_params, interpret_params
from pallas_kernels.recurrent_state import StateBatch

from .shape import ConvShape
from .xla import xla_causal_conv

_LOAD_BYTES = 16
"""The most bytes that a thread loads at a time."""


def gpu_refusal(shape: ConvShape) -> str | None:
    """Return why the kernels cannot run a shape, or None if they can."""
    if shape.num_channels % 128:
        return f"num_channels must be a multiple of 128, not {shape.num_channels}"
    if shape.dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype must be bfloat16 or float32, not {jnp.dtype(shape.dtype).name}"
    return None


def gpu_causal_conv(
    x_tc: Array,
    weight_kc: Array,
    pool: Array,
    batch: StateBatch,
    *,
    layer: Array | int,
    num_layers: int,
    bias_c: Array | None = None,
    activation: Literal["silu"] | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `CausalConv`. `interpret` runs the kernel on a CPU, in an interpreter that looks for races."""
    if batch.has_chunks:
        layers: dict[str, Any] = {"layer": layer, "num_layers": num_layers}
        return xla_causal_conv(x_tc, weight_kc, pool, batch, **layers, bias_c=bias_c, activation=activation)
    count, num_channels = min(len(batch.query_starts_s), len(x_tc)), x_tc.shape[1]
    first_slot = jnp.asarray(layer, jnp.int32) * (len(pool) // num_layers)
    width = thread_block_channels(num_channels, x_tc.dtype)
    kernel = plgpu.kernel(
        partial(_kernel, width=width, activation=activation),
        out_type=jax.ShapeDtypeStruct((count, num_channels), x_tc.dtype),
        grid=(num_channels // width, count),
        grid_names=("part", "seq"),
        kernel_name="causal_conv_decode",
        compiler_params=compiler_params(),
        interpret=interpret_params(interpret),
    )
    pool_ref = jax.new_ref(pool)
    slots = batch.read_slots_s, batch.write_slots_s, batch.save_slots_s
    scalars = (*slots, batch.num_decodes.reshape(1), first_slot.reshape(1))
    out_tc = kernel(*scalars, pool_ref, x_tc, weight_kc, *(() if bias_c is None else (bias_c,)))
    return jnp.pad(out_tc, [(0, len(x_tc) - count), (0, 0)]), jax.freeze(pool_ref)


def thread_block_channels(num_channels: int, dtype: Any) -> int:
    """Return the number of channels of a thread block: as many as its threads load at once, or a part of them."""
    width = WARPGROUP_LANES * _LOAD_BYTES // jnp.dtype(dtype).itemsize
    while num_channels % width:
        width //= 2
    return width


def _kernel(
    reads_s,
    writes_s,
    saves_s,
    num_decodes,
    first_slot,
    pool,
    x_tc,
    weight_kc,
    *refs,
    width: int,
    activation: str | None,
):
    """Update some channels of a sequence by its token; `refs` are the bias, if there is one, and the output."""
    part, seq = (lax.axis_index(name) for name in ("part", "seq"))
    channels = pl.ds(pl.multiple_of(part * width, width), width)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // WARPGROUP_LANES)
    load = partial(plgpu.load, layout=layout)
    *bias_c, out_tc = refs

    @pl.when(seq >= num_decodes[0])
    def _():
        out_tc[seq, channels] = plgpu.layout_cast(jnp.zeros((width,), out_tc.dtype), layout)

    @pl.when(seq < num_decodes[0])
    def _():
        slot, kept = reads_s[seq], pool.shape[1]
        state = [load(pool.at[first_slot[0] + slot, row, channels]) for row in range(kept)]
        # The null slot may hold NaN.
        goes_on = plgpu.layout_cast(jnp.full((width,), slot, jnp.int32), layout) > 0
        seen = [*(jnp.where(goes_on, x, jnp.zeros_like(x)) for x in state), load(x_tc.at[seq, channels])]
        weights = [load(weight_kc.at[tap, channels]) for tap in range(kept + 1)]
        terms = [load(bias.at[channels]).astype(jnp.float32) for bias in bias_c]
        terms += [x.astype(jnp.float32) * weight.astype(jnp.float32) for x, weight in zip(seen, weights, strict=True)]
        total = reduce(add, terms)
        if activation == "silu":
            total = total / (1.0 + jnp.exp2(total * -LOG2_E))
        out_tc[seq, channels] = total.astype(out_tc.dtype)

        def keep(slot: Array) -> None:
            for row, x in enumerate(seen[1:]):
                pool[first_slot[0] + slot, row, channels] = x

        keep(writes_s[seq])
        pl.when(saves_s[seq] > 0)(lambda: keep(saves_s[seq]))
