"""Solve for the corrections of tiles on Hopper: each thread block has a tile of a value head.

See `chunks.py`: (I + A)^-1 grows out of those of its diagonal blocks, here in registers, in float32, with its halves in
shared memory for the tensor cores. Its products with values and keys leave as the next kernel takes them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.common import compiler_params, interpret_params, tiled_smem
from pallas_kernels.recurrent_state.chunks import TILE_ROWS, Tiles
from pallas_kernels.recurrent_state.gpu import MATRIX, OF_COLUMNS, PART, load_vector, spread
from pallas_kernels.recurrent_state.gpu_tiles import halves_of, parts_of, product, store_halves


class _Smem(NamedTuple):
    """Shared memory. Halves lie one below the other."""

    values: Any
    keys: Any
    inverse: Any
    """Halves of the inverse [1, 2 c, c]."""
    other: Any
    """A [c, c], or halves [1, 2 c, c]; then columns of u [c, part], or halves of those of w, on their way to memory."""


def solve(
    tiles: Tiles,
    a_nhcc: Array,
    beta_nhc: Array,
    key_factor_nhc: Array,
    v_nhcd: Array,
    k_nhck: Array,
    *,
    interpret: bool,
) -> tuple[Array, Array]:
    """Return u [n, h, c, value_dim] and the halves of w [n, h, 2 c, key_dim] of tiles, undefined for empty ones.

    Keys are of as many heads as h or of fewer, each for several; those in float32 are given as halves [.., 2 c, ..].
    """
    num_tiles, num_heads, _, value_dim = v_nhcd.shape
    key_dim = k_nhck.shape[-1]
    square = 1, 2 * TILE_ROWS, TILE_ROWS
    smem = _Smem(
        values=tiled_smem(v_nhcd.shape[2:], v_nhcd.dtype),
        keys=tiled_smem(k_nhck.shape[2:], k_nhck.dtype),
        inverse=tiled_smem(square, jnp.bfloat16),
        other=plgpu.RefUnion(tiled_smem((TILE_ROWS, PART), jnp.float32), tiled_smem(square, jnp.bfloat16)),
    )
    kernel = plgpu.kernel(
        partial(_kernel, group=num_heads // k_nhck.shape[1]),
        out_type=(
            jax.ShapeDtypeStruct((num_tiles, num_heads, TILE_ROWS, value_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_tiles, num_heads, 2 * TILE_ROWS, key_dim), jnp.bfloat16),
        ),
        grid=(num_heads, num_tiles),
        grid_names=("head", "tile"),
        kernel_name="gated_delta_solve",
        scratch_types={"smem": smem, "a_full": plgpu.Barrier(), "others_full": plgpu.Barrier(num_arrivals=2)},
        compiler_params=compiler_params(),
        interpret=interpret_params(interpret),
    )
    return kernel(tiles.starts_n, tiles.ends_n, a_nhcc, beta_nhc, key_factor_nhc, v_nhcd, k_nhck)


def _kernel(starts_n, ends_n, *refs, group: int, smem, a_full, others_full):
    tile = lax.axis_index("tile")
    pl.when(starts_n[tile] < ends_n[tile])(partial(_solve, tile, *refs, group, smem, a_full, others_full))


def _solve(tile, a, beta, key_factor, v, k, u, w, group, smem, a_full, others_full):
    head = lax.axis_index("head")
    square, halves = smem.other
    plgpu.copy_gmem_to_smem(a.at[tile, head], square, a_full)
    plgpu.copy_gmem_to_smem(v.at[tile, head], smem.values, others_full)
    plgpu.copy_gmem_to_smem(k.at[tile, lax.div(head, group)], smem.keys, others_full)
    columns = [load_vector(x.at[tile, head], OF_COLUMNS) for x in (beta, key_factor)]
    plgpu.barrier_wait(a_full)
    inverse_cc = _inverted(plgpu.load(square, layout=MATRIX), smem)
    plgpu.barrier_wait(others_full)

    def multiply(factor_c, right):
        only = _opaque_zero()
        plgpu.commit_smem()  # all threads are done with the last products
        store_halves(smem.inverse.at[only], inverse_cc * spread(factor_c, inverse_cc.shape, 1))
        plgpu.commit_smem()
        for first in range(0, right.shape[1], PART):
            part = [x.at[:, pl.ds(first, PART)] for x in parts_of(right)]
            yield pl.ds(first, PART), product(halves_of(smem.inverse.at[only]), part)

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


def _inverted(a_cc: Array, smem: _Smem) -> Array:
    """Return (I + a)^-1, see `inverted` of `chunks.py`."""
    row_cc, column_cc = (plgpu.broadcasted_iota(jnp.int32, a_cc.shape, axis, layout=MATRIX) for axis in (0, 1))

    def border(level: int) -> Array:
        row, column = (lax.div(x, jnp.full_like(x, 2**level)) for x in (row_cc, column_cc))
        are_neighbours = (row - column == 1) & (lax.rem(row, jnp.full_like(row, 2)) == 1)
        return jnp.where(are_neighbours, a_cc, jnp.zeros_like(a_cc))

    inverse_cc = jnp.where(row_cc == column_cc, jnp.ones_like(a_cc), jnp.zeros_like(a_cc)) - border(0)
    for level in range(1, (TILE_ROWS - 1).bit_length()):
        only = _opaque_zero()
        inverse, other = smem.inverse.at[only], smem.other[1].at[only]
        plgpu.commit_smem()  # all threads are done with what was there
        store_halves(inverse, inverse_cc)
        store_halves(other, border(level))
        plgpu.commit_smem()
        half_cc = product(halves_of(inverse), halves_of(other))
        plgpu.commit_smem()
        store_halves(other, half_cc)
        plgpu.commit_smem()
        inverse_cc = inverse_cc - product(halves_of(other), halves_of(inverse))
    return inverse_cc


def _opaque_zero() -> Array:
    """Return a 0 that LLVM does not know: else it computes all matrix descriptors first and holds them in registers."""
    return lax.optimization_barrier(jnp.int32(0))
