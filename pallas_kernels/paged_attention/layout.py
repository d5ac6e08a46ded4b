"""The block pool's layout, and what the host tells the kernels about one step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike


class KVPool(NamedTuple):
    """Keys [l * b, k, h, o] and values [l * b, k, o, h] of all layers; layer i owns blocks [i * b, (i + 1) * b).

    Head-major, so that a block of one head is a matmul operand as it lies: q @ K and probabilities @ V.
    Block 0 of every layer is the null block, where padding writes.
    """

    # Arrays of JAX, of numpy in the reference, or their specs.
    k: Any
    v: Any


class AttentionBatch(NamedTuple):
    """Where the tokens of one step live. Tokens of a sequence lie end to end, decode rows (one token) first.

    All int32. Padding rows point at slot 0 and padding sequences have context_lens 0.
    """

    slots_t: Array
    """Where each token's K and V go: block * block_size + offset."""
    block_tables_sm: Array
    """Block ids of each sequence, in order; unused entries are 0."""
    context_lens_s: Array
    """Tokens of each sequence in the pool once this step's are written."""
    query_ends_s: Array
    """One past each sequence's last row in t."""
    num_decodes: Array
    """Leading sequences with one token each; sequence i < num_decodes is row i."""
    tile_seqs_i: Array
    """The longer chunks, cut into tiles of `Tiles.query` rows: which sequence a tile belongs to ..."""
    tile_rows_i: Array
    """... and its first row in t, ascending."""
    num_tiles: Array
    """Tiles in use."""


def kv_pool_spec(
    num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike
) -> KVPool:
    """Return shape and dtype of a pool of `num_blocks` blocks per layer, the null block counted."""
    rows = num_layers * num_blocks
    return KVPool(
        k=jax.ShapeDtypeStruct((rows, num_kv_heads, head_dim, block_size), dtype),
        v=jax.ShapeDtypeStruct((rows, num_kv_heads, block_size, head_dim), dtype),
    )


def copy_blocks(kv_pool: KVPool, sources_c: Array, targets_c: Array, *, num_layers: int) -> KVPool:
    """Copy block `sources_c[i]` to `targets_c[i]` in every layer; donate the pool. A pair of null blocks does nothing.

    No target may be another's source.
    """
    num_blocks = kv_pool.k.shape[0] // num_layers
    first_l1 = num_blocks * jnp.arange(num_layers, dtype=jnp.int32)[:, None]
    sources, targets = (first_l1 + sources_c).reshape(-1), (first_l1 + targets_c).reshape(-1)
    return KVPool(*(x.at[targets].set(x[sources]) for x in kv_pool))
