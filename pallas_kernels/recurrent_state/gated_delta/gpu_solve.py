"""Solve for the corrections of tiles on Hopper: each thread block takes one tile of one value head.

As in `chunks.py`, (I + A)^-1 is built from the inverses of its diagonal blocks: in registers, in float32, with its
halves in shared memory for the tensor cores. Its products with values and keys, u and w, are stored in the form that
`gpu_tiles.py` loads.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.common import LOG2_E, compiler_params, interpret_params, tiled_smem
from pallas_kernels.recurrent_state.chunks import TILE_ROWS, Tiles
from pallas_kernels.recurrent_state.gpu import MATRIX, OF_COLUMNS, OF_ROWS, PART, load_vector, spread
from pallas_kernels.recurrent_state.gpu_tiles import halves_of, parts_of, product, store_halves


class Relations(NamedTuple):
    """The inputs of A and scores besides keys, for n tiles of h heads with one decay a token.

    All except the queries are float32.
    """

    q: Array
    """Queries [n, key heads, c, key_dim] in bfloat16; keys have the same form."""
    q_norm: Array
    """The factors of queries [n, h, c]."""
    k_norm: Array
    """The factors of keys [n, h, c]."""
    a_factor: Array
    """The factors of A's rows [n, h, c]: `k_norm` times beta. So no vector is loaded in two layouts."""
    log_decay: Array
    """Logarithms of decays [n, h, c]."""


class _Smem(NamedTuple):
    """The shared memory, for tiles of c rows. A matrix' lower half lies below its upper half."""

    queries: Any
    values: Any
    keys: Any
    inverse: Any
    """Halves of the inverse [1, 2 c, c]."""
    other: Any
    """A float32 matrix [c, PART] or halves [1, 2 c, PART]: of A or an operand, then of u or w on its way to memory."""


