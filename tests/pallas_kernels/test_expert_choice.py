"""Experts are chosen, and their rows placed, alike by sorting and as GPUs do it: by comparing and counting."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import Groups, capacity, top_experts, within_groups
from pallas_kernels.grouped_matmul.groups import Sizes, by_counting, by_sorting
from pallas_kernels.grouped_matmul.spans import cut
from pallas_kernels.grouped_matmul.top_experts import groups_by_comparing, top_by_comparing

pytestmark = pytest.mark.usefixtures("quick_compilation")
SIZES = [(1, 1, 1), (7, 5, 3), (16, 64, 6), (33, 128, 8)]
"""Tokens, experts, and experts of a token."""


def random_scores(t: int, e: int, seed: int) -> np.ndarray:
    """Return scores from few values, so that many are equal; some experts are masked."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(-2, 3, (t, e)).astype(np.float32) / 8
    return np.where(rng.random((t, e)) < 0.2, -np.inf, scores)


@pytest.mark.parametrize(("t", "e", "count"), SIZES)
def test_comparing_chooses_as_sorting_does(t: int, e: int, count: int) -> None:
    """The best experts come first, and of equal ones the first."""
    ranked = random_scores(t, e, seed=t)
    scores = np.random.default_rng(0).standard_normal((t, e)).astype(np.float32)
    experts, weights = map(np.asarray, top_by_comparing(jnp.asarray(ranked), jnp.asarray(scores), count))
    np.testing.assert_array_equal(experts, np.argsort(-ranked, axis=1, stable=True)[:, :count])
    np.testing.assert_array_equal(weights, np.take_along_axis(scores, experts, axis=1))
    for got, want in zip(top_experts(jnp.asarray(ranked), jnp.asarray(scores), count), (experts, weights), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("group_best", [1, 2])
def test_comparing_chooses_groups_as_sorting_does(group_best: int) -> None:
    ranked = np.maximum(random_scores(9, 32, seed=group_best), -9)
    is_chosen = np.asarray(groups_by_comparing(jnp.asarray(ranked).reshape(9, 8, 4), 3, group_best))
    best = np.sort(ranked.reshape(9, 8, 4), axis=2)[:, :, 4 - group_best :].sum(axis=2)
    places = np.argsort(np.argsort(-best, axis=1, stable=True), axis=1)
    np.testing.assert_array_equal(is_chosen, places < 3)
    masked = np.asarray(within_groups(jnp.asarray(ranked), 8, 3, group_best))
    np.testing.assert_array_equal(masked, np.where(np.repeat(is_chosen, 4, axis=1), ranked, -np.inf))


@pytest.mark.parametrize("nan", [np.nan, -np.nan])
def test_a_token_without_numbers_still_chooses_different_experts(nan: float) -> None:
    """It must not take more rows than there are for it."""
    ranked = jnp.full((2, 8), nan).at[1, 3].set(1.0)
    experts, _ = top_by_comparing(ranked, ranked, 3)
    assert [len(set(row)) for row in np.asarray(experts).tolist()] == [3, 3]


def random_choices(t: int, e: int, j: int, num_live: int) -> np.ndarray:
    """Return different experts of each token, some of them elsewhere, and nonsense for tokens of padding."""
    rng = np.random.default_rng(t + num_live)
    choices = np.stack([rng.permutation(e + 2)[:j] for _ in range(t)]).astype(np.int32)
    choices[num_live:] = e
    return np.minimum(choices, e).reshape(-1)


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize(("t", "e", "j"), SIZES)
@pytest.mark.parametrize("part", [0.0, 0.4, 1.0])
def test_counting_places_rows_as_sorting_does(t: int, e: int, j: int, alignment: int, part: float) -> None:
    """The rows of an expert are in the tokens' order."""
    experts = random_choices(t, e, j, round(part * t))
    sizes = Sizes(e, j, alignment, capacity(t * j, e, alignment))
    counted, sorted_ = (jax.jit(partial(f, sizes=sizes))(jnp.asarray(experts)) for f in (by_counting, by_sorting))
    jax.tree.map(np.testing.assert_array_equal, counted.groups, sorted_.groups)
    is_live = experts < e
    rows, tokens = np.asarray(counted.rows_n)[is_live], np.asarray(counted.tokens_r)
    np.testing.assert_array_equal(rows, np.asarray(sorted_.rows_n)[is_live])
    np.testing.assert_array_equal(tokens[rows], (np.arange(t * j) // j)[is_live])
    assert ((tokens >= 0) & (tokens < t)).all(), "rows of no group hold the number of some token too"
    starts = np.asarray(counted.groups.starts_e)
    assert (starts % alignment == 0).all()
    for expert in range(e):
        of_expert = np.flatnonzero(experts == expert)
        placed = np.asarray(counted.rows_n)[of_expert]
        np.testing.assert_array_equal(placed, starts[expert] + np.arange(len(of_expert)))


@pytest.mark.parametrize("counts", [[0, 0, 0], [1, 0, 40], [16, 17, 33, 0, 5, 64]])
@pytest.mark.parametrize("most", [16, 32])
def test_spans_cover_the_rows_of_each_expert(counts: list[int], most: int) -> None:
    padded = [-(-count // 16) * 16 for count in counts]
    starts = np.cumsum([0, *padded[:-1]])
    groups: Any = Groups(jnp.asarray(starts, jnp.int32), jnp.asarray(counts, jnp.int32))
    spans = jax.tree.map(np.asarray, cut(groups, max(sum(padded), 16), 16, most))
    expected = [
        (expert, start + first, min(most, count - first), first // most, -(-count // most))
        for expert, (start, count) in enumerate(zip(starts, counts, strict=True))
        for first in range(0, count, most)
    ]
    assert spans.total == len(expected)
    got = zip(*(numbers[: spans.total].tolist() for numbers in spans[1:]), strict=True)
    assert list(got) == expected
