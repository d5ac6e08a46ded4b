"""Attention over latents on Hopper GPUs, in Mosaic GPU.

Latents are written into the pool in place (`write.py`). Then one kernel (`attend.py`) attends longer chunks, and a
second call of it decodes. Contexts of decodes are split over thread blocks and merged as in paged attention. In sparse
attention one call attends all rows. No other operation runs between the kernels but what turns bits of chosen positions
into slots, without loops, so an unrolled model stays one command buffer.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention import NO_WINDOW, AttentionBatch, Tiles
from pallas_kernels.paged_attention.gpu.combine import combine_splits
from pallas_kernels.paged_attention.gpu.common import num_workers
from pallas_kernels.paged_attention.gpu.splits import SplitRule, decode_work

from ..layout import LatentPool
from .attend import Config, Work, attend, fill_smem
from .chosen import chosen_slots, chosen_work
from .sizes import TILE, divide_heads, gpu_tiles, split_rule
from .write import write_latents

__all__ = ["chosen_attention", "decode_attention", "gpu_latent_attention", "gpu_tiles", "prefill_attention"]


def gpu_latent_attention(
    q_tnh: Array,
    latents_th: Array,
    kv_pool: LatentPool,
    batch: AttentionBatch,
    *,
    layer: Array | int,
    num_layers: int,
    scale: float,
    latent_dim: int,
    tiles: Tiles,
    interpret: bool = False,
    num_cores: int | None = None,
    chosen_tw: Array | None = None,
    top_k: int | None = None,
) -> tuple[Array, LatentPool]:
    """See `LatentAttention`. `interpret` runs the kernels on a CPU, in an interpreter that looks for races.

    `num_cores` is the number of the GPU's multiprocessors.
    """
    del tiles
    common: dict[str, Any] = {"layer": layer, "num_layers": num_layers, "interpret": interpret}
    rows = jax.ShapeDtypeStruct((*q_tnh.shape[:2], latent_dim), q_tnh.dtype)
    out_tnl, kv_pool = write_latents(latents_th, kv_pool, batch.slots_t, rows, **common)
    assert out_tnl is not None
    settings: dict[str, Any] = common | {"scale": scale, "num_cores": num_cores}
    if chosen_tw is not None:
        assert top_k is not None
        return chosen_attention(q_tnh, kv_pool, batch, out_tnl, chosen_tw, top_k=top_k, **settings), kv_pool
    if batch.tile_seqs_i.shape[0]:
        out_tnl = prefill_attention(q_tnh, kv_pool, batch, out_tnl, **settings)
    return decode_attention(q_tnh, kv_pool, batch, out_tnl, **settings), kv_pool


def prefill_attention(
    q_tnh: Array,
    kv_pool: LatentPool,
    batch: AttentionBatch,
    out_tnl: Array,
    *,
    layer: Array | int,
    num_layers: int,
    scale: float,
    interpret: bool = False,
    num_cores: int | None = None,
) -> Array:
    """Return `out_tnl` with the results of the rows of the batch's tiles; the step's latents are in the pool.

    Tiles are of `gpu_tiles`. A row's result depends on its sequence and position only, to the bit: tiles of latents are
    cut from position 0, and each row of a wgmma is summed for itself. Rows behind a sequence's end, to the end of its
    last tile, become finite.
    """
    t, n, h = q_tnh.shape
    heads, latent_dim = divide_heads(n), out_tnl.shape[2]
    config = Config(latent_dim, heads.groups, heads.size, heads.rows, scale, is_split=False, interpret=interpret)
    config = config._replace(workers=num_workers(num_cores, interpret))
    out_vl = jax.new_ref(out_tnl.reshape(t * n, latent_dim))
    _attend(q_tnh.reshape(t * n, h), kv_pool, batch, _tile_work(batch, heads.rows), out_vl, config, layer, num_layers)
    return jax.freeze(out_vl).reshape(out_tnl.shape)


def decode_attention(
    q_tnh: Array,
    kv_pool: LatentPool,
    batch: AttentionBatch,
    out_tnl: Array,
    *,
    layer: Array | int,
    num_layers: int,
    scale: float,
    rule: SplitRule | None = None,
    interpret: bool = False,
    num_cores: int | None = None,
) -> Array:
    """Return `out_tnl` with the results of the leading decode rows; the step's latents are in the pool.

    `rule` sets how contexts are split; by default the number of rows does. A row's result is bitwise the same in every
    batch of arrays of these shapes. It is not bitwise that of a chunk, whose rows are summed in one pass.
    """
    (t, n, h), latent_dim = q_tnh.shape, out_tnl.shape[2]
    heads, (s, max_blocks) = divide_heads(n), batch.block_tables_sm.shape
    rule = split_rule(s, heads, latent_dim) if rule is None else rule
    splits = decode_work(batch, rule, TILE, NO_WINDOW, max_blocks * kv_pool.latents.shape[1])
    work = Work(splits.seqs_i, splits.seqs_i, splits.starts_i, splits.ends_i, splits.ends_i, splits.lasts_s)
    q_vh = q_tnh.reshape(t * n, h)
    if heads.padded > heads.size:
        # At most the first s rows are decodes.
        q_rkgh = q_tnh[:s].reshape(-1, heads.groups, heads.size, h)
        q_vh = jnp.pad(q_rkgh, ((0, 0), (0, 0), (0, heads.padded - heads.size), (0, 0))).reshape(-1, h)
    config = Config(latent_dim, heads.groups, heads.padded, 1, scale, is_split=True, interpret=interpret)
    config = config._replace(workers=num_workers(num_cores, interpret))
    parts, logs = _attend(q_vh, kv_pool, batch, work, None, config, layer, num_layers)
    out_tc = jax.new_ref(out_tnl.reshape(t, n * latent_dim))
    combine_splits(parts, logs, splits, None, out_tc, interpret)
    return jax.freeze(out_tc).reshape(out_tnl.shape)


def chosen_attention(
    q_tnh: Array,
    kv_pool: LatentPool,
    batch: AttentionBatch,
    out_tnl: Array,
    chosen_tw: Array,
    *,
    top_k: int,
    layer: Array | int,
    num_layers: int,
    scale: float,
    interpret: bool = False,
    num_cores: int | None = None,
) -> Array:
    """Return `out_tnl` with the results of all rows, at their chosen positions; the step's latents are in the pool.

    In steps of few rows a row's positions are split over thread blocks. A row has the same bits in every batch of
    arrays of these shapes.
    """
    (t, n, h), [pool], latent_dim = q_tnh.shape, kv_pool, out_tnl.shape[2]
    heads = divide_heads(n)
    slots = chosen_slots(chosen_tw, batch, top_k, pool.shape[1], layer * (len(pool) // num_layers))
    work, splits = chosen_work(slots, batch, heads.groups, pool.shape[1])
    config = Config(latent_dim, heads.groups, heads.size, 1, scale, splits is not None, interpret, is_chosen=True)
    config = config._replace(workers=num_workers(num_cores, interpret), kv_dtype=pool.dtype)
    out_tc = jax.new_ref(out_tnl.reshape(-1, n * latent_dim if splits else latent_dim))
    q_vh, by_slots, out_vl = q_tnh.reshape(t * n, h), pool.reshape(-1, 1, h), None if splits else out_tc
    results = attend(q_vh, by_slots, (slots.slots_tk,), work, out_vl, fill_smem(config, h))
    if splits:
        parts, logs = results
        combine_splits(parts, logs, splits, None, out_tc, interpret)
    return jax.freeze(out_tc).reshape(out_tnl.shape)


def _tile_work(batch: AttentionBatch, rows: int) -> Work:
    """Return the tiles as work items, the last ones first: they see the most, and should not start last."""
    tiles_i = jnp.maximum(batch.num_tiles - 1 - jnp.arange(batch.tile_seqs_i.shape[0], dtype=jnp.int32), 0)
    seqs_i, rows_i = batch.tile_seqs_i[tiles_i], batch.tile_rows_i[tiles_i]
    row_ends_i = batch.query_ends_s[seqs_i]
    # A row's position in its sequence, less the row.
    shifts_i = batch.context_lens_s[seqs_i] - row_ends_i
    return Work(
        seqs_i,
        rows_i,
        jnp.zeros_like(rows_i),
        jnp.minimum(rows_i + rows, row_ends_i) + shifts_i,
        rows_i + shifts_i + 1,
        batch.num_tiles.reshape(1),
    )


def _attend(
    q_vh: Array,
    kv_pool: LatentPool,
    batch: AttentionBatch,
    work: Work,
    out_vl: Any,
    config: Config,
    layer: Array | int,
    num_layers: int,
) -> tuple[Array, ...]:
    pool = kv_pool.latents
    config = fill_smem(config._replace(kv_dtype=pool.dtype), pool.shape[2])
    first_row = jnp.asarray(layer * (len(pool) // num_layers), jnp.int32).reshape(1)
    return attend(q_vh, pool, (batch.block_tables_sm, first_row), work, out_vl, config)
