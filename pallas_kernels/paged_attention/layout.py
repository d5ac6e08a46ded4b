"""The layouts of the block pool, and what the host tells the kernels about one step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

FLOAT8 = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))


class AttentionShape(NamedTuple):
    """The shape that the op is compiled for, besides the batch. Dtypes are numpy's, so that equal shapes are one."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: Any
    """The dtype of queries, new keys and values, and the output."""
    kv_dtype: Any
    """The dtype of the pool."""

    @property
    def group(self) -> int:
        """Return the number of query heads per kv head."""
        return self.num_heads // self.num_kv_heads


def refuse_sizes(
    shape: AttentionShape, head_dims: tuple[int, ...], dtypes: tuple[Any, ...], block_sizes: tuple[int, ...]
) -> str | None:
    """Return why a kernel for these sizes and dtypes cannot run a shape, or None if it can."""
    if shape.head_dim not in head_dims:
        return f"head_dim must be {', '.join(map(str, head_dims[:-1]))} or {head_dims[-1]}, not {shape.head_dim}"
    if shape.dtype not in dtypes:
        return f"dtype must be {' or '.join(jnp.dtype(x).name for x in dtypes)}, not {jnp.dtype(shape.dtype).name}"
    if shape.kv_dtype != shape.dtype and shape.kv_dtype not in FLOAT8:
        return f"the pool must be of the same dtype or float8, not {jnp.dtype(shape.kv_dtype).name}"
    if shape.block_size not in block_sizes:
        return f"block_size must be {', '.join(map(str, block_sizes))}, not {shape.block_size}"
    return None


class SplitPool(NamedTuple):
    """The pool of the XLA path has keys [l * b, k, h, o] and values [l * b, k, o, h] of all layers.

    8-bit floats are held as uint8. Layer i owns blocks [i * b, (i + 1) * b), and block 0 of every layer is the null
    block, where padding writes. A block of one head is a matmul operand without a transposition: q @ K and
    probabilities @ V.
    """

    # JAX arrays, numpy arrays in the reference, or their specs.
    k: Any
    v: Any


class PairedPool(NamedTuple):
    """The pool of a CPU's kernel has keys [l * b, k, h / 2, o, 2] and values [l * b, k, o / 2, h, 2].

    Layers and null blocks are as above. Numbers whose products are summed up lie side by side in pairs, as instructions
    for bfloat16 take them.
    """

    k: Any
    v: Any

    @staticmethod
    def of(pool: SplitPool) -> PairedPool:
        """Return the same keys and values in this layout."""
        return PairedPool(*(x.reshape(*x.shape[:2], -1, 2, x.shape[3]).swapaxes(-1, -2) for x in pool))


class FusedPool(NamedTuple):
    """The pool of GPU and TPU kernels is [l * b, k, o, 2 * h], a token's key and value side by side.

    Layers and null blocks are as above. One DMA brings both; at h = 64 they fill a TPU's 128 lanes.
    """

    kv: Any

    @staticmethod
    def of(pool: SplitPool) -> FusedPool:
        """Return the same keys and values in this layout."""
        return FusedPool(jnp.concatenate([pool.k.swapaxes(-1, -2), pool.v], axis=-1))


type KVPool = SplitPool | PairedPool | FusedPool


def split_pool_spec(shape: AttentionShape, num_layers: int, num_blocks: int) -> SplitPool:
    """Return shape and dtype of a pool of `num_blocks` blocks per layer, the null block counted."""
    rows, k, h, o = num_layers * num_blocks, shape.num_kv_heads, shape.head_dim, shape.block_size
    # A compiler without 8-bit floats would widen the whole pool to scatter into it.
    dtype = jnp.uint8 if jnp.dtype(shape.kv_dtype).itemsize == 1 else shape.kv_dtype
    return SplitPool(*(jax.ShapeDtypeStruct((rows, k, *block), dtype) for block in ((h, o), (o, h))))


def has_pairs(shape: AttentionShape) -> bool:
    """Return whether a CPU's kernel multiplies in pairs."""
    return shape.dtype == shape.kv_dtype == jnp.bfloat16


def cpu_pool_spec(shape: AttentionShape, num_layers: int, num_blocks: int) -> SplitPool | PairedPool:
    """Return shape and dtype of a pool as a CPU's kernel has it."""
    spec = split_pool_spec(shape, num_layers, num_blocks)
    return jax.eval_shape(PairedPool.of, spec) if has_pairs(shape) else spec


