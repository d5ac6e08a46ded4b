"""The convolution on TPUs: XLA convolves, and states go from the pool and back by kernels that move a slot at a time.

XLA's own scatter would transpose the whole pool in each layer, and back. A slot is [rows, 128], the inputs one after
the other in rows that fill tiles: otherwise XLA would lay the pool out in another order than kernels read.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.recurrent_state import StateBatch

from .shape import ConvShape
from .xla import convolve, keep_rows

_TILE_ROWS, _LANES = 16, 128


def tpu_pool_spec(shape: ConvShape, num_layers: int, num_slots: int) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a pool of `num_slots` slots per layer, the null slot counted."""
    rows = (shape.kernel_size - 1) * shape.num_channels // _LANES
    return jax.ShapeDtypeStruct((num_layers * num_slots, -(-rows // _TILE_ROWS) * _TILE_ROWS, _LANES), shape.dtype)


def tpu_refusal(shape: ConvShape) -> str | None:
    """Return why the kernels cannot run a shape, or None if they can."""
    if shape.num_channels % _LANES:
        return f"num_channels must be a multiple of {_LANES}, not {shape.num_channels}"
    if shape.dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype must be bfloat16 or float32, not {jnp.dtype(shape.dtype).name}"
    return None


def tpu_causal_conv(
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
    """See `CausalConv`. `interpret` runs the kernels on a CPU, in Pallas' simulation of a TPU."""
    first_slot = jnp.asarray(layer, jnp.int32) * (len(pool) // num_layers)
    states_s = _read(pool, first_slot + batch.read_slots_s, interpret=interpret)
    kept, (_, c) = len(weight_kc) - 1, x_tc.shape
    rows = kept * c // _LANES
    states_skc = states_s[:, :rows].reshape(len(states_s), kept, c)
    out_tc, state_before = convolve(x_tc, weight_kc, states_skc, batch, bias_c, activation)

    def write(pool: Array, states_ikc: Array, slots_i: Array) -> Array:
        states_i = jnp.pad(states_ikc.reshape(-1, rows, _LANES), ((0, 0), (0, pool.shape[1] - rows), (0, 0)))
        return _write(pool, states_i, first_slot, slots_i, interpret=interpret)

    seqs_s, is_live_s = jnp.arange(len(states_s), dtype=jnp.int32), batch.query_ends_s > batch.query_starts_s
    states = [state_before(ends_s, seqs_s) for ends_s in (batch.query_ends_s, batch.all_save_ends_s)]
    slots = [jnp.where(is_live_s, slots_s, 0) for slots_s in (batch.write_slots_s, batch.save_slots_s)]
    pool = write(pool, jnp.concatenate(states), jnp.concatenate(slots))
    return out_tc, keep_rows(pool, batch, state_before, write)


def _read(pool: Array, slots_s: Array, *, interpret: bool) -> Array:
    """Return the states in slots."""
    state = (None, *pool.shape[1:])
    return pl.pallas_call(
        lambda _slots, source, out: _copy(source, out),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(len(slots_s),),
            in_specs=[pl.BlockSpec(state, lambda i, slots: (slots[i], 0, 0))],
            out_specs=pl.BlockSpec(state, lambda i, _: (i, 0, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((len(slots_s), *pool.shape[1:]), pool.dtype),
        name="causal_conv_read",
        **_options(interpret=interpret),
    )(slots_s, pool)


def _write(pool: Array, states_i: Array, first_slot: Array, slots_i: Array, *, interpret: bool) -> Array:
    """Return the pool with states in their slots, where these are not 0."""
    state = (None, *pool.shape[1:])
    # States that are not written go to the null slot; neither it nor its source moves while it stays the same.
    sources_i = jnp.where(slots_i > 0, jnp.arange(len(slots_i), dtype=jnp.int32), 0)
    return pl.pallas_call(
        lambda _sources, _targets, states, _pool, out: _copy(states, out),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(len(slots_i),),
            in_specs=[
                pl.BlockSpec(state, lambda i, sources, _: (sources[i], 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(state, lambda i, _, targets: (targets[i], 0, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        input_output_aliases={3: 0},
        name="causal_conv_write",
        **_options(interpret=interpret),
    )(sources_i, first_slot + slots_i, states_i, pool)


def _copy(source: Any, target: Any) -> None:
    target[...] = source[...]


def _options(*, interpret: bool) -> dict[str, Any]:
    return {"interpret": pltpu.InterpretParams()} if interpret else {}
