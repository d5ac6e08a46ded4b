"""Segment attention's kernel for Hopper equals the reference, in the GPU's interpreter, which detects races."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.segment_attention import SegmentAttention, SegmentShape, pick
from tests.pallas_kernels.segments import SCALE, check_segments, make_segments

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation")]

OP = SegmentAttention("gpu", interpret=True)


@pytest.mark.parametrize(
    ("p", "lengths", "n", "h"),
    [
        (300, [1, 220, 2, 30], 2, 64),
        (640, [3, 600, 20], 1, 72),  # more tiles of keys than stages
        (200, [20, 40, 64], 1, 80),
        (256, [128, 128], 1, 128),  # nothing is masked
        (300, [10, 10], 1, 24),  # tiles of padding alone
    ],
)
def test_it_equals_the_reference(p: int, lengths: list[int], n: int, h: int) -> None:
    heads, starts, ends = make_segments(p, lengths, "bfloat16", n=n, h=h, seed=h)
    check_segments(OP, [heads[0] * (8 / h) ** 0.5, *heads[1:]], starts, ends)


def test_a_row_has_the_same_bits_whatever_is_in_other_segments() -> None:
    heads, starts, ends = make_segments(256, [80, 100, 76], "bfloat16", n=1, h=32)
    attend = jax.jit(partial(OP, scale=SCALE))
    together = np.asarray(attend(*heads, starts, ends), np.float32)
    others = [x.at[:80].set(7.0).at[180:].set(-3.0) for x in heads]
    np.testing.assert_array_equal(np.asarray(attend(*others, starts, ends), np.float32)[80:180], together[80:180])


def test_hopper_gets_it_for_the_heads_that_it_takes() -> None:
    shape = SegmentShape(16, 72, jnp.dtype("bfloat16"))
    assert pick([shape], "gpu", architecture="9.0") == (SegmentAttention("gpu"), None)
    assert pick([shape], "cpu", "gpu")[0] == OP
    for wrong, match in (({"head_dim": 136}, "at most 128"), ({"dtype": jnp.dtype("float32")}, "must be bfloat16")):
        op, reason = pick([shape._replace(**wrong)], "gpu", architecture="9.0")
        assert op == SegmentAttention("xla_counted")
        assert match in str(reason)
