"""Paged attention on TPUs: one Pallas call for the decode rows, one for the longer chunks, on the same pool in place.

Both stream K and V through a ring of VMEM buffers (`stream.py`): the work of a call is one flat list of KV tiles, over
all sequences, and the fetch runs ahead of the attention by the length of the ring, so that a short sequence does not
wait for the one before it. A tile starts at a multiple of `Tiles.kv` positions and a row's state is float32
(`softmax.py`), the same in both calls; so the order of a row's sums does not depend on its batch or chunk. The rows
that share its matmuls do: nothing is known yet of TPUs on which that would change a row's bits.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ..layout import AttentionBatch, FusedPool
from ..tiles import Tiles
from . import float8
from .decode import decode_attention
from .options import LANES, Options, tpu_tiles
from .prefill import prefill_attention

__all__ = ["tpu_paged_attention", "tpu_tiles"]


def tpu_paged_attention(
    q_tnh: Array,
    k_tkh: Array,
    v_tkh: Array,
    kv_pool: FusedPool,
    batch: AttentionBatch,
    *,
    layer: Array | int,
    num_layers: int,
    window: Array | int,
    scale: float,
    soft_cap: float | None = None,
    sinks_n: Array | None = None,
    tiles: Tiles,
    architecture: str | None = None,
    interpret: bool = False,
) -> tuple[Array, FusedPool]:
    """See `PagedAttention`. `interpret` runs the kernels on a CPU, in Pallas' simulation of a TPU."""
    t, n, h = q_tnh.shape
    k = k_tkh.shape[1]
    options = Options(
        group=n // k,
        head_dim=h,
        block_size=kv_pool.kv.shape[2],
        scale=scale,
        soft_cap=soft_cap,
        has_sinks=sinks_n is not None,
        has_row_ends=batch.row_ends_t is not None,
        unpacks_float8=kv_pool.kv.dtype == jnp.float8_e4m3fn and architecture in float8.UNPACKED_KINDS,
        tiles=tiles,
        interpret=interpret,
    )
    if options.unpacks_float8:
        k_tkh, v_tkh = float8.to_be_unpacked(k_tkh), float8.to_be_unpacked(v_tkh)
    q_tkgc, new_tkc = _widen(q_tnh, k, options), jnp.concatenate([k_tkh, v_tkh], axis=-1)
    sinks_kg = None if sinks_n is None else sinks_n.reshape(k, n // k)
    first_block = jnp.asarray(layer, jnp.int32) * (kv_pool.kv.shape[0] // num_layers)
    tables = _paged_tables(batch.block_tables_sm)
    place = jnp.stack([first_block, jnp.asarray(window, jnp.int32)])
    # Slabs of rows that fill whole tiles of the dtype: a DMA takes any number of them. The reshape moves nothing.
    l_b, _, o, c = kv_pool.kv.shape
    slab = options.slab(kv_pool.kv.dtype)
    pool = kv_pool.kv.reshape(l_b, k, o // slab, slab, c)

    s = batch.context_lens_s.shape[0]
    decoded_skgc, pool = decode_attention(q_tkgc[:s], new_tkc[:s], pool, tables, sinks_kg, batch, place, options)
    out_tkgc, pool = prefill_attention(q_tkgc, new_tkc, pool, tables, sinks_kg, batch, place, options)
    # Rows that no kernel wrote hold whatever the memory held.
    out_tkgc = jnp.where((batch.slots_t > 0)[:, None, None, None], out_tkgc, 0)
    decoded_tkgc = jnp.pad(decoded_skgc, ((0, t - s), (0, 0), (0, 0), (0, 0)))
    is_decode_t = lax.iota(jnp.int32, t) < batch.num_decodes
    out_tkgc = jnp.where(is_decode_t[:, None, None, None], decoded_tkgc, out_tkgc)
    # Where q was padded, the values are the last h of K and V's columns.
    return out_tkgc[..., -h:].reshape(t, n, h).astype(q_tnh.dtype), FusedPool(pool.reshape(kv_pool.kv.shape))


def _widen(q_tnh: Array, k: int, options: Options) -> Array:
    """Return q [t, k, g, c], with zeros where K and V share a row of lanes: (q | 0) @ (K | V)^T is q @ K^T."""
    t, _, h = q_tnh.shape
    return jnp.pad(q_tnh.reshape(t, k, -1, h), ((0, 0), (0, 0), (0, 0), (0, options.columns - h)))


def _paged_tables(block_tables_sm: Array) -> Array:
    """Return the tables [s, m / 128, 128], of which a kernel fetches a sequence's own."""
    s, m = block_tables_sm.shape
    return jnp.pad(block_tables_sm, ((0, 0), (0, -m % LANES))).reshape(s, -1, LANES)
