"""Rotate a step's queries and keys, and write its keys and values into the block pool, in place, by plain stores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..gpu import write
from ..gpu.common import WARPGROUP_LANES
from .common import MMA_ROWS, synchronize


def rotate_and_write(*arrays: Any, interpret: bool = False, **sizes: Any) -> Any:
    """See `gpu.write.rotate_and_write`; keys and values are of the pool's dtype, and decode takes q's."""
    writing = write.Writing(
        store=partial(_store_tokens, interpret=interpret),
        finish=lambda: None,
        head_rows=MMA_ROWS,
        decode_queries=lambda q, _: q,
    )
    return write.rotate_and_write(*arrays, interpret=interpret, writing=writing, **sizes)


def _store_tokens(
    kv_smem: Any, pool: Any, slots: Sequence[Array], first_row: Array, kv_head: Array, *, interpret: bool
) -> None:
    synchronize(interpret)
    o, width = pool.shape[2:]
    vector = plgpu.Layout.WG_STRIDED((width,), width // WARPGROUP_LANES)
    for i, slot in enumerate(slots):

        @pl.when(slot >= o)
        def _(i: int = i, slot: Array = slot) -> None:
            token = plgpu.load(kv_smem.at[i], layout=vector)
            pool[first_row + lax.div(slot, o), kv_head, lax.rem(slot, o)] = token
