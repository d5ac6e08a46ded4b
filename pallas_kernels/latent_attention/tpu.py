"""Attention over latents on TPUs: the kernels of paged attention with one kv head that has its values among its keys.

A tile of latents is brought into VMEM once for the scores and the values of all heads. The rows of queries are all
heads of a token, or of a tile of tokens.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention import NO_WINDOW, AttentionBatch, Tiles
from pallas_kernels.paged_attention.layout import FLOAT8
from pallas_kernels.paged_attention.tpu import float8
from pallas_kernels.paged_attention.tpu.options import Options, ring_length
from pallas_kernels.paged_attention.tpu.step import attend_step

from .layout import LANES, LatentPool, LatentShape, row_columns

_KV_TILE = 512
_QUERY_ROWS = 2048
"""The rows, tokens times heads, of a query tile, unless that is fewer tokens than `_LEAST_TOKENS`."""
_LEAST_TOKENS = 32
"""The least tokens of a query tile: the rows of an 8-bit tile of the pool, as writing needs them."""
_MOST_HEAD_BYTES = 256
"""The most heads of a device times the bytes of a number: a larger query tile leaves too little of a TPU's VMEM."""


def tpu_latent_attention(
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
    architecture: str | None = None,
    interpret: bool = False,
    chosen_tw: Array | None = None,
    top_k: int | None = None,
) -> tuple[Array, LatentPool]:
    """See `LatentAttention`. `interpret` runs the kernels on a CPU, in Pallas' simulation of a TPU."""
    del top_k
    _, n, h = q_tnh.shape
    pool = kv_pool.latents
    _, block_size, columns = pool.shape
    options = Options(
        name="latent",
        group=n,
        keys=slice(0, columns),
        values=slice(0, latent_dim),
        block_size=block_size,
        scale=scale,
        soft_cap=None,
        has_sinks=False,
        has_row_ends=False,
        has_chosen=chosen_tw is not None,
        has_pairs=False,
        unpacks_float8=float8.is_unpacked(pool.dtype, architecture),
        tiles=tiles,
        interpret=interpret,
    )
    fill = partial(jnp.pad, pad_width=((0, 0), (0, 0), (0, columns - h)))
    out_tknv, pool = attend_step(
        fill(q_tnh)[:, None],
        fill(latents_th[:, None]),
        pool[:, None],
        batch,
        layer=layer,
        num_layers=num_layers,
        window=NO_WINDOW,
        chosen_tw=chosen_tw,
        options=options,
    )
    return out_tknv[:, 0].astype(q_tnh.dtype), LatentPool(pool[:, 0])


def tpu_refusal(shape: LatentShape) -> str | None:
    """Return why the kernels cannot run a shape, or None if they can."""
    if shape.latent_dim % LANES:
        return f"latents must have a multiple of {LANES} numbers, not {shape.latent_dim}"
    if shape.dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype must be bfloat16 or float32, not {jnp.dtype(shape.dtype).name}"
    most = _MOST_HEAD_BYTES // jnp.dtype(shape.dtype).itemsize
    if shape.num_heads > most:
        return f"a device can have at most {most} heads in {jnp.dtype(shape.dtype).name}, not {shape.num_heads}"
    if shape.kv_dtype != shape.dtype and shape.kv_dtype not in FLOAT8:
        return f"the pool must be of the same dtype or float8, not {jnp.dtype(shape.kv_dtype).name}"
    # A float8 tile has 32 rows.
    block_sizes = (32, 64, 128) if shape.kv_dtype in FLOAT8 else (16, 32, 64, 128)
    if shape.block_size not in block_sizes:
        return f"block_size must be {', '.join(map(str, block_sizes))}, not {shape.block_size}"
    return None


def tpu_tiles(shape: LatentShape, architecture: str | None) -> Tiles:
    """Return tile sizes that fit the fast memory of every generation; see those of paged attention."""
    tile_bytes = _KV_TILE * row_columns(shape) * jnp.dtype(shape.kv_dtype).itemsize
    sizes = (_LEAST_TOKENS, 64, 128, 256)
    query = max(tokens for tokens in sizes if tokens == _LEAST_TOKENS or tokens * shape.num_heads <= _QUERY_ROWS)
    return Tiles(decode=ring_length(tile_bytes, architecture), query=query, kv=_KV_TILE)
