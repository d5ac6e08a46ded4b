"""Draws have the right distribution, by chi-square, depend on seed and position alone, and never take excluded ids."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.sampling.distribution import Distribution
from jaxllm.sampling.draw import draw
from jaxllm.sampling.sampler import sample_plain
from jaxllm.sampling.tiles import WholeRows, most_likely, tile_maxima, top_ids
from tests.sampling.oracle import Row, edited, kept_by_sort, make_batch, make_sampler, weights_of

pytestmark = pytest.mark.sampling

V = 40
DRAWS = 6_000
plain = jax.jit(sample_plain)
LOGITS = (np.random.default_rng(5).standard_normal(V) * 1.5).astype(np.float32)
hot = partial(Row, temperature=1.0)
SETTINGS = {
    "nothing": hot(),
    "temperature": Row(temperature=0.5),
    "top_k": hot(top_k=5),
    "top_p": hot(top_p=0.8),
    "min_p": hot(min_p=0.1),
    "all three": hot(top_k=20, top_p=0.7, min_p=0.02),
    "penalties and biases": hot(
        presence=0.5, frequency=0.3, repetition=1.4, prompt=(1, 3, 8), output=(3, 3, 12), bias={3: 2.0, 20: 1.0}
    ),
}
# What is almost right must be told apart.
WRONG: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.55},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.85},
    "min_p": {"min_p": 0.14},
    "penalties and biases": {"frequency": 0.0},
}


@pytest.fixture(scope="module")
def counts() -> dict[str, np.ndarray]:
    """Count how often each id was drawn under each of the settings, each draw with a seed of its own."""
    program = make_sampler("raw_logprobs", 1)
    rows = {name: [replace(row, seed=seed) for seed in range(DRAWS)] for name, row in SETTINGS.items()}
    logits = np.tile(LOGITS, (DRAWS, 1))
    return {name: np.bincount(program(logits, group)[0], minlength=V) for name, group in rows.items()}


def draw_from(logits_sv: jax.Array, distribution: Distribution, uniforms_s: jax.Array) -> jax.Array:
    return draw(WholeRows(logits_sv), distribution, uniforms_s)


def fits(counts: np.ndarray, row: Row) -> bool:
    """Return whether counts follow a row's distribution: chi-square at p = 1e-4."""
    values = edited(LOGITS, row)
    weights = np.where(kept_by_sort(values, row)[0], weights_of(values, row.temperature), 0.0)
    expected = weights / weights.sum() * counts.sum()
    if counts[expected == 0].any():
        return False
    bins = expected >= 5
    statistic = ((counts - expected)[bins] ** 2 / expected[bins]).sum()
    degrees = bins.sum() - 1
    # Wilson and Hilferty's quantile at 1 - 1e-4 (z = 3.72).
    return bool(statistic < degrees * (1 - 2 / (9 * degrees) + 3.72 * np.sqrt(2 / (9 * degrees))) ** 3)


@pytest.mark.parametrize("name", list(SETTINGS))
def test_draws_follow_the_distribution(counts: dict[str, np.ndarray], name: str) -> None:
    assert fits(counts[name], SETTINGS[name])


@pytest.mark.parametrize("name", list(WRONG))
def test_the_test_can_fail(counts: dict[str, np.ndarray], name: str) -> None:
    assert not fits(counts[name], replace(SETTINGS[name], **WRONG[name]))


def test_both_programs_draw_the_same(counts: dict[str, np.ndarray]) -> None:
    rows = [hot(seed=seed) for seed in range(DRAWS)]
    tokens = plain(jnp.asarray(np.tile(LOGITS, (DRAWS, 1))), make_batch(rows))
    np.testing.assert_array_equal(np.bincount(np.asarray(tokens), minlength=V), counts["nothing"])


