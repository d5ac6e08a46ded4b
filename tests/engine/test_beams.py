"""Beam search without an engine follows vLLM's rules, and equals HF's where nothing ends."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from jaxllm.engine.beam.beams import Beam, BeamSearch, Step
from jaxllm.logprobs import Logprob
from tests.e2e.goldens import FOLDER

CASES: list[dict[str, Any]] = json.loads((FOLDER / "smollm2-135m-instruct-q4_1-beams.json").read_text())["cases"]
VOCAB_SIZE = 14


def log_softmax(logits: list[float]) -> list[float]:
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


def logprobs_after(case: int, token_ids: list[int], end_ids: list[int], vocab_size: int = VOCAB_SIZE) -> list[float]:
    """Return the random model's log-probabilities (scripts/make.py beam_goldens)."""
    numbers = random.Random(f"{case}/{token_ids}")
    return log_softmax([5 * numbers.random() + (1.5 if each in end_ids else 0) for each in range(vocab_size)])


def most_likely(logprobs: list[float], count: int) -> dict[int, Logprob]:
    best = sorted(range(len(logprobs)), key=lambda token_id: -logprobs[token_id])[:count]
    return {token_id: Logprob(logprobs[token_id], rank) for rank, token_id in enumerate(best, 1)}


def run(
    search: BeamSearch, case: int, end_ids: list[int], count: int, vocab_size: int = VOCAB_SIZE, num_prompt: int = 1
) -> list[Beam]:
    while search.live:
        prompts = [[0] * num_prompt + beam.token_ids for beam in search.live]
        advance(search, [most_likely(logprobs_after(case, ids, end_ids, vocab_size), count) for ids in prompts])
    return search.complete


def advance(search: BeamSearch, tops: Sequence[dict[int, Logprob]]) -> None:
    search.advance([Step(top, top) for top in tops])


def score(ids: list[int], total: float, num_prompt: int, penalty: float, end: int | None) -> float:
    """Score as vLLM does: by the length of the whole sequence, without the end of sequence."""
    return total / max(1, num_prompt + len(ids) - (ids[-1] == end)) ** penalty