def fused_pool_spec(shape: AttentionShape, num_layers: int, num_blocks: int) -> FusedPool:
    """Return shape and dtype of a pool as the GPU's and TPU's kernels have it."""
    dims = (num_layers * num_blocks, shape.num_kv_heads, shape.block_size, 2 * shape.head_dim)
    return FusedPool(jax.ShapeDtypeStruct(dims, shape.kv_dtype))


def to_pool_dtype(x: Array, dtype: Any) -> Array:
    """Cast keys or values to the pool's dtype; values beyond the range of float16 or 8-bit floats are clipped."""
    if dtype in (jnp.float16, *FLOAT8) and x.dtype != dtype:  # out of range they would become infinite or NaN
        most = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -most, most)
    return x.astype(dtype)


class AttentionBatch(NamedTuple):
    """The positions of one step's tokens. Decode rows (sequences of one token) come first, then the longer chunks.

    All int32. Rows of padding, at the end and between chunks, point at slot 0; padding sequences have context_lens 0
    and no rows.
    """

    slots_t: Array
    """The slots that each token's K and V go to: block * block_size + offset."""
    block_tables_sm: Array
    """Block ids of each sequence, in order; unused entries are 0."""
    context_lens_s: Array
    """The number of tokens of each sequence that are in the pool once this step's are written."""
    query_starts_s: Array
    """Each sequence's first row in t; for longer chunks a multiple of the implementation's `row_alignment`."""
    query_ends_s: Array
    """One past each sequence's last row."""
    num_decodes: Array
    """The number of leading sequences with one token each; sequence i < num_decodes is row i."""
    tile_seqs_i: Array
    """The sequence of each tile; the longer chunks are cut into tiles of `Tiles.query` rows."""
    tile_rows_i: Array
    """Each tile's first row in t, ascending."""
    num_tiles: Array
    """The number of tiles in use."""
    row_ends_t: Array | None = None
    """One past the last position that each row sees: at most its sequence's context_lens, which is the end of a decode
    row, and such that it sees at least one position. None: all rows see up to their own position. Rows of padding may
    have any value.
    """

    def without_tiles(self) -> AttentionBatch:
        """Return the batch without room for tiles, for implementations that take steps of decodes alone."""
        return self._replace(tile_seqs_i=self.tile_seqs_i[:0], tile_rows_i=self.tile_rows_i[:0])


def read_slots(kv_pool: KVPool, rows_t: Array, offsets_t: Array) -> tuple[Array, Array]:
    """Return the keys and values [t, k, h] of tokens in the pool's dtype; `rows_t` are on the pool's first axis."""
    match kv_pool:
        case FusedPool(kv):
            # By one index: for two that are apart, a TPU's compiler would transpose the whole pool first.
            heads_tk = rows_t[:, None] * kv.shape[1] + jnp.arange(kv.shape[1], dtype=jnp.int32)
            k_tkh, v_tkh = jnp.split(kv.reshape(-1, kv.shape[3])[heads_tk * kv.shape[2] + offsets_t[:, None]], 2, -1)
            return k_tkh, v_tkh
        case PairedPool(k, v):
            k_tkh = k[rows_t, :, :, offsets_t]
            return k_tkh.reshape(*k_tkh.shape[:2], -1), v[rows_t, :, offsets_t // 2, :, offsets_t % 2]
        case SplitPool(k, v):
            return k[rows_t, :, :, offsets_t], v[rows_t, :, offsets_t]


def copy_blocks[Pool: tuple[Any, ...]](kv_pool: Pool, sources_c: Array, targets_c: Array, *, num_layers: int) -> Pool:
    """Copy block `sources_c[i]` to `targets_c[i]` in every layer; donate the pool. A pair of null blocks does nothing.

    The pool is a named tuple of arrays whose first axis is layers times blocks. No target may be another's source.
    """
    num_blocks = kv_pool[0].shape[0] // num_layers
    first_l1 = num_blocks * jnp.arange(num_layers, dtype=jnp.int32)[:, None]
    sources, targets = (first_l1 + sources_c).reshape(-1), (first_l1 + targets_c).reshape(-1)
    return type(kv_pool)(*(x.at[targets].set(x[sources]) for x in kv_pool))
