"""A stand-in for paged attention that compiles in a fraction of the time: one sequence, all blocks at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention import AttentionBatch, Rope, SplitPool
from pallas_kernels.paged_attention.rope import rotate


def dense_attention(
    q_tnh: Array,
    k_tkh: Array,
    v_tkh: Array,
    kv_pool: SplitPool,
    batch: AttentionBatch,
    *,
    layer: Array | int,
    num_layers: int,
    window: Array | int,
    scale: float,
    rope: Rope | None,
    soft_cap: float | None = None,
    sinks_n: Array | None = None,
) -> tuple[Array, SplitPool]:
    """Rotate, write, then attend, as `PagedAttention` does."""
    if rope is not None:
        q_tnh, k_tkh = rotate(q_tnh, rope), rotate(k_tkh, rope)
    first_block = layer * (kv_pool.k.shape[0] // num_layers)
    block_size = kv_pool.k.shape[-1]
    blocks_t, offsets_t = first_block + batch.slots_t // block_size, batch.slots_t % block_size
    kv_pool = SplitPool(
        kv_pool.k.at[blocks_t, :, :, offsets_t].set(k_tkh), kv_pool.v.at[blocks_t, :, offsets_t].set(v_tkh)
    )
    blocks_m = first_block + batch.block_tables_sm[0]
    keys_kch, values_kch = _read(kv_pool.k[blocks_m].swapaxes(-1, -2)), _read(kv_pool.v[blocks_m])
    t, n, h = q_tnh.shape
    kv_positions = jnp.arange(keys_kch.shape[1])
    positions_t = batch.context_lens_s[0] - batch.query_ends_s[0] + jnp.arange(t)
    scores = jnp.einsum("tkgh,kch->tkgc", q_tnh.reshape(t, k_tkh.shape[1], -1, h), keys_kch) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    ahead_tc = positions_t[:, None] - kv_positions[None]
    scores = jnp.where(((ahead_tc >= 0) & (ahead_tc < window))[:, None, None], scores, -1e30)
    if sinks_n is not None:
        sinks = jnp.broadcast_to(sinks_n.reshape(1, *scores.shape[1:3], 1), (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    probabilities = jax.nn.softmax(scores)[..., : keys_kch.shape[1]]
    # Unwritten slots are NaN.
    values_kch = jnp.where((kv_positions < batch.context_lens_s[0])[None, :, None], values_kch, 0)
    return jnp.einsum("tkgc,kch->tkgh", probabilities, values_kch).reshape(t, n, h), kv_pool


def _read(blocks_mkoh: Array) -> Array:
    _, k, _, h = blocks_mkoh.shape
    return blocks_mkoh.swapaxes(0, 1).reshape(k, -1, h)
