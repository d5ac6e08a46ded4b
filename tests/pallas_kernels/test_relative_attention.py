"""Relative attention equals the reference: ragged sequences, gaps that hold NaN, rows that depend on no others."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.relative_attention import RelativeAttention, bucket_rows
from pallas_kernels.relative_attention.reference import reference_relative_attention

pytestmark = pytest.mark.cpu_kernels

TOLERANCES = {"float32": 2e-5, "bfloat16": 3e-2}
CASES: dict[str, tuple[list[int], int, int | None]] = {
    "one token": ([1], 16, 64),
    "ragged": ([1, 37, 2, 64, 65], 16, 80),
    "several tiles": ([200, 3, 130], 32, 200),
    "a row for each distance": ([40, 90], 96, None),
    "distances beyond the last row": ([90], 8, None),
}
"""The lengths of sequences, the buckets on each side, and the largest distance of these."""
SCALE = 0.4


def make_heads(lengths: list[int], num_buckets: int, dtype: str) -> tuple[list[jax.Array], np.ndarray, np.ndarray]:
    """Return fresh random heads of tokens and of distances; a gap of NaN follows each sequence."""
    rng = np.random.default_rng()
    starts = np.cumsum([0, *[length + 3 for length in lengths]])[:-1].astype(np.int32)
    ends = starts + np.asarray(lengths, np.int32)
    sizes = [(int(ends[-1]) + 3, 2, 8)] * 3 + [(2 * num_buckets, 2, 8)] * 2
    heads = [rng.standard_normal(size).astype(np.float32) for size in sizes]
    for x in heads[:3]:
        for end in ends:
            x[end : end + 3] = np.nan
    # Padding has no rows.
    return [jnp.asarray(x, dtype) for x in heads], np.append(starts, 0), np.append(ends, 0)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", CASES)
def test_it_equals_the_reference(case: str, dtype: str) -> None:
    lengths, num_buckets, max_distance = CASES[case]
    heads, starts, ends = make_heads(lengths, num_buckets, dtype)
    settings: dict[str, Any] = {"scale": SCALE, "max_distance": max_distance}
    op = jax.jit(partial(RelativeAttention(), **settings, longest=max(lengths)))
    got = np.asarray(op(*heads, starts, ends), np.float32)
    arrays: list[Any] = [*(np.asarray(x, np.float64) for x in heads), starts, ends]
    expected = reference_relative_attention(*arrays, **settings)
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCES[dtype])
    assert got.dtype == np.float32


def test_a_row_has_the_same_bits_alone() -> None:
    lengths = [70, 5, 140, 1]
    heads, starts, ends = make_heads(lengths, 32, "float32")
    op = jax.jit(partial(RelativeAttention(), scale=SCALE, max_distance=200, longest=140))
    together = np.asarray(op(*heads, starts, ends))
    for start, end in zip(starts[:-1], ends[:-1], strict=True):
        alone = [x[start:end] for x in heads[:3]]
        ends_s = np.asarray([end - start], np.int32)
        one = np.asarray(op(*alone, *heads[3:], 0 * ends_s, ends_s))
        np.testing.assert_array_equal(one, together[start:end])


def test_rows_of_distances() -> None:
    """Near distances have rows of their own; far ones share rows, and the sides are mirrored."""
    distances = np.arange(-600, 601)
    rows = bucket_rows(distances, 256, 512)
    np.testing.assert_array_equal(rows[600 - 128 : 600 + 129], np.arange(128, 385))
    steps = np.diff(rows)
    assert set(steps.tolist()) == {0, 1}
    np.testing.assert_array_equal((rows + rows[::-1])[100:-100], 512)
    assert (rows[600 + 511], rows[-1], rows[0]) == (511, 511, 0)


def test_rows_are_those_of_hf() -> None:
    """The expected rows are from HF's `make_log_bucket_position`, with the numbers of deberta-v3."""
    distances = np.array([1, 127, 128, 129, 130, 200, 255, 256, 300, 400, 510, 511, 512, 1000])
    rows = [257, 383, 384, 385, 386, 425, 448, 448, 463, 489, 511, 511, 511, 511]
    np.testing.assert_array_equal(bucket_rows(distances, 256, 512), rows)
    mirrored = [512 - row for row in rows[:-2]]
    np.testing.assert_array_equal(bucket_rows(-distances, 256, 512), [*mirrored, 0, 0])


def test_shapes_that_do_not_fit_are_refused() -> None:
    heads, starts, ends = make_heads([5], 8, "float32")
    arrays: list[Any] = [*heads[:4], heads[4][1:], starts, ends]
    with pytest.raises(ValueError, match="do not fit"):
        RelativeAttention()(*arrays, scale=1.0, max_distance=None, longest=5)
    with pytest.raises(ValueError, match="no implementation 'gpu'"):
        RelativeAttention("gpu")