def by_the_book(
    rows_after: Callable[[list[int]], Mapping[int, float]],
    *,
    num_prompt: int,
    width: int,
    max_tokens: int,
    penalty: float,
    end: int | None,
    ignore_eos: bool = False,
) -> list[list[int]]:
    """Search as vLLM does, step after step to the last, from the candidates that may follow generated tokens."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    complete: list[tuple[list[int], float]] = []

    def best(beams: list[tuple[list[int], float]]) -> list[tuple[list[int], float]]:
        return sorted(beams, key=lambda beam: -score(*beam, num_prompt, penalty, end))[:width]

    for _ in range(max_tokens):
        grown: list[tuple[list[int], float]] = []
        for ids, total in live:
            row = rows_after(ids)
            if not row:
                complete.append((ids, total))
            for token_id, value in row.items():
                ends = token_id == end and not ignore_eos
                (complete if ends else grown).append(([*ids, token_id], total + value))
        live = best(grown)
    return [ids for ids, _ in best(complete + live)]


def test_equals_hf_on_random_models():
    """Where nothing ends, all sequences are equally long, and the two rankings agree."""
    assert {case["length_penalty"] for case in CASES} == {-1.0, 0.0, 0.5, 1.0, 2.0}
    assert {case["width"] for case in CASES} == {2, 3, 4}
    assert len(CASES) > 40
    for case in CASES:
        width, penalty, max_tokens = case["width"], case["length_penalty"], case["max_tokens"]
        beams = run(BeamSearch(1, width, max_tokens, penalty, None), case["case"], [], 2 * width)
        assert [beam.token_ids for beam in beams] == case["beams"], case
        scores = [beam.cum_logprob / max_tokens**penalty for beam in beams]
        assert scores == pytest.approx(case["scores"], abs=2e-5), case


def test_equals_vllms_rules_on_random_models():
    ended = shorter = 0
    for case in range(200):
        numbers = random.Random(case)
        end, width, max_tokens = numbers.randrange(VOCAB_SIZE), numbers.randint(1, 4), numbers.randint(1, 9)
        num_prompt, penalty = numbers.choice((1, 2, 30)), numbers.choice((-1.0, 0.0, 0.5, 1.0, 2.0))
        search = BeamSearch(num_prompt, width, max_tokens, penalty, end)
        beams_ids = [beam.token_ids for beam in run(search, case, [end], 2 * width, num_prompt=num_prompt)]

        def rows_after(
            ids: list[int],
            case: int = case,
            end: int = end,
            width: int = width,
            prompt: tuple[int, ...] = (0,) * num_prompt,
        ) -> dict[int, float]:
            top = most_likely(logprobs_after(case, [*prompt, *ids], [end]), 2 * width)
            return {token_id: entry.logprob for token_id, entry in top.items()}

        settings = {"num_prompt": num_prompt, "width": width, "max_tokens": max_tokens, "penalty": penalty, "end": end}
        assert beams_ids == by_the_book(rows_after, **settings), settings
        ended += sum(ids[-1] == end for ids in beams_ids)
        shorter += all(len(ids) < max_tokens for ids in beams_ids)
    assert ended > 100
    assert shorter > 20, "few searches could end early"


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("end", [None, 1])
def test_wide_enough_beams_find_the_best_of_all_sequences(length_penalty: float, end: int | None):
    vocab_size, max_tokens = 3, 4
    width = vocab_size**max_tokens
    ends = [] if end is None else [end]
    for case in range(5):
        complete: list[tuple[float, list[int]]] = []
        for length in range(1, max_tokens + 1):
            for ids in map(list, itertools.product(range(vocab_size), repeat=length)):
                is_end = ids[-1] == end or length == max_tokens
                if not is_end or end in ids[:-1]:
                    continue
                rows = [logprobs_after(case, [0, *ids[:i]], ends, vocab_size) for i in range(length)]
                total = sum(row[token_id] for row, token_id in zip(rows, ids, strict=True))
                complete.append((score(ids, total, 1, length_penalty, end), ids))
        complete.sort(reverse=True)
        search = BeamSearch(1, width, max_tokens, length_penalty, end)
        beams = run(search, case, ends, vocab_size, vocab_size)
        assert [beam.token_ids for beam in beams] == [ids for _, ids in complete]


def test_a_beam_of_one_is_greedy_until_an_end_outranks_it():
    for case in range(20):
        [best] = run(BeamSearch(1, 1, 6, 1.0, None), case, [3], 2)
        greedy: list[int] = []
        while len(greedy) < 6:
            row = logprobs_after(case, [0, *greedy], [3])
            greedy.append(row.index(max(row)))
        assert best.token_ids == greedy


def test_ignored_ends_go_on():
    search = BeamSearch(3, 2, 2, 1.0, 7, ignore_eos=True)
    advance(search, [{7: Logprob(-0.1, 1), 5: Logprob(-0.2, 2), 6: Logprob(-3.0, 3)}])
    assert [beam.token_ids for beam in search.live] == [[7], [5]]
    advance(search, [{7: Logprob(-0.1, 1), 5: Logprob(-2.0, 2)}] * 2)
    assert [(beam.token_ids, beam.finish_reason) for beam in search.complete] == [
        ([7, 7], "length"),
        ([5, 7], "length"),
    ]


def test_a_beam_that_nothing_can_follow_is_complete():
    search = BeamSearch(3, 2, 5, 0.0, 7)
    advance(search, [{4: Logprob(-1.0, 1), 5: Logprob(-2.0, 2)}])
    top = {6: Logprob(-5.0, 1), 8: Logprob(-0.1, 2)}
    search.advance([None, Step(top, [6])])
    assert [(beam.token_ids, beam.finish_reason) for beam in search.complete] == [([4], "stop")]
    assert [beam.token_ids for beam in search.live] == [[5, 6]], "only what may follow is a candidate"
    assert search.live[0].logprobs[-1] == top
    search.abort()
    assert [(beam.token_ids, beam.finish_reason) for beam in search.complete] == [([4], "stop"), ([5, 6], "abort")]
    assert not search.live


def test_impossible_tokens_and_small_vocabularies_make_fewer_beams():
    impossible = Logprob(-math.inf, 3)
    search = BeamSearch(1, 4, 2, 1.0, None)
    advance(search, [{0: Logprob(-0.5, 1), 1: Logprob(-1.0, 2), 2: impossible}])
    assert [beam.token_ids for beam in search.live] == [[0], [1]]
    advance(search, [{0: Logprob(-0.5, 1), 1: impossible}] * 2)
    assert [beam.token_ids for beam in search.complete] == [[0, 0], [1, 0]]
    assert not search.live


def test_ties_go_to_the_better_beam_then_to_the_likelier_token():
    search = BeamSearch(1, 2, 3, 1.0, None)
    flat = {5: Logprob(-1.0, 1), 3: Logprob(-1.0, 2), 8: Logprob(-1.0, 3), 9: Logprob(-1.0, 4)}
    advance(search, [flat])
    assert [beam.token_ids for beam in search.live] == [[5], [3]]
    advance(search, [flat, flat])
    assert [beam.token_ids for beam in search.live] == [[5, 5], [5, 3]]
    assert [beam.parent for beam in search.live] == [0, 0]


def test_no_candidate_at_all_ends_the_search():
    search = BeamSearch(1, 2, 3, 1.0, None)
    advance(search, [{4: Logprob(math.nan, 1)}])
    assert search.live == search.complete == []
