"""The producer of attention at chosen positions: it brings a tile's latents by a copy for each token.

A copy of one row does not fit the tiled and swizzled form that a wgmma reads. So rows come to a ring of plain buffers,
and pass through registers into the tile, where float8 becomes bfloat16 on the way. Half a tile is copied while the
other one passes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .sizes import PART_COLUMNS, TILE

HALF = TILE // 2
"""The tokens of a buffer of the ring: each warp passes 8 of them."""
SLOT_TILES = 2
"""The tiles whose slots are in shared memory."""


def gather(refs: Any, item: Any, first_tile: Array, wait_until_free: Callable[[Any, Array], None]) -> None:
    """Bring all tiles of an item, which is not empty."""
    bring_slots = partial(_bring_slots, refs, item)
    bring_slots(jnp.int32(0))
    pl.when(item.num_tiles > 1)(partial(bring_slots, jnp.int32(1)))
    plgpu.barrier_wait(refs.barriers.slots.at[0])
    for half in range(2):
        _copy_half(refs, jnp.int32(0), half)

    def bring(j: Array, _: None) -> None:
        stage = lax.rem(first_tile + j, refs.config.stages)
        for half in range(2):
            plgpu.barrier_wait(refs.barriers.raw.at[half])
            if half == 0:
                wait_until_free(refs, first_tile + j)
            _pass_half(refs, stage, half)
            # All threads have read the buffer, and the slots of this tile before.
            plgpu.commit_smem()
            if half == 0:
                pl.when(j + 2 < item.num_tiles)(partial(bring_slots, j + 2))
            else:
                plgpu.barrier_arrive(refs.barriers.tile_full.at[stage])
            pl.when(j + 1 < item.num_tiles)(partial(_bring_half, refs, j + 1, half))

    lax.fori_loop(0, item.num_tiles, bring, None)


def _bring_slots(refs: Any, item: Any, j: Array) -> None:
    """Load the slots of an item's j-th tile."""
    index = lax.rem(j, SLOT_TILES)
    [slots_tk] = refs.tokens
    source = slots_tk.at[item.row, pl.ds(pl.multiple_of(item.start + j * TILE, TILE), TILE)]
    plgpu.copy_gmem_to_smem(source, refs.buffers.slots.at[index], refs.barriers.slots.at[index])


def _bring_half(refs: Any, j: Array, half: int) -> None:
    """Start to copy half of an item's j-th tile, once its slots are in shared memory."""
    index = lax.rem(j, SLOT_TILES)
    if half == 0:
        plgpu.barrier_wait(refs.barriers.slots.at[index])
    _copy_half(refs, index, half)


def _copy_half(refs: Any, index: Array, half: int) -> None:
    """Start to copy half of the tile with these slots, a copy for each token."""
    for i in range(HALF):
        slot = refs.buffers.slots[index, half * HALF + i]
        plgpu.copy_gmem_to_smem(
            refs.pool.at[slot],
            refs.buffers.raw.at[half, pl.ds(i, 1)],
            refs.barriers.raw.at[half],
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )


def _pass_half(refs: Any, stage: Array, half: int) -> None:
    """Bring half a tile into the form of a wgmma's operand."""
    layout = plgpu.Layout.SMEM_GMEM_COPY((HALF, PART_COLUMNS), jnp.bfloat16, 128)
    for column in range(0, refs.pool.shape[2], PART_COLUMNS):
        columns = pl.ds(column, PART_COLUMNS)
        part = plgpu.load(refs.buffers.raw.at[half, :, columns], layout=layout, optimized=False)
        if part.dtype != jnp.bfloat16:
            # The hardware takes float8 to float16 only.
            part = part.astype(jnp.float32).astype(jnp.bfloat16)
        refs.buffers.latents[stage, pl.ds(half * HALF, HALF), columns] = part