def test_randomness_is_the_rows_own() -> None:
    """The same seed and position draw the same, whatever the row and the batch; others differ."""
    logits = jnp.broadcast_to(jnp.asarray(np.random.default_rng(0).standard_normal(5000), jnp.float32), (8, 5000))
    seeds = [1, 2, 3, 2, 2**63 + 5, 2**32 + 2, 5, 2]
    rows = [Row(temperature=1.0, seed=seed) for seed in seeds]
    tokens = np.asarray(plain(logits, make_batch(rows)))
    alone = np.asarray(plain(logits[:1], make_batch([Row(temperature=1.0, seed=2)])))
    greedy_company = [row if row.seed == 2 else Row() for row in rows]
    assert tokens[1] == tokens[3] == tokens[7] == alone[0]
    assert np.asarray(plain(logits, make_batch(greedy_company)))[1] == alone[0]
    assert len({int(t) for t in tokens}) == 6, "other seeds, high word included, draw other tokens"
    moved = np.asarray(plain(logits, make_batch([replace(row, position=8) for row in rows])))
    assert (moved != tokens).sum() >= 6


@pytest.mark.parametrize("v", [1, 2, 255, 256, 257, 300, 513, 1024])
def test_only_ids_with_mass_are_drawn(v: int) -> None:
    """The uniform numbers lie at both ends, vocabularies are no whole tiles, and zeros are at either end."""
    rng = np.random.default_rng(v)
    s = 64
    logits = (rng.standard_normal((s, v)) * 5).astype(np.float32)
    forbidden = rng.random((s, v)) < rng.choice([0.0, 0.5, 0.99, 1.0], (s, 1))
    forbidden[np.arange(s), rng.integers(0, v, s)] = False
    logits[forbidden] = -np.inf
    distribution = Distribution(jnp.ones(s), jnp.asarray(logits.max(axis=1)), jnp.full(s, -jnp.inf))
    for uniform in (0.0, 0.3, float(np.nextafter(np.float32(1), np.float32(0)))):
        ids = np.asarray(jax.jit(draw_from)(jnp.asarray(logits), distribution, jnp.full(s, uniform, jnp.float32)))
        assert (ids < v).all()
        assert not forbidden[np.arange(s), ids].any()


def test_greedy_rows_ignore_their_seed() -> None:
    logits = np.random.default_rng(1).standard_normal((4, 999)).astype(np.float32)
    rows = [Row(temperature=t, seed=seed) for seed, t in enumerate([0.0, 0.0, 1e-6, 0.0])]
    np.testing.assert_array_equal(plain(jnp.asarray(logits), make_batch(rows)), logits.argmax(axis=1))


def test_infinite_temperatures_forbid_what_is_forbidden() -> None:
    logits = jnp.asarray([[-jnp.inf, 1.0, -jnp.inf, 2.0]] * 32)
    rows = [Row(temperature=1e38, seed=seed) for seed in range(16)] + [Row(temperature=np.inf)] * 16
    assert set(np.asarray(plain(logits, make_batch(rows)))) <= {1, 3}


@pytest.mark.parametrize("v", [5, 256, 300, 1000])
def test_most_likely_ids_equal_a_stable_sort(v: int) -> None:
    """There are many ties, with minus infinity among them: of equal ones the least ids come first."""
    rng = np.random.default_rng(v)
    logits = rng.choice(np.array([-np.inf, -1.0, 0.5, 2.0, 2.5], np.float32), (32, v))
    logits[0] = -np.inf
    order = np.argsort(-logits, axis=1, kind="stable")
    maxima = tile_maxima(jnp.asarray(logits))
    np.testing.assert_array_equal(most_likely(WholeRows(jnp.asarray(logits)), maxima), order[:, 0])
    for count in {1, 2, min(3, v), min(20, v), v}:
        values, ids = jax.jit(top_ids, static_argnums=2)(jnp.asarray(logits), maxima, count)
        np.testing.assert_array_equal(ids, order[:, :count])
        np.testing.assert_array_equal(values, np.take_along_axis(logits, order[:, :count], 1))
