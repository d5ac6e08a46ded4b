"""Beam search without an engine equals HF's on random models, and trying every sequence out."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import pytest

from jaxllm.engine.beam_search import Beam, BeamSearch, num_candidates
from jaxllm.logprobs import Logprob
from tests.e2e.goldens import FOLDER

CASES: list[dict[str, Any]] = json.loads((FOLDER / "smollm2-135m-instruct-q4_1-beams.json").read_text())["cases"]
VOCAB_SIZE = 14


def log_softmax(logits: list[float]) -> list[float]:
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


def logprobs_after(case: int, token_ids: list[int], end_ids: list[int], vocab_size: int = VOCAB_SIZE) -> list[float]:
    """Return the random model's log-probabilities (scripts/make_beam_goldens.py)."""
    numbers = random.Random(f"{case}/{token_ids}")
    return log_softmax([5 * numbers.random() + (1.5 if each in end_ids else 0) for each in range(vocab_size)])


def most_likely(logprobs: list[float], count: int) -> dict[int, Logprob]:
    best = sorted(range(len(logprobs)), key=lambda token_id: -logprobs[token_id])[:count]
    return {token_id: Logprob(logprobs[token_id], rank) for rank, token_id in enumerate(best, 1)}


def run(search: BeamSearch, case: int, end_ids: list[int], count: int, vocab_size: int = VOCAB_SIZE) -> list[Beam]:
    while search.live:
        tops = [logprobs_after(case, [0, *beam.token_ids], end_ids, vocab_size) for beam in search.live]
        search.advance([most_likely(each, count) for each in tops])
    return search.found


def score(beam: Beam, length_penalty: float) -> float:
    return beam.cum_logprob / len(beam.token_ids) ** length_penalty


def test_the_cases_reach_what_matters():
    assert {len(case["ends"]) for case in CASES} == {0, 1, 2}
    assert {case["length_penalty"] for case in CASES} == {-1.0, 0.0, 0.5, 1.0, 2.0}
    assert {case["width"] for case in CASES} == {2, 3, 4}
    shorter = [case for case in CASES if all(len(beam) < case["max_tokens"] for beam in case["beams"])]
    assert len(shorter) > 20, "few searches end early"
    assert sum(len({len(beam) for beam in case["beams"]}) > 1 for case in CASES) > 40


def test_equals_hf_on_random_models():
    for case in CASES:
        ends, width, penalty = frozenset(case["ends"]), case["width"], case["length_penalty"]
        search = BeamSearch(width, case["max_tokens"], penalty, ends)
        found = run(search, case["case"], case["ends"], num_candidates(width, ends))
        assert [beam.token_ids for beam in found] == case["beams"], case
        assert [score(beam, penalty) for beam in found] == pytest.approx(case["scores"], abs=2e-5), case


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("end_ids", [[], [1], [0, 2]])
def test_wide_enough_beams_find_the_best_of_all_sequences(length_penalty: float, end_ids: list[int]):
    vocab_size, max_tokens = 3, 4
    width = vocab_size**max_tokens
    for case in range(5):
        complete: list[tuple[float, list[int]]] = []
        for length in range(1, max_tokens + 1):
            for token_ids in itertools.product(range(vocab_size), repeat=length):
                is_end = token_ids[-1] in end_ids or length == max_tokens
                if not is_end or any(each in end_ids for each in token_ids[:-1]):
                    continue
                rows = [logprobs_after(case, [0, *token_ids[:i]], end_ids, vocab_size) for i in range(length)]
                total = sum(row[token_id] for row, token_id in zip(rows, token_ids, strict=True))
                complete.append((total / length**length_penalty, list(token_ids)))
        complete.sort(reverse=True)
        search = BeamSearch(width, max_tokens, length_penalty, frozenset(end_ids))
        found = run(search, case, end_ids, vocab_size, vocab_size)
        assert [beam.token_ids for beam in found] == [token_ids for _, token_ids in complete]
        assert [score(beam, length_penalty) for beam in found] == pytest.approx([each for each, _ in complete])


def test_a_beam_of_one_is_greedy():
    for case in range(20):
        ends = [3]
        [found] = run(BeamSearch(1, 6, 1.0, frozenset(ends)), case, ends, 2)
        greedy: list[int] = []
        while len(greedy) < 6 and (not greedy or greedy[-1] != 3):
            row = logprobs_after(case, [0, *greedy], ends)
            greedy.append(row.index(max(row)))
        assert found.token_ids == greedy


def test_impossible_tokens_and_small_vocabularies_make_fewer_beams():
    impossible = Logprob(-math.inf, 3)
    search = BeamSearch(4, 2, 1.0, frozenset())
    search.advance([{0: Logprob(-0.5, 1), 1: Logprob(-1.0, 2), 2: impossible}])
    assert [beam.token_ids for beam in search.live] == [[0], [1]]
    search.advance([{0: Logprob(-0.5, 1), 1: impossible}] * 2)
    assert [beam.token_ids for beam in search.found] == [[0, 0], [1, 0]]
    assert not search.live


def test_ties_go_to_the_better_beam_then_to_the_likelier_token():
    search = BeamSearch(2, 3, 1.0, frozenset())
    flat = {5: Logprob(-1.0, 1), 3: Logprob(-1.0, 2), 8: Logprob(-1.0, 3), 9: Logprob(-1.0, 4)}
    search.advance([flat])
    assert [beam.token_ids for beam in search.live] == [[5], [3]]
    search.advance([flat, flat])
    assert [beam.token_ids for beam in search.live] == [[5, 5], [5, 3]]
    assert [beam.parent for beam in search.live] == [0, 0]


def test_no_candidate_at_all_ends_the_search():
    search = BeamSearch(2, 3, 1.0, frozenset())
    search.advance([{4: Logprob(math.nan, 1)}])
    assert search.live == search.found == []
