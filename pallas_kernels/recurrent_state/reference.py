"""The loop over tokens that all references of recurrent state use."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .batch import StateBatch


def walk(
    pool: np.ndarray,
    batch: StateBatch,
    *,
    layer: int,
    num_layers: int,
    step: Callable[[np.ndarray, int], np.ndarray],
) -> np.ndarray:
    """Update each sequence's state by its rows, and return the pool after the step.

    `step` returns the state after a row, by the state before it and the row's number.
    """
    before, pool = pool, np.array(pool)
    first_slot = layer * (len(pool) // num_layers)
    fields = (batch.query_starts_s, batch.query_ends_s, batch.read_slots_s, batch.write_slots_s)
    sequences = zip(*map(np.asarray, (*fields, batch.all_save_ends_s, batch.save_slots_s)), strict=True)
    row_slots_t = None if batch.row_slots_t is None else np.asarray(batch.row_slots_t)
    for start, end, read, write, save_end, save in sequences:
        if start == end:
            continue
        state = np.array(before[first_slot + read]) if read else np.zeros_like(before[0])
        for row in range(start, end):
            state = step(state, row)
            if save and row + 1 == save_end:
                pool[first_slot + save] = state
            if row_slots_t is not None and row_slots_t[row]:
                pool[first_slot + row_slots_t[row]] = state
        pool[first_slot + write] = state
    return pool
