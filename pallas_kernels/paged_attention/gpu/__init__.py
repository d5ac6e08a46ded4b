"""Paged attention on Hopper GPUs, in Mosaic GPU.

`call.py` runs three steps on the same pool: `write.py` rotates q and k and writes k and v in place, `decode.py` attends
decode rows in splits of their contexts, and `prefill.py` attends longer chunks in the manner of FlashAttention-3.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from ..layout import AttentionBatch, AttentionShape, FusedPool, refuse_sizes
from ..tiles import Tiles
from .call import Kernels, call_kernels
from .decode import decode_attention
from .prefill import QUERY_TILE, prefill_attention
from .write import rotate_and_write

__all__ = [
    "decode_attention",
    "gpu_paged_attention",
    "gpu_refusal",
    "gpu_tiles",
    "prefill_attention",
    "rotate_and_write",
]


def gpu_refusal(shape: AttentionShape) -> str | None:
    """Return why the kernels cannot run a shape, or None if they can."""
    if shape.head_dim > 256:
        return (
            f"head_dim must be 64, 128 or 256, not {shape.head_dim}, whose tiles do not fit in shared memory. "
            "Plain XLA copies keys and values out of the pool before it multiplies, which moves three times their bytes"
        )
    if shape.group > 64:
        return f"a kv head can serve at most 64 query heads, not {shape.group}"
    return refuse_sizes(shape, (64, 128, 256), (jnp.bfloat16,), (16, 32, 64, 128))


def gpu_tiles(shape: AttentionShape) -> Tiles:
    """Return tile sizes; two tiles fit in shared memory. Decode uses its own, see `decode_config`."""
    return Tiles(decode=1, query=QUERY_TILE, kv=128 if shape.head_dim <= 128 else 64)


def gpu_paged_attention(
    q_tnh: Array,
    k_tkh: Array,
    v_tkh: Array,
    kv_pool: FusedPool,
    batch: AttentionBatch,
    *,
    num_cores: int | None = None,
    **settings: Any,
) -> tuple[Array, FusedPool]:
    """See `PagedAttention` and `call_kernels`, which takes the settings.

    `num_cores` is the number of the GPU's multiprocessors. With `interpret` the kernels run on a CPU, in an interpreter
    that looks for races.
    """
    kernels = Kernels(rotate_and_write, partial(decode_attention, num_cores=num_cores), prefill_attention)
    return call_kernels(kernels, q_tnh, k_tkh, v_tkh, kv_pool, batch, **settings)
