"""Segment attention equals the reference: ragged segments, padding that holds NaN, rows that depend on no others."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.implementations import SEGMENT_ATTENTION
from pallas_kernels.segment_attention import SegmentAttention, SegmentShape, pick, xla
from tests.pallas_kernels.segments import SCALE, TOLERANCES, check_segments, make_segments

pytestmark = pytest.mark.cpu_kernels

SEGMENTS = {
    "one": (5, [5]),
    "ragged": (300, [1, 255, 2, 30]),
    "longer than two tiles": (700, [3, 600, 40]),
}
"""The number of rows, and the lengths of the segments."""
HERE = [name for name, entry in SEGMENT_ATTENTION.items() if entry.platform in (None, "cpu")]


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", SEGMENTS)
def test_it_equals_the_reference(case: str, dtype: str, name: str) -> None:
    check_segments(SegmentAttention(name), *make_segments(*SEGMENTS[case], dtype))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("h", [24, 64, 72, 80, 128])
def test_a_cpu_kernel_takes_the_heads_of_towers(h: int, dtype: str) -> None:
    # Random sums of 128 products are larger than those of 8.
    heads, starts, ends = make_segments(200, [100, 70], dtype, n=2, h=h, seed=h)
    check_segments(SegmentAttention("cpu"), [heads[0] * (8 / h) ** 0.5, *heads[1:]], starts, ends)


@pytest.mark.parametrize("longest", [30, 64, 129, None])
def test_counted_loops_go_as_far_as_the_longest_segment(longest: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla, "_COUNTED_TILE", 64)
    # The first row moves the others to where some tile sees the most on either side of it.
    lengths = [1, *[longest or 600] * (600 // (longest or 600)), 8]
    check_segments(SegmentAttention("xla_counted"), *make_segments(700, lengths, "float32"), longest=longest)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_row_on_a_cpu_has_the_same_bits_whatever_is_in_other_segments(dtype: str) -> None:
    heads, starts, ends = make_segments(400, [130, 150, 100], dtype, h=16)
    op = jax.jit(partial(SegmentAttention("cpu"), scale=SCALE))
    together = np.asarray(op(*heads, starts, ends), np.float32)
    second = slice(130, 280)
    alone = np.zeros_like(starts), np.zeros_like(ends)
    for one, every in zip(alone, (starts, ends), strict=True):
        one[second] = every[second]
    others_nan = [x.at[:130].set(jnp.nan).at[280:].set(jnp.nan) for x in heads]
    np.testing.assert_array_equal(np.asarray(op(*others_nan, *alone), np.float32)[second], together[second])


def test_a_platform_gets_its_kernel_or_the_reason_why_not() -> None:
    shape = SegmentShape(3, 8, jnp.dtype("float32"))
    assert pick([shape], "cpu") == (SegmentAttention("cpu"), None)
    op, reason = pick([shape._replace(head_dim=4)], "cpu")
    assert op == SegmentAttention()
    assert "multiples of 8" in str(reason)
    # A loop whose length only the device knows would wait for a GPU's host.
    assert pick([shape], "gpu", architecture="8.0")[0] == SegmentAttention("xla_counted")


def test_arrays_that_do_not_fit_are_refused() -> None:
    (q, k, v), starts, ends = make_segments(5, [5], "float32")
    with pytest.raises(ValueError, match="do not fit"):
        SegmentAttention()(q, k, v, jnp.asarray(starts[1:]), jnp.asarray(ends), scale=SCALE)
    with pytest.raises(ValueError, match="no implementation 'fast'"):
        SegmentAttention("fast")
    with pytest.raises(ValueError, match="'cpu' cannot run this"):
        SegmentAttention("cpu")(q[..., :4], k[..., :4], v[..., :4], jnp.asarray(starts), jnp.asarray(ends), scale=SCALE)
