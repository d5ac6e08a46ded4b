"""The indexer of sparse attention on Hopper GPUs, in Mosaic GPU.

Keys are written into the pool in place. Then `score.py` scores the positions that decodes and rows of chunks see, and
`choice.py` chooses among them. No other operation loops, so an unrolled model stays one command buffer.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.chosen import num_words
from pallas_kernels.latent_attention.gpu.write import write_latents
from pallas_kernels.latent_attention.layout import LatentPool
from pallas_kernels.paged_attention import NO_WINDOW, AttentionBatch, Tiles
from pallas_kernels.paged_attention.gpu.common import num_workers
from pallas_kernels.paged_attention.gpu.splits import decode_work

from ..layout import IndexerPool
from .choice import SPAN, WORD_BITS, select
from .score import Config, Work, score
from .sizes import ROW_ALIGNMENT, TILE, rows_at_a_time, rows_together, score_split_rule

_WORDS = SPAN // WORD_BITS


def gpu_indexer(
    q_tnh: Array,
    k_th: Array,
    weights_tn: Array,
    kv_pool: IndexerPool,
    batch: AttentionBatch,
    *,
    layer: Array | int,
    num_layers: int,
    top_k: int,
    tiles: Tiles,
    interpret: bool = False,
    num_cores: int | None = None,
) -> tuple[Array, IndexerPool]:
    """See `Indexer`. `interpret` runs the kernels on a CPU, in an interpreter that looks for races.

    `num_cores` is the number of the GPU's multiprocessors.
    """
    del tiles
    (t, n, h), words = q_tnh.shape, num_words(batch, kv_pool.keys.shape[1])
    fixed: dict[str, Any] = {"layer": layer, "num_layers": num_layers, "interpret": interpret}
    _, [pool] = write_latents(k_th, LatentPool(kv_pool.keys), batch.slots_t, None, **fixed)
    first_block = jnp.asarray(layer * (len(pool) // num_layers), jnp.int32).reshape(1)
    operands = q_tnh.reshape(t * n, h), weights_tn.reshape(t * n), pool, batch.block_tables_sm, first_block
    seen_t = _seen(batch, t)
    columns = -(-words // _WORDS) * SPAN
    count = rows_at_a_time(t, columns)
    pieces = []
    for first in range(0, t, count):
        rows = min(count, t - first)
        scores_rc: Any = jax.ShapeDtypeStruct((-(-rows // ROW_ALIGNMENT) * ROW_ALIGNMENT, columns), jnp.int32)
        for work, together in _works(batch, range(first, first + rows), n, top_k, columns):
            config = Config(n, together, first, interpret, num_workers(num_cores, interpret))
            if isinstance(scores_rc, jax.ShapeDtypeStruct):
                [scores_rc] = score(*operands, work, scores_rc, config)
            else:
                ref = jax.new_ref(scores_rc)
                score(*operands, work, ref, config)
                scores_rc = jax.freeze(ref)
        seen_r = jax.lax.slice_in_dim(seen_t, first, first + rows)
        seen_r = jnp.pad(seen_r, (0, len(scores_rc) - rows))
        chosen_rw = select(scores_rc, seen_r, top_k=top_k, words=columns // WORD_BITS, interpret=interpret)
        pieces.append(chosen_rw[:rows, :words])
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces), IndexerPool(pool)


def _seen(batch: AttentionBatch, t: int) -> Array:
    """Return the number of positions that each row sees; 0 for padding."""
    rows_t1 = jnp.arange(t, dtype=jnp.int32)[:, None]
    is_in_ts = (rows_t1 >= batch.query_starts_s) & (rows_t1 < batch.query_ends_s)
    sees_ts = batch.context_lens_s - batch.query_ends_s + rows_t1 + 1
    return jnp.sum(jnp.where(is_in_ts, sees_ts, 0), axis=1, dtype=jnp.int32)


def _works(batch: AttentionBatch, rows: range, num_heads: int, top_k: int, columns: int) -> list[tuple[Work, int]]:
    """Return the work on some rows of a step, of decodes and of tiles of chunks, each with the rows of an item.

    A row that sees at most `top_k` positions gets them all without scores.
    """
    works, s = [], len(batch.context_lens_s)
    if rows.start < s:
        seqs_s = jnp.arange(s, dtype=jnp.int32)
        is_scored_s = (batch.context_lens_s > top_k) & (seqs_s >= rows.start) & (seqs_s < rows.stop)
        scored = batch._replace(context_lens_s=jnp.where(is_scored_s, batch.context_lens_s, 0))
        splits = decode_work(scored, score_split_rule(s), TILE, NO_WINDOW, columns)
        works.append((Work(splits.seqs_i, splits.seqs_i, splits.starts_i, splits.ends_i, splits.lasts_s), 1))
    if batch.tile_seqs_i.shape[0] or not works:
        works.append((_tile_work(batch, rows, rows_together(num_heads), top_k), rows_together(num_heads)))
    return works


def _tile_work(batch: AttentionBatch, rows: range, together: int, top_k: int) -> Work:
    """Return the tiles of some rows as work items, the last ones first: they see the most and should not start last."""
    indices_i = jnp.arange(len(batch.tile_rows_i), dtype=jnp.int32)
    is_used_i = indices_i < batch.num_tiles
    first, last = (
        jnp.sum(is_used_i & (batch.tile_rows_i < limit), dtype=jnp.int32) for limit in (rows.start, rows.stop)
    )
    tiles_i = jnp.maximum(last - 1 - indices_i, 0)
    seqs_i, rows_i = batch.tile_seqs_i[tiles_i], batch.tile_rows_i[tiles_i]
    row_ends_i = batch.query_ends_s[seqs_i]
    ends_i = jnp.minimum(rows_i + together, row_ends_i) + batch.context_lens_s[seqs_i] - row_ends_i
    ends_i = jnp.where(ends_i > top_k, ends_i, 0)
    return Work(seqs_i, rows_i, jnp.zeros_like(rows_i), ends_i, (last - first).reshape(1))
