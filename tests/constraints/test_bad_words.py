"""Bad words ban the ids that their plain definition says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxllm.constraints.bad_words import BadWords

TOKENS = st.integers(0, 2)


@given(st.lists(st.lists(TOKENS, min_size=1, max_size=4), max_size=6), st.lists(TOKENS, max_size=8))
def test_banned_ids(sequences: list[list[int]], output: list[int]):
    """A token is banned if the output with it would end with a word."""
    words = BadWords(sequences)
    expected = {token for token in range(3) if any([*output, token][-len(word) :] == word for word in sequences)}
    recent = output[max(0, len(output) - words.num_recent) :]
    assert {*words.always, *words.banned(output)} == expected
    assert words.banned(recent) == words.banned(output), "num_recent tokens are enough"
    assert words.num_recent == max([len(word) - 1 for word in sequences], default=0)


def test_words_of_one_token_depend_on_nothing():
    words = BadWords([[5], [7, 8], [5]])
    assert words.always == (5,)
    assert words.banned([]) == []
    assert words.banned([1, 7]) == [8]
