"""Drafters equal brute-force searches, and follow what came before."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from jaxllm.config.speculative import SpeculativeConfig
from jaxllm.speculation import suffix
from jaxllm.speculation.drafter import make_drafter
from jaxllm.speculation.ngram import NgramDrafter
from jaxllm.speculation.suffix import SuffixDrafter
from jaxllm.utils.token_search import find_last


def ids(*values: int) -> array[int]:
    return array("i", values)


def lookup(tokens: Sequence[int], least: int, most: int, count: int) -> list[int]:
    """Find the longest n-gram by looking everywhere."""
    for size in range(most, least - 1, -1):
        last = list(tokens[-size:])
        places = [start for start in range(len(tokens) - size) if list(tokens[start : start + size]) == last]
        if len(tokens) > size and places:
            drafts = list(tokens)
            for _ in range(count):
                drafts.append(drafts[places[-1] + size + len(drafts) - len(tokens)])
            return drafts[len(tokens) :]
    return []


def test_ngrams_equal_a_search_of_everything():
    rng = random.Random(0)
    num_found = 0
    for _ in range(3000):
        vocabulary = rng.choice([2, 4, 300, 70_000])
        tokens = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 40))]
        if rng.random() < 0.5:
            tokens += tokens[: rng.randrange(len(tokens) + 1)]
        least = rng.randrange(1, 4)
        most = least + rng.randrange(3)
        expected = lookup(tokens, least, most, 9)
        assert NgramDrafter(least, most).propose(ids(*tokens), 9).tolist() == expected
        num_found += bool(expected)
    assert num_found > 1000


def test_tokens_are_found_whole():
    """Bytes of two neighbours may look like a token."""
    tokens = ids(0x01000000, 0x00000002, 0x00020100, 7)
    assert find_last(tokens.tobytes(), ids(0x00000201).tobytes()) is None
    assert find_last(tokens.tobytes(), ids(7).tobytes()) == 3
    assert find_last(tokens.tobytes(), ids(7).tobytes(), 3) is None


def test_suffixes_follow_the_majority_of_the_longest():
    drafter = SuffixDrafter(24, 0, factor=2.0, least_share=0.1)
    # After 1 2 came 3 twice and 4 once; after 9 1 2 only 5.
    tokens = [1, 2, 3, 8, 1, 2, 3, 7, 1, 2, 4, 6, 9, 1, 2, 5, 5]
    assert drafter.propose(ids(*tokens, 0, 1, 2), 1).tolist() == [3]
    assert drafter.propose(ids(*tokens, 9, 1, 2), 2).tolist() == [5, 5]
    assert drafter.propose(ids(1, 2), 4).tolist() == []
    assert drafter.propose(ids(1, 2, 3, 4, 5), 4).tolist() == []


def test_suffixes_go_on_with_a_period():
    drafter = SuffixDrafter(24, 0, factor=4.0, least_share=0.1)
    assert drafter.propose(ids(*[1, 2, 3] * 4), 10).tolist() == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]


def test_suffixes_stop_where_places_disagree():
    drafter = SuffixDrafter(24, 0, factor=9.0, least_share=0.6)
    tokens = ids(1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 6, 1, 2)
    assert drafter.propose(tokens, 9).tolist() == [3]


def test_suffixes_are_as_many_as_match():
    drafter = SuffixDrafter(24, 0, factor=1.0, least_share=0.1)
    tokens = [5, 6, 7, 8, 9, 10, 11, 12]
    assert drafter.propose(ids(*tokens, 5, 6, 7), 8).tolist() == [8, 9, 10]
    assert drafter.propose(ids(*tokens, 5, 6, 7), 2).tolist() == [8, 9]


def test_past_answers_are_searched_until_room_is_needed():
    drafter = SuffixDrafter(24, 2, factor=4.0, least_share=0.1)
    for start in (100, 200, 300):
        drafter.learn(ids(1, 2, *range(start, start + 9)), 2)
    assert drafter.propose(ids(7, 203, 204), 3).tolist() == [205, 206, 207]
    assert drafter.propose(ids(7, 307, 308), 3).tolist() == []  # the answer ends there
    assert drafter.propose(ids(7, 1, 2), 3).tolist() == []  # a prompt is no answer
    assert drafter.propose(ids(7, 103, 104), 3).tolist() == []  # the oldest has gone
    assert len(drafter._answers._places) == 2 * (9 - suffix.KEY_TOKENS)


def test_past_answers_take_bounded_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suffix, "MAX_CACHED_TOKENS", 50)
    drafter = SuffixDrafter(24, 1000, factor=1.0, least_share=0.1)
    rng = random.Random(1)
    for _ in range(200):
        drafter.learn(ids(*[rng.randrange(30) for _ in range(rng.randrange(60))]), 0)
        answers = drafter._answers
        assert sum(map(len, answers._answers.values())) == answers._num_tokens <= 50
        kept = {id(answer) for places in answers._places.values() for answer, _ in places}
        assert kept <= answers._answers.keys()


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafters_by_name(method: str):
    drafter = make_drafter(SpeculativeConfig(method, 4).settings(8.0))
    assert drafter.propose(ids(1, 2, 3, 4, 5, 1, 2, 3), 2).tolist() == [4, 5]
