"""Segment attention's kernel for TPUs equals the reference, in Pallas' interpreter, which detects races."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from pallas_kernels.segment_attention import SegmentAttention, SegmentShape, pick, tpu
from tests.pallas_kernels.segments import check_segments, make_segments

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation", "tpu_interpreter")]

OP = SegmentAttention("tpu", interpret=True)


@pytest.mark.parametrize(
    ("p", "lengths", "n", "h", "dtype"),
    [
        (300, [1, 220, 2, 30], 2, 64, "bfloat16"),
        (400, [3, 300, 20], 1, 72, "bfloat16"),
        (256, [128, 128], 1, 128, "float32"),  # nothing is masked
        (300, [10, 10], 1, 24, "float32"),  # a tile of padding alone
    ],
)
def test_it_equals_the_reference(
    p: int, lengths: list[int], n: int, h: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tpu, "_MOST_ROWS", 128)
    heads, starts, ends = make_segments(p, lengths, dtype, n=n, h=h, seed=h)
    check_segments(OP, [heads[0] * (8 / h) ** 0.5, *heads[1:]], starts, ends)


def test_a_tpu_gets_it_for_the_heads_that_it_takes() -> None:
    shape = SegmentShape(16, 72, jnp.dtype("bfloat16"))
    assert pick([shape], "tpu") == (SegmentAttention("tpu"), None)
    assert pick([shape], "cpu", "tpu")[0] == OP
    op, reason = pick([shape._replace(head_dim=264)], "tpu")
    assert op == SegmentAttention()
    assert "at most 256" in str(reason)
