"""Rotate a step's queries and keys, and write its keys and values into the block pool, in place.

All GPUs' kernels do it in this way; `Writing` holds what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..layout import FusedPool, to_pool_dtype
from ..rope import Rope, rotate_halves
from .common import (
    TILED_ROWS,
    WARPGROUP_LANES,
    compiler_params,
    decode_queries,
    interpret_params,
)

# The tokens of a thread block. Half a head of each is h / 32 numbers a thread: a load of 4 to 16 bytes.
TOKENS = 8
# The most query heads of a thread block: their loads are in flight together.
_QUERY_HEADS = 4


class Writing(NamedTuple):
    """What differs between the GPUs."""

    store: Callable[[Any, Any, Sequence[Array], Array, Array], None]
    """Stores tokens [8, 2 h], which all threads have put into shared memory, in the pool: a function of the tokens, the
    pool, the tokens' slots, the layer's first row of the pool, and the kv head. It synchronizes threads itself. Nothing
    goes to the null block."""
    finish: Callable[[], None]
    """Waits until shared memory has been read."""
    head_rows: int
    """Decode reads a kv head's queries padded to a multiple of this many rows."""
    decode_queries: Callable[[Array, Any], Array]
    """Returns queries as decode takes them for a pool of a dtype."""


class Queries(NamedTuple):
    """A step's queries, rotated, as the kernels read them."""

    all_tc: Array
    """All queries [t, n * h]."""
    decode_rkgh: Array
    """The queries of at least the first s rows, g padded with anything to a multiple of `Writing.head_rows`."""


def write_token(kv_smem: Any, pool: Any, slot: Array, first_row: Array, kv_head: Array | int) -> None:
    """Start to copy a head's key and value to a slot, unless it is the null block's."""
    o = pool.shape[2]

    @pl.when(slot >= o)
    def _() -> None:
        plgpu.copy_smem_to_gmem(kv_smem, pool.at[first_row + lax.div(slot, o), kv_head, lax.rem(slot, o)])


def _copy_tokens(kv_smem: Any, pool: Any, slots: Sequence[Array], first_row: Array, kv_head: Array) -> None:
    plgpu.commit_smem()
    for i, slot in enumerate(slots):
        write_token(kv_smem.at[i], pool, slot, first_row, kv_head)


HOPPER = Writing(
    store=_copy_tokens,
    finish=partial(plgpu.wait_smem_to_gmem, 0),
    head_rows=TILED_ROWS,
    decode_queries=decode_queries,
)
"""Hopper's way: a bulk copy for each token."""


