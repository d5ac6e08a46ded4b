"""Ragged steps for all implementations of attention over latents, and the comparison of pools."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels.latent_attention import LatentPool
from pallas_kernels.trials.latents import LAYER, NUM_LAYERS, SCALE, Step, make, reference

__all__ = ["LAYER", "NUM_LAYERS", "SCALE", "Step", "assert_pools_equal", "float32", "make", "reference"]


def float32(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32)


def assert_pools_equal(pool: LatentPool, expected: LatentPool) -> None:
    """Check that pools are equal except for the null block, where padding goes."""
    first = LAYER * (len(expected.latents) // NUM_LAYERS)
    got, want = (np.delete(float32(x.latents), first, axis=0) for x in (pool, expected))
    np.testing.assert_array_equal(got, want)
