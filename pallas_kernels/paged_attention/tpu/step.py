"""Run both kernels of a step, on the same pool in place."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ..layout import AttentionBatch
from . import float8
from .decode import decode_attention
from .options import LANES, Options
from .prefill import prefill_attention


def attend_step(
    q_tkgc: Array,
    new_tkc: Array,
    pool: Array,
    batch: AttentionBatch,
    *,
    layer: Array | int,
    num_layers: int,
    window: Array | int,
    sinks_kg: Array | None = None,
    chosen_tw: Array | None = None,
    options: Options,
) -> tuple[Array, Array]:
    """Write tokens' rows into a pool [l * b, k, o, c] and attend; return [t, k, g, v] and the pool.

    The columns of q are `options.keys`, and those of the result `options.values`. `chosen_tw` has the bits of
    `pallas_kernels.chosen` if `options.has_chosen`.
    """
    if options.unpacks_float8:
        new_tkc = float8.to_be_unpacked(new_tkc)
    l_b, k, o, c = pool.shape
    t, s = len(q_tkgc), len(batch.context_lens_s)
    first_block = jnp.asarray(layer, jnp.int32) * (l_b // num_layers)
    tables = paged_tables(batch.block_tables_sm)
    first_and_window = jnp.stack([first_block, jnp.asarray(window, jnp.int32)])
    # Slabs of rows fill whole tiles of the dtype, so that a DMA can take any number of them. The reshape moves nothing.
    slab = options.slab(pool.dtype)
    slabs = pool.reshape(l_b, k, o // slab, slab, c)

    if chosen_tw is not None:
        chosen_tw = jnp.pad(chosen_tw, ((0, 0), (0, -chosen_tw.shape[1] % LANES)))
    chosen_sw = None if chosen_tw is None else chosen_tw[:s]
    decoded_skgv, slabs = decode_attention(
        q_tkgc[:s], new_tkc[:s], slabs, tables, sinks_kg, chosen_sw, batch, first_and_window, options
    )
    out_tkgv, slabs = prefill_attention(
        q_tkgc, new_tkc, slabs, tables, sinks_kg, chosen_tw, batch, first_and_window, options
    )
    # Rows that no kernel wrote hold arbitrary memory.
    out_tkgv = jnp.where((batch.slots_t > 0)[:, None, None, None], out_tkgv, 0)
    decoded_tkgv = jnp.pad(decoded_skgv, ((0, t - s), (0, 0), (0, 0), (0, 0)))
    is_decode_t = lax.iota(jnp.int32, t) < batch.num_decodes
    return jnp.where(is_decode_t[:, None, None, None], decoded_tkgv, out_tkgv), slabs.reshape(pool.shape)


def paged_tables(block_tables_sm: Array) -> Array:
    """Return the tables [s, m / 128, 128]; a kernel fetches each sequence's own."""
    s, m = block_tables_sm.shape
    return jnp.pad(block_tables_sm, ((0, 0), (0, -m % LANES))).reshape(s, -1, LANES)
