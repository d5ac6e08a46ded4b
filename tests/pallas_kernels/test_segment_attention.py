"""Segment attention equals the reference: ragged segments, padding that holds NaN, rows that depend on no others."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.implementations import SEGMENT_ATTENTION
from pallas_kernels.segment_attention import SegmentAttention
from pallas_kernels.segment_attention.reference import reference_segment_attention

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
SCALE = 0.3
SEGMENTS = {
    "one": (5, [5]),
    "ragged": (300, [1, 255, 2, 30]),
    "longer than two tiles": (700, [3, 600, 40]),
}
"""The number of rows, and the lengths of the segments; the other rows are padding, half of them before the last
segment."""


def make(
    p: int, lengths: list[int], dtype: Any, n: int = 3, h: int = 8
) -> tuple[list[jax.Array], np.ndarray, np.ndarray]:
    """Return q, k and v, with NaN in padding, and starts and ends."""
    rng = np.random.default_rng(0)
    starts, ends = np.zeros(p, np.int32), np.zeros(p, np.int32)
    gap, start = (p - sum(lengths)) // 2, 0
    for number, length in enumerate(lengths):
        start += gap if number == len(lengths) - 1 else 0
        starts[start : start + length], ends[start : start + length] = start, start + length
        start += length
    heads = [rng.standard_normal((p, n, h)) for _ in range(3)]
    return [jnp.asarray(np.where((starts < ends)[:, None, None], x, np.nan), dtype) for x in heads], starts, ends


@pytest.mark.parametrize("name", SEGMENT_ATTENTION)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", SEGMENTS)
def test_it_equals_the_reference(case: str, dtype: str, name: str) -> None:
    heads, starts, ends = make(*SEGMENTS[case], dtype)
    q, k, v = heads
    out = np.asarray(jax.jit(partial(SegmentAttention(name), scale=SCALE))(q, k, v, starts, ends), np.float32)
    q, k, v = (np.asarray(x, np.float32) for x in heads)
    expected = reference_segment_attention(q, k, v, starts, ends, scale=SCALE)
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCES[dtype])
    assert not out[starts >= ends].any()


def test_arrays_that_do_not_fit_are_refused() -> None:
    (q, k, v), starts, ends = make(5, [5], "float32")
    with pytest.raises(ValueError, match="do not fit"):
        SegmentAttention()(q, k, v, jnp.asarray(starts[1:]), jnp.asarray(ends), scale=SCALE)
    with pytest.raises(ValueError, match="no implementation 'fast'"):
        SegmentAttention("fast")
