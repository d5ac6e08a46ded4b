"""Paged attention on TPUs: one Pallas call for the decode rows, one for the longer chunks, on the same pool in place.

Both stream K and V through a ring of VMEM buffers (`stream.py`): the work of a call is one flat list of KV tiles, over
all sequences, and the fetch runs ahead of the attention by the length of the ring, so that a short sequence does not
wait for the one before it. A tile starts at a multiple of `Tiles.kv` positions and a row's state is float32
(`softmax.py`), the same in both calls, so the order of a row's sums does not depend on its batch or chunk. The number
of rows that share its matmuls does; whether that can change a row's bits on a TPU is not known yet.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ..layout import AttentionBatch, FusedPool
from ..tiles import Tiles
from . import float8
from .options import LANES, Options, tpu_tiles
from .step import attend_step

__all__ = ["tpu_paged_attention", "tpu_tiles"]

_WIDE_KINDS = ("TPU v6 lite", "TPU7x")
"""The kinds whose matrix units are 256 x 256; the others' are 128 x 128."""


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
    is_wide = architecture in _WIDE_KINDS and h <= LANES and k % 2 == 0
    # Where K and V share a row of lanes, both take all of it: q is widened with zeros, and (q | 0) @ (K | V)^T is q @
    # K^T.
    shares_lanes = h % LANES != 0
    options = Options(
        name="paged",
        group=n // k,
        keys=slice(0, 2 * h if shares_lanes else h),
        values=slice(0 if shares_lanes else h, 2 * h),
        block_size=kv_pool.kv.shape[2],
        scale=scale,
        soft_cap=soft_cap,
        has_sinks=sinks_n is not None,
        has_row_ends=batch.row_ends_t is not None,
        has_chosen=False,
        has_pairs=is_wide,
        unpacks_float8=float8.is_unpacked(kv_pool.kv.dtype, architecture),
        tiles=tiles,
        interpret=interpret,
    )
    q_tkgc = jnp.pad(q_tnh.reshape(t, k, -1, h), ((0, 0), (0, 0), (0, 0), (0, options.keys.stop - h)))
    out_tkgv, pool = attend_step(
        q_tkgc,
        jnp.concatenate([k_tkh, v_tkh], axis=-1),
        kv_pool.kv,
        batch,
        layer=layer,
        num_layers=num_layers,
        window=window,
        sinks_kg=None if sinks_n is None else sinks_n.reshape(k, n // k),
        options=options,
    )
    # Where q was widened, the values are the last h of K and V's columns.
    return out_tkgv[..., -h:].reshape(t, n, h).astype(q_tnh.dtype), FusedPool(pool)
