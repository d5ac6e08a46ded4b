"""Ragged segments for the tests of segment attention, and the comparison with the reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from pallas_kernels.segment_attention import SegmentAttention
from pallas_kernels.segment_attention.reference import reference_segment_attention
from pallas_kernels.trials.segments import make_segments

__all__ = ["SCALE", "TOLERANCES", "check_segments", "make_segments"]

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
SCALE = 0.3


def check_segments(
    op: SegmentAttention, heads: list[jax.Array], starts: np.ndarray, ends: np.ndarray, **settings: Any
) -> None:
    """Compare an implementation with the reference."""
    out = np.asarray(jax.jit(partial(op, scale=SCALE, **settings))(*heads, starts, ends), np.float32)
    q, k, v = (np.asarray(x, np.float32) for x in heads)
    expected = reference_segment_attention(q, k, v, starts, ends, scale=SCALE)
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCES[heads[0].dtype.name])
    assert not out[starts >= ends].any()
