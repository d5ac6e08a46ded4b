"""Ragged steps over a poisoned pool, with row ends, for all implementations of paged attention."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import FusedPool
from pallas_kernels.trials.attention import LAYER, NUM_LAYERS, SCALE, Step, make_step, reference

__all__ = ["LAYER", "NUM_LAYERS", "ROW_ENDS", "SCALE", "Step", "fused", "make_step", "reference", "with_row_ends"]

ROW_ENDS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "causal": lambda position, _: position + 1,
    "bidirectional": lambda position, length: np.repeat(length, len(position)),
    "prefix": lambda position, length: np.maximum(position + 1, 2 * length // 3),
    # Each row sees less than the one before it, up to the diagonal.
    "falling": lambda position, length: np.maximum(position + 1, length - position // 2),
    # Two images with text before, between and behind.
    "images": lambda position, length: np.select(
        [(position >= length // 4) & (position < length // 2), (position > length // 2) & (position < length - 2)],
        [length // 2, length - 2],
        position + 1,
    ),
}
"""Functions of positions and a sequence's length that return how far rows see, by the kind of attention."""


def with_row_ends(step: Step, kind: str) -> Step:
    """Return the step with row ends; rows of padding have ends beyond everything."""
    batch = step.batch
    row_ends_t = np.full(len(batch.slots_t), 10**6, np.int32)
    sequences = zip(*map(np.asarray, (batch.query_starts_s, batch.query_ends_s, batch.context_lens_s)), strict=True)
    for start, end, length in sequences:
        row_ends_t[start:end] = ROW_ENDS[kind](np.arange(length - (end - start), length), length)
    return step._replace(batch=batch._replace(row_ends_t=jnp.asarray(row_ends_t)))


fused = FusedPool.of
"""Return the pool in the kernels' layout."""
