"""Repetition detection does what its plain definition says."""

from __future__ import annotations

from array import array
from typing import ClassVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxllm.sampling_params import RepetitionDetectionParams
from jaxllm.scheduling.repetition import repeats


def expected(output: list[int], smallest: int, largest: int, count: int) -> bool:
    return any(
        output[len(output) - size * count :] == output[len(output) - size :] * count
        for size in range(max(1, smallest), largest + 1)
        if size * count <= len(output)
    )


@st.composite
def outputs(draw: st.DrawFn) -> list[int]:
    """Draw outputs that repeat often: copies of a few pieces, with faults. 256 and 1 have the same bytes."""
    token = st.sampled_from([0, 1, 256])
    pieces = draw(st.lists(st.tuples(st.lists(token, min_size=1, max_size=6), st.integers(1, 8)), max_size=4))
    return [token_id for piece, times in pieces for token_id in piece * times]


@settings(max_examples=200)
@given(outputs(), st.integers(0, 8), st.integers(0, 12), st.integers(2, 5), st.lists(st.integers(0, 1), max_size=4))
@example([1, 256], 1, 1, 2, [])
@example([0] * 100 + [1] + [0] * 40 + [1] + [0] * 40, 1, 50, 2, [])
def test_equals_the_definition(output: list[int], smallest: int, more: int, count: int, prompt: list[int]):
    params = RepetitionDetectionParams(max_pattern_size=smallest + more, min_pattern_size=smallest, min_count=count)
    token_ids = array("i", prompt + output)
    assert repeats(token_ids, len(prompt), params) == expected(output, smallest, smallest + more, count)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 900])
def test_patterns_of_every_length_are_compared_whole(size: int):
    params = RepetitionDetectionParams(max_pattern_size=1000, min_pattern_size=1, min_count=3)
    pattern = list(range(size))
    assert repeats(array("i", pattern * 3), 0, params)
    assert not repeats(array("i", pattern * 3), 1, params), "the prompt does not count"
    for fault in {0, size // 2, size - 1}:
        broken = pattern * 3
        broken[fault] = -1
        assert not repeats(array("i", broken), 0, params)


def test_off():
    assert not repeats(array("i", [1] * 50), 0, RepetitionDetectionParams())


class WatchedArray(array):
    """Notes how much of it is read."""

    read: ClassVar[list[int]] = []

    def __getitem__(self, key):
        assert isinstance(key, slice)
        WatchedArray.read.append(len(range(*key.indices(len(self)))))
        return super().__getitem__(key)


def test_only_the_tail_is_read():
    """The cost of a token does not grow with the output."""
    token_ids = WatchedArray("i", range(100_000))
    WatchedArray.read.clear()
    assert not repeats(token_ids, 0, RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=2))
    assert WatchedArray.read == [8]
