"""The indexer on TPUs: one Pallas call for the decode rows, one for the longer chunks, on the same pool in place.

Both write the new keys and stream keys as the kernels of paged attention do. The scores of all that a row sees stay in
VMEM, from which the positions are chosen (`choice.py`).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.chosen import num_words
from pallas_kernels.paged_attention import AttentionBatch, Tiles
from pallas_kernels.paged_attention.layout import FLOAT8
from pallas_kernels.paged_attention.tpu import float8
from pallas_kernels.paged_attention.tpu.options import LANES, SUBLANES, Options, ring_length
from pallas_kernels.paged_attention.tpu.step import paged_tables

from ..layout import IndexerPool, IndexerShape
from . import choice
from .decode import decode_choices
from .prefill import prefill_choices

_QUERY = 32
"""The rows of a tile: writing an 8-bit pool needs as many."""
_KV_TILE = 1024
_HEADS = 2 * SUBLANES
"""The heads are padded to a multiple of this, a tile of 16-bit numbers."""
_MOST_SCORES = 36 * 2**20
"""The most bytes of a tile's scores, beside which the rest fits VMEM."""


def tpu_indexer(
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
    architecture: str | None = None,
    interpret: bool = False,
) -> tuple[Array, IndexerPool]:
    """See `Indexer`. `interpret` runs the kernels on a CPU, in Pallas' simulation of a TPU.

    Raises:
      ValueError: for block tables of more tokens than the scores of a tile of rows have room for.
    """
    (t, n, h), pool, s = q_tnh.shape, kv_pool.keys, len(batch.context_lens_s)
    l_b, block_size, _ = pool.shape
    used = num_words(batch, block_size)
    words = -(-used // LANES) * LANES
    if 4 * tiles.query * choice.num_chunks(words) * LANES > _MOST_SCORES:
        most = _MOST_SCORES // (4 * tiles.query)
        raise ValueError(f"indexer: sequences can have at most {most} tokens on a TPU, not {used * choice.WORD}")
    options = Options(
        name="indexer",
        group=n,
        keys=slice(0, h),
        values=slice(0, 0),
        block_size=block_size,
        scale=1.0,
        soft_cap=None,
        has_sinks=False,
        has_row_ends=False,
        has_chosen=False,
        has_pairs=False,
        unpacks_float8=float8.is_unpacked(pool.dtype, architecture),
        tiles=tiles,
        interpret=interpret,
    )
    if options.unpacks_float8:
        k_th = float8.to_be_unpacked(k_th)
    q_tnh = jnp.pad(q_tnh, ((0, 0), (0, -n % _HEADS), (0, 0)))
    weights_tn = jnp.pad(weights_tn, ((0, 0), (0, LANES - n)))
    first_block = jnp.asarray(layer, jnp.int32) * (l_b // num_layers)
    slab = options.slab(pool.dtype)
    slabs = pool.reshape(l_b, 1, block_size // slab, slab, h)
    common = paged_tables(batch.block_tables_sm), batch, first_block
    chosen, slabs = decode_choices(
        q_tnh[:s], weights_tn[:s], k_th[:s], slabs, *common, words=words, top_k=top_k, options=options
    )
    chosen, slabs = prefill_choices(q_tnh, weights_tn, k_th, slabs, *common, chosen, top_k=top_k, options=options)
    # Rows that no kernel wrote hold arbitrary memory.
    chosen_tw = jnp.where((batch.slots_t > 0)[:, None], chosen.reshape(t, words)[:, :used], 0)
    return chosen_tw, IndexerPool(slabs.reshape(pool.shape))


def tpu_refusal(shape: IndexerShape) -> str | None:
    """Return why the kernels cannot run a shape, or None if they can."""
    if shape.head_dim != LANES:
        return f"keys must have {LANES} numbers, not {shape.head_dim}"
    if shape.num_heads > LANES:
        return f"there can be at most {LANES} heads, not {shape.num_heads}"
    if shape.dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype must be bfloat16 or float32, not {jnp.dtype(shape.dtype).name}"
    if shape.kv_dtype != shape.dtype and shape.kv_dtype not in FLOAT8:
        return f"the pool must be of the same dtype or float8, not {jnp.dtype(shape.kv_dtype).name}"
    # A float8 tile has 32 rows.
    block_sizes = (32, 64, 128) if shape.kv_dtype in FLOAT8 else (16, 32, 64, 128)
    if shape.block_size not in block_sizes:
        return f"block_size must be {', '.join(map(str, block_sizes))}, not {shape.block_size}"
    return None


def tpu_tiles(shape: IndexerShape, architecture: str | None) -> Tiles:
    """Return tile sizes; see those of paged attention."""
    tile_bytes = _KV_TILE * shape.head_dim * jnp.dtype(shape.kv_dtype).itemsize
    return Tiles(decode=ring_length(tile_bytes, architecture), query=_QUERY, kv=_KV_TILE)
