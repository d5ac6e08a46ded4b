"""A step's attention in three kernels on the same pool, without a copy, as the kernels of all GPUs are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array

from ..layout import AttentionBatch, FusedPool
from ..rope import Rope
from ..tiles import Tiles
from .write import Queries


class Kernels(NamedTuple):
    """The functions that run the kernels."""

    write: Callable[..., tuple[Queries, FusedPool]]
    decode: Callable[..., None]
    prefill: Callable[..., None]


def call_kernels(
    kernels: Kernels,
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
    rope: Rope | None = None,
    soft_cap: float | None = None,
    sinks_n: Array | None = None,
    tiles: Tiles,
    interpret: bool = False,
) -> tuple[Array, FusedPool]:
    """Rotate and write, attend decodes, and attend longer chunks if the batch has room for tiles; see `PagedAttention`.

    Results replace the rotated queries; rows of neither kernel stay rotated queries. Nothing stands between the
    kernels, and an unrolled model stays one command buffer.
    """
    common: dict[str, Any] = {"layer": layer, "num_layers": num_layers, "interpret": interpret}
    num_rows = batch.context_lens_s.shape[0]
    queries, kv_pool = kernels.write(q_tnh, k_tkh, v_tkh, kv_pool, batch.slots_t, rope, num_rows=num_rows, **common)
    settings = common | {"window": window, "scale": scale, "soft_cap": soft_cap, "sinks_n": sinks_n}
    out_tc = jax.new_ref(queries.all_tc)
    kernels.decode(queries.decode_rkgh, kv_pool, batch, out_tc, **settings)
    if batch.tile_seqs_i.shape[0]:
        kernels.prefill(out_tc, kv_pool, batch, tiles=tiles, **settings)
    return jax.freeze(out_tc).reshape(q_tnh.shape), kv_pool
