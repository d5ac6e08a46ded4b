"""Packed bits do what Python sets do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.constraints import bits


def as_set(bits_w: np.ndarray) -> set[int]:
    assert bits_w.dtype == np.int32
    return {i for i in range(bits_w.size * 32) if int(bits_w[i // 32]) & 0xFFFFFFFF & (1 << (i % 32))}


@given(st.integers(1, 200), st.data())
def test_equal_sets(vocab_size: int, data: st.DataObject):
    ids = st.lists(st.integers(0, vocab_size - 1), max_size=20)
    kept, dropped = data.draw(ids), data.draw(ids)
    every, some = bits.all_ids(vocab_size), bits.only(kept, vocab_size)
    assert every.shape == some.shape == (bits.num_words(vocab_size),)
    assert as_set(every) == set(range(vocab_size))
    assert as_set(some) == set(kept)
    assert as_set(bits.without(every, dropped, vocab_size)) == set(range(vocab_size)) - set(dropped)
    assert as_set(bits.without(some, dropped, vocab_size)) == set(kept) - set(dropped)
    assert as_set(some) == set(kept), "without must not change its argument"
    assert as_set(every & some) == set(kept)
    assert bits.is_empty(some) == (not kept)
    assert [bits.has(some, i) for i in range(vocab_size)] == [i in kept for i in range(vocab_size)]


@pytest.mark.parametrize("token_id", [-1, 40, 64])
def test_ids_outside_the_vocabulary_are_refused(token_id: int):
    with pytest.raises(IndexError, match=r"\[0, 40\)"):
        bits.only([3, token_id], 40)
    with pytest.raises(IndexError, match=r"\[0, 40\)"):
        bits.without(bits.all_ids(40), [token_id], 40)
