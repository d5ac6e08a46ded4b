"""Rotate a step's queries and keys, and write its keys and values into the block pool, in place, by plain stores."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..gpu.common import WARPGROUP_LANES, interpret_params
from ..layout import FusedPool
from ..rope import Rope, rotate_halves
from .common import MMA_ROWS, compiler_params, synchronize

# The tokens of a thread block. Half a head of each is h / 32 numbers a thread: a load of 4 to 16 bytes.
TOKENS = 8
# The most query heads of a thread block: their loads are in flight together.
_QUERY_HEADS = 4


class _Queries(NamedTuple):
    """A step's queries, rotated, as the kernels read them."""

    all_tc: Array
    """All queries [t, n * h]."""
    decode_rkmh: Array
    """The queries of at least the first s rows, a kv head's padded with anything to a multiple of 16."""


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
) -> tuple[_Queries, FusedPool]:
    """Return q rotated, and the pool with k, rotated, and v at the tokens' slots; the null block is not written to.

    Without `rope` nothing is rotated. Keys and values are of the pool's dtype. Decodes are among the first `num_rows`
    tokens. The number of tokens must be a multiple of 8, or ValueError is raised.

    A thread block takes a kv head of 8 tokens, with some or all of its query heads. A head is loaded in halves, so that
    a thread has the numbers that it multiplies.
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
    padding = -g % MMA_ROWS
    shapes = ((t, n * h), (-(-num_rows // TOKENS) * TOKENS, k, g + padding, h)) if rope else ()
    kernel = plgpu.kernel(
        partial(_write_kernel, heads=heads, interpret=interpret),
        out_type=[jax.ShapeDtypeStruct(shape, q_tnh.dtype) for shape in shapes],
        grid=(t // TOKENS, k, g // heads if heads else 1),
        grid_names=("tokens", "kv_head", "part"),
        kernel_name="kv_write",
        scratch_types={"kv_smem": plgpu.SMEM((TOKENS, 2 * h), kv_pool.kv.dtype)},
        compiler_params=compiler_params(),
        interpret=interpret_params(interpret),
    )
    pool = jax.new_ref(kv_pool.kv)
    rotated = kernel(new_tc, slots_t, first_row, pool, *(rope or ()))
    if rope is None:
        padded = jnp.pad(q_tnh.reshape(t, k, g, h), ((0, 0), (0, 0), (0, padding), (0, 0)))
        return _Queries(q_tnh.reshape(t, -1), padded), FusedPool(jax.freeze(pool))
    return _Queries(*rotated), FusedPool(jax.freeze(pool))


def _write_kernel(
    new_tc: Any, slots_t: Any, first_row: Any, pool: Any, *rotation: Any, kv_smem: Any, heads: int, interpret: bool
) -> None:
    """Rotate `heads` query heads; the first thread block of a kv head writes its keys and values, too.

    `rotation` is cos, sin and the Refs for rotated queries and those of decodes; or nothing.
    """
    k, o, h = pool.shape[1], pool.shape[2], pool.shape[3] // 2
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
            kv_smem[:, pl.ds(i * (h // 2), h // 2)] = half
        synchronize(interpret)
        vector = plgpu.Layout.WG_STRIDED((2 * h,), 2 * h // WARPGROUP_LANES)
        for i, slot in enumerate(slots):

            @pl.when(slot >= o)
            def _(i: int = i, slot: Array = slot) -> None:
                token = plgpu.load(kv_smem.at[i], layout=vector)
                pool[row + lax.div(slot, o), kv_head, lax.rem(slot, o)] = token

    for i, query in enumerate(queries):
        rotated = rotate_halves(*query, *cos_and_sin)
        for ref, half in zip(halves(rotation[2], query_heads[i]), rotated, strict=True):
            ref[...] = half
        _store_decodes(rotation[3], first_token, kv_head, part * heads + i, rotated)


def _store_decodes(
    decode_rkmh: Any, first_token: Array, kv_head: Array, head: Array, halves: tuple[Array, ...]
) -> None:
    """Store the halves of a query head where decode reads it, if these tokens may be decodes."""

    @pl.when(first_token < decode_rkmh.shape[0])
    def _() -> None:
        for i, half in enumerate(halves):
            columns = pl.ds(i * half.shape[1], half.shape[1])
            decode_rkmh[pl.ds(first_token, TOKENS), kv_head, head, columns] = half
