"""The rows of tables of positions, by the distance of two tokens."""

from __future__ import annotations

import numpy as np


def bucket_rows(distances: np.ndarray, num_buckets: int, max_distance: int | None) -> np.ndarray:
    """Return the row in [0, 2 num_buckets) for each distance, a query's position minus a key's.

    Row `num_buckets` is distance 0. The distances of the inner half have rows of their own, and further ones share
    rows: their logarithms are cut into equal parts up to `max_distance`. Without it, each distance has its own row up
    to the last ones.
    """
    if max_distance is None:
        return np.clip(distances + num_buckets, 0, 2 * num_buckets - 1)
    # In float32, as in HF: a logarithm that is an ulp larger may have the next row.
    middle = num_buckets // 2
    lengths = np.maximum(np.abs(distances), middle)
    logs = np.log((lengths / middle).astype(np.float32)) / np.log(np.float32((max_distance - 1) / middle))
    far = np.ceil(logs * np.float32(middle - 1)).astype(np.int64) + middle
    buckets = np.where(np.abs(distances) <= middle, distances, np.sign(distances) * far)
    return np.clip(buckets + num_buckets, 0, 2 * num_buckets - 1)
