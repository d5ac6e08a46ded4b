"""The sampler against float64 oracles: truncation masks, distributions, greedy ties, logprobs, bit masks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.sampling.sampler import SamplingBatch, greedy, sample_full, sample_plain
from jaxllm.sampling.truncation import truncate

V = 300


def make_batch(
    s: int,
    *,
    seed: Any = 0,
    position: Any = 7,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
) -> SamplingBatch:
    def full(value, dtype):
        return jnp.broadcast_to(jnp.asarray(value, dtype), (s,))

    seeds = np.broadcast_to(np.asarray(seed, np.uint64), (s,))
    words = np.stack([(seeds >> np.uint64(32)).astype(np.uint32), seeds.astype(np.uint32)], axis=1).view(np.int32)
    return SamplingBatch(
        seeds_s2=jnp.asarray(words),
        positions_s=full(position, jnp.int32),
        temperature_s=full(temperature, jnp.float32),
        top_k_s=full(top_k, jnp.int32),
        top_p_s=full(top_p, jnp.float32),
        min_p_s=full(min_p, jnp.float32),
    )


def adversarial_logits(rng: np.random.Generator) -> dict[str, np.ndarray]:
    one_hot = np.full(V, -40.0)
    one_hot[17] = 40.0
    return {
        "random": rng.standard_normal(V) * 3,
        "sharp": rng.standard_normal(V) * 30,
        "flat": np.zeros(V),
        "one-hot": one_hot,
        "ties": np.repeat(rng.standard_normal(V // 10), 10),
        "forbidden": np.where(rng.random(V) < 0.5, -np.inf, rng.standard_normal(V)),
    }


def kept_by_sort(weights: np.ndarray, top_k: int, top_p: float, min_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Return what must be kept and what may be kept, in float64: ids within 1e-6 of the mass may go either way."""
    kept = weights >= min_p * weights.max()
    if 0 < top_k < len(weights):
        kth = np.sort(np.where(kept, weights, 0.0))[-top_k]
        kept &= weights >= kth
    if top_p >= 1.0:
        return kept, kept
    left = np.where(kept, weights, 0.0)
    total = left.sum()

    def cut(mass: float) -> np.ndarray:
        order = np.sort(left)[::-1]
        index = min(int(np.searchsorted(np.cumsum(order), mass * total)), len(order) - 1)
        return kept & (left >= order[index])

    return cut(top_p - 1e-6), cut(min(top_p + 1e-6, 1.0))


@pytest.mark.parametrize("name", ["random", "sharp", "flat", "one-hot", "ties", "forbidden"])
def test_truncation_equals_a_sort(name: str) -> None:
    logits = adversarial_logits(np.random.default_rng(3))[name].astype(np.float32)
    settings = [(k, p, m) for k in (0, 1, 2, 5, 50, V) for p in (1.0, 0.99, 0.5, 0.01) for m in (0.0, 0.05, 0.9)]
    weights = np.exp(logits - logits.max())
    ks, ps, ms = (np.array(column) for column in zip(*settings, strict=True))
    rows = jnp.broadcast_to(jnp.asarray(weights), (len(settings), V))
    got = np.asarray(
        jax.jit(truncate)(rows, jnp.asarray(ks), jnp.asarray(ps, jnp.float32), jnp.asarray(ms, jnp.float32))
    )
    for row, (k, p, m) in zip(got, settings, strict=True):
        must, may = kept_by_sort(weights.astype(np.float64), k, float(np.float32(p)), float(np.float32(m)))
        kept = row > 0
        must, may = must & (weights > 0), may & (weights > 0)
        assert (kept | ~must).all(), f"dropped too much at top_k={k} top_p={p} min_p={m}"
        assert (may | ~kept).all(), f"kept too much at top_k={k} top_p={p} min_p={m}"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 0.5},
        {"top_k": 20, "top_p": 0.7, "min_p": 0.02},
    ],
)
def test_draws_follow_the_distribution(settings: dict[str, float]) -> None:
    """Chi-square at p = 1e-4 over 20,000 draws, each with its own seed."""
    draws, v = 20_000, 40
    logits = np.random.default_rng(5).standard_normal(v).astype(np.float32) * 1.5
    batch = make_batch(draws, seed=np.arange(draws), **settings)
    rows = jnp.broadcast_to(jnp.asarray(logits), (draws, v))
    allowed = jnp.full((draws, 2), -1, jnp.int32)
    tokens = np.asarray(jax.jit(lambda *a: sample_full(*a, num_logprobs=1)[0])(rows, batch, allowed))
    weights = np.exp((logits - logits.max()) / settings.get("temperature", 1.0)).astype(np.float64)
    kept, _ = kept_by_sort(
        weights, int(settings.get("top_k", 0)), settings.get("top_p", 1.0), settings.get("min_p", 0.0)
    )
    expected = np.where(kept, weights, 0) / weights[kept].sum() * draws
    counts = np.bincount(tokens, minlength=v)
    assert counts[~kept].sum() == 0
    bins = expected >= 5
    statistic = ((counts - expected)[bins] ** 2 / expected[bins]).sum()
    degrees = bins.sum() - 1
    # Wilson-Hilferty: the chi-square quantile at 1 - 1e-4 (z = 3.72).
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.72 * np.sqrt(2 / (9 * degrees))) ** 3
    if not settings:
        plain = np.asarray(jax.jit(sample_plain)(rows, batch))
        np.testing.assert_array_equal(plain, tokens)


