"""How many guesses become drafts follows how many have come true, and what a row costs."""

from __future__ import annotations

from array import array

import pytest

from jaxllm.speculation.guesses import FIRST_RATE, LEAST_RATE, SELDOM, TextGuesses


class Counting:
    """Guesses that the next token is the one after the last."""

    def __init__(self) -> None:
        self.num_calls = 0

    def propose(self, token_ids: array[int], at_most: int) -> array[int]:
        self.num_calls += 1
        return array("i", range(token_ids[-1] + 1, token_ids[-1] + 1 + at_most))

    def learn(self, token_ids: array[int], num_prompt_tokens: int) -> None:
        pass


def say(guesses: TextGuesses, tokens: array[int], token_id: int, share: float) -> int:
    """Look, let a token come, and return how many drafts it would have had before it."""
    count = guesses.look(tokens, share)
    tokens.append(token_id)
    guesses.compare([token_id], len(tokens) - 1)
    return count


def test_right_guesses_earn_more_drafts_and_wrong_ones_none():
    guesses, tokens = TextGuesses(Counting(), 16), array("i", [0])
    counts = [say(guesses, tokens, tokens[-1] + 1, 0.1) for _ in range(40)]
    assert counts == sorted(counts)
    assert 1 <= counts[0] < 4
    assert counts[-1] == 16
    counts = [say(guesses, tokens, 0, 0.1) for _ in range(40)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0


def test_guesses_are_compared_though_no_drafts_are_made():
    """A request whose text begins to repeat gets its drafts back, and looking costs little meanwhile."""
    drafter = Counting()
    guesses, tokens = TextGuesses(drafter, 8), array("i", [0])
    for _ in range(40):
        say(guesses, tokens, 0, 0.1)
    before = drafter.num_calls
    for _ in range(8 * SELDOM):
        assert say(guesses, tokens, 0, 0.1) == 0
    assert drafter.num_calls == before + 8
    counts = [say(guesses, tokens, tokens[-1] + 1, 0.1) for _ in range(60)]
    assert counts[0] == 0
    assert counts[-1] == 8


@pytest.mark.parametrize("share", [0.0, LEAST_RATE, FIRST_RATE, 0.9, 0.99, 1.0])
def test_the_number_that_gives_the_most_tokens_in_the_same_time(share: float):
    guesses, tokens = TextGuesses(Counting(), 16), array("i", [0])
    rates = set[bool]()
    for number in range(400):
        count = guesses.look(tokens, share)
        likely = [n for n in range(17) if guesses.rate**n >= LEAST_RATE]
        per_time = [sum(guesses.rate**before for before in range(n + 1)) / (1 + n * share) for n in likely]
        assert count in likely
        assert per_time[count] == pytest.approx(max(per_time), rel=0.03)
        rates.add(guesses.rate >= LEAST_RATE)
        say(guesses, tokens, tokens[-1] + 1 if number % 100 < 40 else 0, share)
    assert rates == {False, True}


def test_the_gain_is_what_is_expected():
    guesses = TextGuesses(Counting(), 8)
    expected = sum(FIRST_RATE**count for count in (1, 2, 3))
    assert guesses.gain(3, 0.1) == pytest.approx(expected - 0.3)
    assert guesses.gain(0, 0.1) == 0