def rotate_and_write(
    q_tnh: Array,
    k_tkh: Array,
    v_tkh: Array,
    kv_pool: FusedPool,
    slots_t: Array,
    rope: Rope | None,
    *,
    num_rows: int,
    layer: Array | int,
    num_layers: int,
    interpret: bool = False,
    writing: Writing = HOPPER,
) -> tuple[Queries, FusedPool]:
    """Return q rotated, and the pool with k, rotated, and v at the tokens' slots; the null block is not written to.

    Without `rope` nothing is rotated. Decodes are among the first `num_rows` tokens. The number of tokens must be a
    multiple of 8, or ValueError is raised.

    A thread block takes a kv head of 8 tokens, with some or all of its query heads. It loads cos and sin once, and
    a head in halves, so that a thread has the numbers that it multiplies. The kernel gets the pool as a Ref, which XLA
    neither copies nor slices.
    """
    t, n, h = q_tnh.shape
    k, g = k_tkh.shape[1], n // k_tkh.shape[1]
    if t % TOKENS:
        raise ValueError(f"the GPU's kernel writes {TOKENS} tokens at a time, which {t} is no multiple of")
    heads = 0 if rope is None else max(count for count in range(1, _QUERY_HEADS + 1) if g % count == 0)
    # XLA merges the matmuls of q, k and v, and sees that these slices of the result, in four dimensions, are all of it.
    # As three operands they would first be cut out of it, by a kernel each.
    new = (k_tkh, v_tkh) if rope is None else (q_tnh, k_tkh, v_tkh)
    new_tc = jnp.concatenate([x[:, None] for x in new], axis=2).reshape(t, -1)
    first_row = jnp.asarray(layer * (kv_pool.kv.shape[0] // num_layers), jnp.int32).reshape(1)

    def as_decodes(q: Array) -> Array:
        return writing.decode_queries(q, kv_pool.kv.dtype)

    padding, decode_dtype = -g % writing.head_rows, jax.eval_shape(as_decodes, q_tnh).dtype
    rotated_types = [jax.ShapeDtypeStruct((t, n * h), q_tnh.dtype)] if rope else []
    if rope and (padding or decode_dtype != q_tnh.dtype):
        num_decodes = -(-num_rows // TOKENS) * TOKENS
        rotated_types.append(jax.ShapeDtypeStruct((num_decodes, k, g + padding, h), decode_dtype))
    kernel = plgpu.kernel(
        partial(_write_kernel, heads=heads, writing=writing, as_decodes=as_decodes),
        out_type=rotated_types,
        grid=(t // TOKENS, k, g // heads if heads else 1),
        grid_names=("tokens", "kv_head", "part"),
        kernel_name="kv_write",
        scratch_types={"kv_smem": plgpu.SMEM((TOKENS, 2 * h), kv_pool.kv.dtype)},
        # Threads read only what `Writing.store` has synchronized.
        compiler_params=replace(compiler_params(), unsafe_no_auto_barriers=True),
        interpret=interpret_params(interpret),
    )
    pool = jax.new_ref(kv_pool.kv)
    rotated = kernel(new_tc, slots_t, first_row, pool, *(rope or ()))
    all_tc = rotated[0] if rope else q_tnh.reshape(t, -1)
    if len(rotated) > 1:
        decode_rkgh = rotated[1]
    else:
        padded_rkgh = jnp.pad(all_tc.reshape(t, k, g, h), ((0, 0), (0, 0), (0, padding), (0, 0)))
        decode_rkgh = as_decodes(padded_rkgh)
    return Queries(all_tc, decode_rkgh), FusedPool(jax.freeze(pool))


def _write_kernel(
    new_tc: Any,
    slots_t: Any,
    first_row: Any,
    pool: Any,
    *rotation: Any,
    kv_smem: Any,
    heads: int,
    writing: Writing,
    as_decodes: Callable[[Array], Array],
) -> None:
    """Rotate `heads` query heads; the first thread block of a kv head writes its keys and values, too.

    `rotation` is cos, sin and the Refs for rotated queries, with a second Ref for decodes where there is one; or
    nothing. `as_decodes` makes queries of decodes of rotated ones.
    """
    k, h = pool.shape[1], pool.shape[3] // 2
    n = new_tc.shape[1] // h - 2 * k
    tokens, kv_head, part = (lax.axis_index(name) for name in ("tokens", "kv_head", "part"))
    first_token = pl.multiple_of(tokens * TOKENS, TOKENS)
    rows = pl.ds(first_token, TOKENS)
    load = partial(plgpu.load, layout=plgpu.Layout.WG_STRIDED((TOKENS, h // 2), TOKENS * h // 2 // WARPGROUP_LANES))

    def halves(ref: Any, head: Array) -> list[Any]:
        return [ref.at[rows, pl.ds(head * h + start, h // 2)] for start in (0, h // 2)]

    cos_and_sin = [load(table.at[rows]) for table in rotation[:2]]
    query_heads = [kv_head * (n // k) + part * heads + i for i in range(heads)]
    # Before the keys, so that they are loading while the keys are written.
    queries = [[load(half) for half in halves(new_tc, head)] for head in query_heads]

    @pl.when(part == 0)
    def _() -> None:
        slots, row = [slots_t[first_token + i] for i in range(TOKENS)], first_row[0]
        key, value = ([load(half) for half in halves(new_tc, head)] for head in (n + kv_head, n + k + kv_head))
        if rotation:
            key = rotate_halves(*key, *cos_and_sin)
        for i, half in enumerate((*key, *value)):
            kv_smem[:, pl.ds(i * (h // 2), h // 2)] = _in_pool_dtype(half, pool.dtype)
        writing.store(kv_smem, pool, slots, row, kv_head)

    for i, query in enumerate(queries):
        rotated = rotate_halves(*query, *cos_and_sin)
        for ref, half in zip(halves(rotation[2], query_heads[i]), rotated, strict=True):
            ref[...] = half
        for decodes in rotation[3:]:
            _store_decodes(decodes, first_token, kv_head, part * heads + i, rotated, as_decodes)
    writing.finish()


def _store_decodes(
    decode_rkgh: Any,
    first_token: Array,
    kv_head: Array,
    head: Array,
    halves: Sequence[Array],
    as_decodes: Callable[[Array], Array],
) -> None:
    """Store the halves of a query head where decode reads it, if these tokens may be decodes."""

    @pl.when(first_token < decode_rkgh.shape[0])
    def _() -> None:
        for i, half in enumerate(halves):
            columns = pl.ds(i * half.shape[1], half.shape[1])
            decode_rkgh[pl.ds(first_token, TOKENS), kv_head, head, columns] = as_decodes(half)


def _in_pool_dtype(x: Array, dtype: Any) -> Array:
    # Hopper converts only float32 to 8-bit floats.
    return x if x.dtype == dtype else to_pool_dtype(x.astype(jnp.float32), dtype)
