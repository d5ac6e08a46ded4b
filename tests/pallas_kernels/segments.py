"""Ragged segments for the tests of segment attention, and the comparison with the reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.segment_attention import SegmentAttention
from pallas_kernels.segment_attention.reference import reference_segment_attention

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
SCALE = 0.3


def make_segments(
    p: int, lengths: list[int], dtype: Any, n: int = 3, h: int = 8, seed: int = 0
) -> tuple[list[jax.Array], np.ndarray, np.ndarray]:
    """Return q, k and v, with NaN in padding, and starts and ends.

    The rows that no segment takes are padding, half of them before the last segment.
    """
    rng = np.random.default_rng(seed)
    starts, ends = np.zeros(p, np.int32), np.zeros(p, np.int32)
    gap, start = (p - sum(lengths)) // 2, 0
    for number, length in enumerate(lengths):
        start += gap if number == len(lengths) - 1 else 0
        starts[start : start + length], ends[start : start + length] = start, start + length
        start += length
    heads = [rng.standard_normal((p, n, h)) for _ in range(3)]
    return [jnp.asarray(np.where((starts < ends)[:, None, None], x, np.nan), dtype) for x in heads], starts, ends


def check_segments(
    op: SegmentAttention, heads: list[jax.Array], starts: np.ndarray, ends: np.ndarray, **settings: Any
) -> None:
    """Compare an implementation with the reference."""
    out = np.asarray(jax.jit(partial(op, scale=SCALE, **settings))(*heads, starts, ends), np.float32)
    q, k, v = (np.asarray(x, np.float32) for x in heads)
    expected = reference_segment_attention(q, k, v, starts, ends, scale=SCALE)
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCES[heads[0].dtype.name])
    assert not out[starts >= ends].any()
