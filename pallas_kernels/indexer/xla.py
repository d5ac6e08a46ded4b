"""The indexer in plain jnp, on all platforms: scores of one span of keys at a time, with a running choice of the best.

Decode rows go in groups, longer chunks in tiles of rows, as in paged attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.chosen import num_words, spans_to_bits, to_bits
from pallas_kernels.paged_attention import AttentionBatch, Tiles
from pallas_kernels.paged_attention.tiles import XLA_TILES
from pallas_kernels.paged_attention.xla import walk_rows, widen

from .layout import IndexerPool

_Read = Callable[[Array], Array]
"""A function that returns the keys [s, c, h] of blocks [s, b], in the queries' dtype."""


class _Rows(NamedTuple):
    """Some rows of the step, or of sequences."""

    q: Array
    """[t, n, h], or [s, r, n, h]."""
    weights: Array


class _Best(NamedTuple):
    """The best positions so far of each row, best first, the lower one where scores are equal."""

    scores_srk: Array
    positions_srk: Array
    """-1, with the score of minus infinity, behind them."""


def xla_indexer(
    q_tnh: Array,
    k_th: Array,
    weights_tn: Array,
    kv_pool: IndexerPool,
    batch: AttentionBatch,
    *,
    layer: Array | int,
    num_layers: int,
    top_k: int,
    tiles: Tiles = XLA_TILES,
    interpret: bool = False,
) -> tuple[Array, IndexerPool]:
    """See `Indexer`; there is nothing to interpret."""
    del interpret
    pool, kv_dtype = kv_pool.keys, k_th.dtype
    _, block_size, h = pool.shape
    first_block = layer * (len(pool) // num_layers)
    written_th = k_th if kv_dtype == pool.dtype else lax.bitcast_convert_type(k_th, pool.dtype)
    pool = pool.at[first_block + batch.slots_t // block_size, batch.slots_t % block_size].set(written_th)

    def read(blocks_sb: Array) -> Array:
        return widen(pool[first_block + blocks_sb], kv_dtype, q_tnh.dtype).reshape(len(blocks_sb), -1, h)

    def choose(rows: _Rows, tables_sm: Array, positions_sr: Array, _: Array | None) -> Array:
        best_srk = _choose(rows, tables_sm, positions_sr, read, top_k=top_k, block_size=block_size, tile=tiles.kv)
        sees_all = positions_sr[..., None] < top_k
        all_srw = spans_to_bits(jnp.zeros_like(positions_sr), positions_sr, len(nothing))
        return jnp.where(sees_all, all_srw, to_bits(best_srk, len(nothing)))

    nothing = jnp.zeros((num_words(batch, block_size),), jnp.int32)
    return walk_rows(choose, _Rows(q_tnh, weights_tn), nothing, batch, tiles), IndexerPool(pool)


def _choose(
    rows: _Rows, tables_sm: Array, positions_sr: Array, read: _Read, *, top_k: int, block_size: int, tile: int
) -> Array:
    """Return the best positions up to each row's own; those of a row that sees at most `top_k` may be missing."""
    # A span has at least as many positions as are chosen, or choosing would take longer than scores.
    num_tiles = -(-top_k // tile)
    tile_blocks = max(1, tile // block_size)
    tile, span_blocks = tile_blocks * block_size, num_tiles * tile_blocks
    span = num_tiles * tile
    tables_sm = jnp.pad(tables_sm, ((0, 0), (0, -tables_sm.shape[1] % span_blocks)))
    num_seen = positions_sr.max() + 1

    def add_span(i: Array, best: _Best) -> _Best:
        def add_tile(j: Array, scores_src: Array) -> Array:
            first_block = i * span_blocks + j * tile_blocks
            scores = _score(rows, read(lax.dynamic_slice_in_dim(tables_sm, first_block, tile_blocks, axis=1)))
            return lax.dynamic_update_slice_in_dim(scores_src, scores, j * tile, 2)

        first = i * span
        live_tiles = jnp.minimum((num_seen - first + tile - 1) // tile, num_tiles)
        scores_src = lax.fori_loop(0, live_tiles, add_tile, jnp.zeros((*positions_sr.shape, span)))
        positions_c = first + jnp.arange(span)
        # Keys that a row does not see may be NaN.
        is_seen_src = positions_c <= positions_sr[..., None]
        scores_src = jnp.where(is_seen_src, scores_src, -jnp.inf)
        candidates = (
            jnp.concatenate([best.scores_srk, scores_src], axis=2),
            jnp.concatenate([best.positions_srk, jnp.where(is_seen_src, positions_c, -1)], axis=2),
        )
        # Among equal scores it takes the first ones, and those from before have lower positions.
        scores_srk, indices_srk = lax.top_k(candidates[0], top_k)
        return _Best(scores_srk, jnp.take_along_axis(candidates[1], indices_srk, axis=2))

    nothing = _Best(jnp.full((*positions_sr.shape, top_k), -jnp.inf), jnp.full((*positions_sr.shape, top_k), -1))
    # A row that sees no more than `top_k` positions gets them all without scores.
    num_spans = jnp.where(num_seen > top_k, (num_seen + span - 1) // span, 0)
    return lax.fori_loop(0, num_spans, add_span, nothing).positions_srk


def _score(rows: _Rows, keys_sch: Array) -> Array:
    """Return the scores [s, r, c] of keys."""
    # By default a GPU rounds float32 operands to 11 bits, and a TPU to 8.
    precision = lax.Precision.HIGHEST if keys_sch.dtype == jnp.float32 else None
    products = jnp.einsum("srnh,sch->srnc", rows.q, keys_sch, precision=precision, preferred_element_type=jnp.float32)
    scores_src = (jnp.maximum(products, 0) * rows.weights[..., None]).sum(axis=2)
    return jnp.where(scores_src == 0, 0.0, scores_src)  # -0 is as high as 0