def solve(
    tiles: Tiles,
    relations_or_a: Array | Relations,
    beta_nhc: Array,
    key_factor_nhc: Array,
    v_nhcd: Array,
    k_nhck: Array,
    *,
    interpret: bool,
) -> tuple[Array, ...]:
    """Return u [n, h, c, value_dim] and the halves of w [n, h, 2 c, key_dim] of tiles, undefined for empty ones.

    With the inverse of I + A, u is (inverse * beta) v and w is (inverse * key_factor) k, with factors of its columns.
    `relations_or_a` is A [n, h, c, c] in float32, or `Relations`: then the halves of scores [n, h, 2 c, c] are returned
    too. Keys have h heads, or fewer, each shared by several value heads; float32 keys come in halves, with 2 c rows.
    """
    num_tiles, num_heads, _, value_dim = v_nhcd.shape
    key_dim = k_nhck.shape[-1]
    square, of_tiles = (1, 2 * TILE_ROWS, TILE_ROWS), (num_tiles, num_heads)
    relations = relations_or_a if isinstance(relations_or_a, Relations) else None
    smem = _Smem(
        queries=tiled_smem(relations.q.shape[2:], relations.q.dtype) if relations else None,
        values=tiled_smem(v_nhcd.shape[2:], v_nhcd.dtype),
        keys=tiled_smem(k_nhck.shape[2:], k_nhck.dtype),
        inverse=tiled_smem(square, jnp.bfloat16),
        other=plgpu.RefUnion(tiled_smem((TILE_ROWS, PART), jnp.float32), tiled_smem(square, jnp.bfloat16)),
    )
    kernel = plgpu.kernel(
        partial(_kernel, has_a=relations is None, group=num_heads // k_nhck.shape[1]),
        out_type=(
            jax.ShapeDtypeStruct((*of_tiles, TILE_ROWS, value_dim), jnp.float32),
            jax.ShapeDtypeStruct((*of_tiles, 2 * TILE_ROWS, key_dim), jnp.bfloat16),
            *[jax.ShapeDtypeStruct((*of_tiles, 2 * TILE_ROWS, TILE_ROWS), jnp.bfloat16)] * (relations is not None),
        ),
        grid=(num_heads, num_tiles),
        grid_names=("head", "tile"),
        kernel_name="gated_delta_solve",
        scratch_types={
            "smem": smem,
            "first_full": plgpu.Barrier(num_arrivals=2 if relations else 1),
            "second_full": plgpu.Barrier(num_arrivals=1 if relations else 2),
        },
        compiler_params=compiler_params(),
        interpret=interpret_params(interpret),
    )
    return kernel(
        tiles.starts_n, tiles.ends_n, beta_nhc, key_factor_nhc, v_nhcd, k_nhck, *(relations or [relations_or_a])
    )


def _kernel(starts_n, ends_n, *refs, has_a: bool, group: int, smem, first_full, second_full):
    tile = lax.axis_index("tile")
    run = partial(_solve, tile, *refs, has_a=has_a, group=group, smem=smem, first=first_full, second=second_full)
    pl.when(starts_n[tile] < ends_n[tile])(run)


def _solve(tile, beta, key_factor, v, k, *refs, has_a: bool, group: int, smem, first, second):
    head = lax.axis_index("head")
    key_head = lax.div(head, group)
    square, halves = smem.other
    num_given = 1 if has_a else len(Relations._fields)
    (first_input, *vectors), (u, w, *scores) = refs[:num_given], refs[num_given:]
    if has_a:
        plgpu.copy_gmem_to_smem(first_input.at[tile, head], square, first)
        plgpu.copy_gmem_to_smem(k.at[tile, key_head], smem.keys, second)
    else:
        plgpu.copy_gmem_to_smem(first_input.at[tile, key_head], smem.queries, first)
        plgpu.copy_gmem_to_smem(k.at[tile, key_head], smem.keys, first)
    plgpu.copy_gmem_to_smem(v.at[tile, head], smem.values, second)
    columns = [load_vector(x.at[tile, head], OF_COLUMNS) for x in (beta, key_factor)]
    if has_a:
        plgpu.barrier_wait(first)
        a_cc = plgpu.load(square, layout=MATRIX)
    else:
        a_cc = _relate([x.at[tile, head] for x in vectors], scores[0].at[tile, head], smem, first)
    inverse_cc = _inverted(a_cc, smem)
    plgpu.barrier_wait(second)

    def multiply(factor_c, right):
        """Yield the product of the inverse and a matrix by slices of columns."""
        zero = _opaque_zero()
        plgpu.commit_smem()  # all threads are done with the last products
        store_halves(smem.inverse.at[zero], inverse_cc * spread(factor_c, inverse_cc.shape, 1))
        plgpu.commit_smem()
        for start in range(0, right.shape[1], PART):
            part = pl.ds(start, PART)
            yield part, product(halves_of(smem.inverse.at[zero]), [x.at[:, part] for x in parts_of(right)])

    for part, u_cd in multiply(columns[0], smem.values):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        square[...] = u_cd
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(square, u.at[tile, head, :, part])
    for part, w_ck in multiply(columns[1], smem.keys):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store_halves(halves.at[0], w_ck)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(halves.at[0], w.at[tile, head, :, part])
    plgpu.wait_smem_to_gmem(0)


def _relate(vectors: list[Any], scores: Any, smem: _Smem, full: Any) -> Array:
    """Return A [c, c] in float32, and store the halves of scores; see `relate` of `chunks.py`."""
    zero = _opaque_zero()
    inverse, other = smem.inverse.at[zero], smem.other[1].at[zero]
    row_cc, column_cc = _indices()
    q_norm, k_norm, a_factor, log_decay = vectors
    of_rows = [load_vector(x, OF_ROWS) for x in (q_norm, a_factor)]
    of_columns = [load_vector(x, OF_COLUMNS) for x in (k_norm, log_decay)]
    shape = row_cc.shape
    is_before = column_cc <= row_cc
    # Logarithms are summed up by a product with ones.
    logs_cc = spread(of_columns[1] * LOG2_E, shape, 1)
    zeros = jnp.zeros_like(logs_cc)
    store_halves(inverse, jnp.where(is_before, logs_cc, zeros))
    ones, _ = halves_of(other)
    ones[...] = jnp.where(row_cc > column_cc, jnp.ones_like(zeros), zeros).astype(jnp.bfloat16)
    plgpu.commit_smem()
    decay_cc = jnp.where(is_before, jnp.exp2(product(halves_of(inverse), [ones])), zeros)
    decay_cc = decay_cc * spread(of_columns[0], shape, 1)
    plgpu.barrier_wait(full)
    keys = smem.keys.at[:, :]
    scores_cc = product([smem.queries], [keys.T]) * decay_cc * spread(of_rows[0], shape, 0)
    plgpu.commit_smem()  # all threads are done with the ones
    store_halves(other, scores_cc)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(other, scores)
    overlaps_cc = product([keys], [keys.T]) * decay_cc * spread(of_rows[1], shape, 0)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    return jnp.where(row_cc > column_cc, overlaps_cc, zeros)


def _indices() -> tuple[Array, Array]:
    """Return the row and column numbers [c, c] of a tile's square matrices."""
    iota = partial(plgpu.broadcasted_iota, jnp.int32, (TILE_ROWS, TILE_ROWS), layout=MATRIX)
    return iota(0), iota(1)


def _inverted(a_cc: Array, smem: _Smem) -> Array:
    """Return (I + a)^-1 in float32, see `inverted` of `chunks.py`."""
    row_cc, column_cc = _indices()

    def border(level: int) -> Array:
        row, column = (lax.div(x, jnp.full_like(x, 2**level)) for x in (row_cc, column_cc))
        are_neighbours = (row - column == 1) & (lax.rem(row, jnp.full_like(row, 2)) == 1)
        return jnp.where(are_neighbours, a_cc, jnp.zeros_like(a_cc))

    inverse_cc = jnp.where(row_cc == column_cc, jnp.ones_like(a_cc), jnp.zeros_like(a_cc)) - border(0)
    for level in range(1, (TILE_ROWS - 1).bit_length()):
        zero = _opaque_zero()
        inverse, other = smem.inverse.at[zero], smem.other[1].at[zero]
        plgpu.commit_smem()  # all threads are done with its old contents
        store_halves(inverse, inverse_cc)
        store_halves(other, border(level))
        plgpu.commit_smem()
        left_cc = product(halves_of(inverse), halves_of(other))
        plgpu.commit_smem()
        store_halves(other, left_cc)
        plgpu.commit_smem()
        inverse_cc = inverse_cc - product(halves_of(other), halves_of(inverse))
    return inverse_cc


def _opaque_zero() -> Array:
    """Return a 0 that is opaque to LLVM.

    Otherwise it computes all matrix descriptors first and holds them in registers.
    """
    return lax.optimization_barrier(jnp.int32(0))