def test_randomness_is_the_rows_own() -> None:
    """The same seed and position draw the same, whatever the row and the batch; others differ."""
    logits = jnp.broadcast_to(jnp.asarray(np.random.default_rng(0).standard_normal(5000), jnp.float32), (8, 5000))
    seeds = np.array([1, 2, 3, 2, 2**63 + 5, 2**32 + 2, 5, 2], np.uint64)
    tokens = np.asarray(sample_plain(logits, make_batch(8, seed=seeds)))
    alone = np.asarray(sample_plain(logits[:2], make_batch(2, seed=np.uint64(2))))
    assert tokens[1] == tokens[3] == tokens[7] == alone[0] == alone[1]
    assert len({int(t) for t in tokens}) == 6, "other seeds, high word included, draw other tokens"
    moved = np.asarray(sample_plain(logits, make_batch(8, seed=seeds, position=8)))
    assert (moved != tokens).sum() >= 6


def test_greedy_takes_the_first_of_ties() -> None:
    logits = jnp.asarray([[0.0, 3.0, 3.0, 1.0], [5.0, -1.0, 5.0, 5.0], [-np.inf, -np.inf, -2.0, -np.inf]])
    np.testing.assert_array_equal(greedy(logits), [1, 0, 2])


def test_greedy_rows_ignore_their_seed() -> None:
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((4, 999)), jnp.float32)
    tokens = sample_plain(logits, make_batch(4, seed=np.arange(4), temperature=[0.0, 0.0, 1e-6, 0.0]))
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))


def test_only_allowed_ids_are_picked() -> None:
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.standard_normal((6, 70)), jnp.float32)
    allowed = [{3}, {69}, {0, 31, 32}, set(range(70)), {64}, {31}]
    bits = np.zeros((6, 3), np.uint32)
    for row, ids in enumerate(allowed):
        for i in ids:
            bits[row, i // 32] |= np.uint32(1 << i % 32)
    for temperature in (0.0, 5.0):
        batch = make_batch(6, seed=np.arange(6), temperature=temperature)
        tokens, logprobs = sample_full(logits, batch, jnp.asarray(bits.view(np.int32)), num_logprobs=2)
        assert all(int(token) in ids for token, ids in zip(tokens, allowed, strict=True))
        # Log-probabilities are of the raw logits: a ban does not move them.
        expected = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), np.asarray(tokens)[:, None], 1)[:, 0]
        np.testing.assert_allclose(logprobs.sampled_s, expected, atol=1e-5)


def test_logprobs_equal_log_softmax() -> None:
    logits = np.random.default_rng(4).standard_normal((5, 200)).astype(np.float32) * 4
    batch = make_batch(5, seed=np.arange(5))
    tokens, logprobs = sample_full(jnp.asarray(logits), batch, jnp.full((5, 7), -1, jnp.int32), num_logprobs=8)
    wide = logits.astype(np.float64)
    exact = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    order = np.argsort(-exact, axis=1)[:, :8]
    np.testing.assert_array_equal(logprobs.top_ids_sk, order)
    np.testing.assert_allclose(logprobs.top_sk, np.take_along_axis(exact, order, 1), atol=1e-5)
    for row, token in enumerate(np.asarray(tokens)):
        assert logprobs.sampled_s[row] == pytest.approx(exact[row, token], abs=1e-5)
        assert logprobs.rank_s[row] == (logits[row] >= logits[row, token]).sum()
