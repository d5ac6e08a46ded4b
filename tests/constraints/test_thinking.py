"""The thinking budget does what its definition over the whole sequence says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxllm.constraints.thinking import ThinkingState, ThinkingTokens

START, END = 100, 101
ONE_TOKEN_EACH = ThinkingTokens((START,), (END,))


def last(tokens: Sequence[int], sequence: Sequence[int]) -> int:
    places = [i for i in range(len(tokens)) if tuple(tokens[i : i + len(sequence)]) == tuple(sequence)]
    return places[-1] if places else -1


def forced(thinking: ThinkingTokens, prompt: list[int], output: list[int], budget: int) -> int | None:
    """Return what vLLM forces: the last start after the last end opens a section, whose end is forced at its budget."""
    tokens, end_ids = prompt + output, thinking.end_ids
    start = last(tokens, thinking.start_ids)
    if start < 0 or start <= last(tokens, end_ids):
        return None
    if len(tokens) - start - len(thinking.start_ids) < budget:
        return None
    done = [k for k in range(1, len(end_ids)) if k <= len(output) and tuple(tokens[-k:]) == end_ids[:k]]
    return end_ids[max(done, default=0)]


SEQUENCE = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)
TOKENS = st.lists(st.integers(0, 2), max_size=12)


@settings(max_examples=200)
@given(SEQUENCE, SEQUENCE, TOKENS, TOKENS, st.integers(0, 4))
@example((0,), (1, 1, 2), [0, 1], [1, 1], 1)
def test_equals_the_definition(
    start: tuple[int, ...], end: tuple[int, ...], prompt: list[int], output: list[int], budget: int
):
    thinking = ThinkingTokens(start, end)
    state = ThinkingState(thinking, prompt, budget)
    unlimited = ThinkingState(thinking, prompt, None)
    assert state.forced_token_id == forced(thinking, prompt, [], budget)
    for num_outputs, token_id in enumerate(output, 1):
        state.accept(token_id)
        unlimited.accept(token_id)
        assert state.forced_token_id == forced(thinking, prompt, output[:num_outputs], budget)
        assert unlimited.forced_token_id is None


def follow(state: ThinkingState, wanted: list[int]) -> list[int]:
    """Generate `wanted`, but for what is forced."""
    output = []
    for token_id in wanted:
        must = state.forced_token_id
        output.append(token_id if must is None else must)
        state.accept(output[-1])
    return output


@pytest.mark.parametrize(
    ("prompt", "budget", "expected"),
    [
        ([1, 2], 2, [9, 9, 9, 9, 9]),  # no section, nothing to end
        ([1, START], 2, [9, 9, END, 9, 9]),
        ([1, START], 0, [END, 9, 9, 9, 9]),
        ([1, START, 5], 2, [9, END, 9, 9, 9]),  # the prompt's part of the section counts
        ([1, START, 5, 6, 7], 2, [END, 9, 9, 9, 9]),
        ([START, 5, 6, END], 1, [9, 9, 9, 9, 9]),
    ],
)
def test_prompts(prompt: list[int], budget: int, expected: list[int]):
    assert follow(ThinkingState(ONE_TOKEN_EACH, prompt, budget), [9] * 5) == expected


def test_each_section_has_the_whole_budget():
    state = ThinkingState(ONE_TOKEN_EACH, [1], 2)
    wanted = [START, 9, 9, 9, START, 9, END, 9, START, 9, 9, 9]
    assert follow(state, wanted) == [START, 9, 9, END, START, 9, END, 9, START, 9, 9, END]
    assert not state.is_open


def test_an_end_of_several_tokens_is_forced_whole():
    state = ThinkingState(ThinkingTokens((START,), (7, 8, END)), [START], 3)
    assert follow(state, [9] * 8) == [9, 9, 9, 7, 8, END, 9, 9]
    begun = ThinkingState(ThinkingTokens((START,), (7, 8, END)), [START], 3)
    assert follow(begun, [9, 7, 8, 9, 9]) == [9, 7, 8, END, 9], "the model had begun to end by itself"


def test_long_prompts_whose_bytes_match_out_of_step():
    start = 0x01000000  # its bytes also lie across two tokens of value 1
    thinking = ThinkingTokens((start,), (END,))
    assert not ThinkingState(thinking, [1] * 50, 0).is_open
    assert ThinkingState(thinking, [1, start, 1, 1], 0).is_open


def test_sequences_must_not_be_empty():
    with pytest.raises(ValueError, match="at least one token"):
        ThinkingTokens((), (END,))
