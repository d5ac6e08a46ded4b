"""Paged attention on NVIDIA's GPUs from Ampere on, in Mosaic GPU: RTX 30 to 50, A100, L4, L40S, B200 and the like.

Like Hopper's, they are three steps on the same pool: `write.py` rotates q and k and writes k and v in place,
`decode.py` attends decode rows in splits of their contexts, and `prefill.py` attends longer chunks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..gpu.call import Kernels, call_kernels
from ..gpu.write import TOKENS
from ..layout import AttentionBatch, AttentionShape, FusedPool, refuse_sizes
from ..rope import Rope
from ..tiles import Tiles
from .common import MMA_ROWS
from .decode import decode_attention
from .prefill import QUERY_TILE, prefill_attention
from .write import rotate_and_write

__all__ = [
    "MMA_ROWS",
    "decode_attention",
    "gpu_mma_paged_attention",
    "gpu_mma_refusal",
    "gpu_mma_tiles",
    "prefill_attention",
    "rotate_and_write",
]


def gpu_mma_refusal(shape: AttentionShape) -> str | None:
    """Return why the kernels cannot run a shape, or None if they can."""
    return refuse_sizes(shape, (64, 128, 256), (jnp.bfloat16, jnp.float16), (16, 32, 64, 128))


def gpu_mma_tiles(shape: AttentionShape) -> Tiles:
    """Return tile sizes: registers hold half a tile on its way. Decode uses its own, see `decode_sizes`."""
    return Tiles(decode=1, query=QUERY_TILE, kv={64: 64, 128: 32, 256: 16}[shape.head_dim])


def gpu_mma_paged_attention(
    q_tnh: Array,
    k_tkh: Array,
    v_tkh: Array,
    kv_pool: FusedPool,
    batch: AttentionBatch,
    *,
    rope: Rope | None = None,
    **settings: Any,
) -> tuple[Array, FusedPool]:
    """See `PagedAttention` and `call_kernels`, which takes the settings.

    With `interpret` the kernels run on a CPU, in an interpreter that knows no `mma`.
    """
    t = len(q_tnh)
    # Prefill reads and writes 16 rows at a time, and plain loads beyond an array are errors.
    lacking = -t % (MMA_ROWS if batch.tile_seqs_i.shape[0] else TOKENS)
    if lacking:
        # Rows of padding, which point at slot 0.
        rows = q_tnh, k_tkh, v_tkh, rope, batch.slots_t, batch.row_ends_t
        q_tnh, k_tkh, v_tkh, rope, slots_t, row_ends_t = jax.tree.map(partial(_pad_rows, count=lacking), rows)
        batch = batch._replace(slots_t=slots_t, row_ends_t=row_ends_t)
    kernels = Kernels(rotate_and_write, decode_attention, prefill_attention)
    out_tnh, kv_pool = call_kernels(kernels, q_tnh, k_tkh, v_tkh, kv_pool, batch, rope=rope, **settings)
    return out_tnh[:t], kv_pool


def _pad_rows(x: Array, count: int) -> Array:
    return jnp.pad(x, ((0, count), *[(0, 0)] * (x.ndim - 1)))
