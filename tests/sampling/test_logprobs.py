"""Logprobs in the four modes equal float64's: of sampled tokens, likely ones, asked ones and prompt tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config.arguments import LOGPROBS_MODES
from jaxllm.sampling.logprobs import MAX_TOP_IDS, Logprobs, gather_logprobs
from tests.sampling.oracle import (
    Row,
    adversarial_logits,
    edited,
    everything,
    log_softmax,
    make_sampler,
    processed,
)

pytestmark = pytest.mark.sampling

V = 300
seen = partial(Row, prompt=(1, 2, 2, V - 1), output=(2, 4, 4, 4))
ROWS = [
    Row(asked=(5, 0, V - 1)),
    Row(temperature=0.8, seed=3, asked=(7,)),
    seen(temperature=0.0, presence=1.0, repetition=1.5, asked=(2, 4)),
    Row(temperature=1.5, top_k=30, seed=9, asked=(1, 2, 3, 4)),
    Row(temperature=0.0, allowed=frozenset({3, 8, 250}), asked=(3, 4)),
    Row(temperature=0.7, allowed=frozenset(range(0, V, 6)), grammar=frozenset(range(0, V, 3)), seed=5, asked=(3, 4, 6)),
    Row(allowed=frozenset(range(40, 50)), grammar=frozenset(range(40, 50)), asked=(V - 1, 49)),
    everything(V, top_p=1.0, min_p=0.0),
    Row(scored=11, asked=(11, 12)),
    Row(scored=V - 1, asked=(0,)),
]


def expected_values(logits: np.ndarray, row: Row, mode: str) -> np.ndarray:
    """Return what the row shows of each id."""
    values = logits.astype(np.float64)
    if row.grammar is not None:
        values = np.where(np.isin(np.arange(V), list(row.grammar)), values, -np.inf)
    if mode.startswith("processed") and row.scored is None:
        values = edited(logits, row)
        kept = np.ones(V, bool) if row.top_k == 0 else values >= np.sort(values)[-row.top_k]
        values = processed(values, row, kept)
    return log_softmax(values) if mode.endswith("logprobs") else values


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_values_equal_the_oracle(mode: str) -> None:
    """The values are of the sampled token with its rank, the 8 most likely ids, and those that were asked for."""
    program = make_sampler(mode, 8)
    for kind in ("random", "forbidden", "flat"):
        base = adversarial_logits(V)[kind]
        logits = np.stack([np.roll(base, 37 * row) for row in range(len(ROWS))])
        tokens, logprobs = program(logits, ROWS)
        assert logprobs.all_sv is None
        assert logprobs.top_sk is not None
        assert logprobs.top_ids_sk is not None
        for index, row in enumerate(ROWS):
            values = expected_values(logits[index], row, mode)
            token = int(tokens[index])
            assert row.scored in (None, token)
            top_ids = logprobs.top_ids_sk[index]
            assert len(set(top_ids)) == 8
            np.testing.assert_allclose(logprobs.sampled_s[index], values[token], atol=2e-5, rtol=2e-6)
            np.testing.assert_allclose(logprobs.top_sk[index], np.sort(values)[::-1][:8], atol=2e-5, rtol=2e-6)
            np.testing.assert_allclose(logprobs.top_sk[index], values[top_ids], atol=2e-5, rtol=2e-6)
            asked = logprobs.asked_sn[index, : len(row.asked)]
            np.testing.assert_allclose(asked, values[list(row.asked)], atol=2e-5, rtol=2e-6)
            # Ids as likely count; so near to the token's value, float32 may order otherwise than float64.
            rank = logprobs.rank_s[index]
            margin = 1e-4
            assert (values >= values[token] + margin).sum() <= rank <= (values >= values[token] - margin).sum()


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_results_do_not_depend_on_the_other_rows(mode: str) -> None:
    """Results are equal to the bit, alone and in company, grammars among it, at a width that fills no whole tile."""
    program = make_sampler(mode, 8)
    logits = np.stack([np.roll(adversarial_logits(V)["random"], 37 * row) for row in range(len(ROWS))])
    tokens, logprobs = program(logits, ROWS)
    for index, row in enumerate(ROWS):
        alone = program(logits[index : index + 1], [row])
        assert alone[0][0] == tokens[index]
        for name, value in alone[1]._asdict().items():
            if value is not None:
                np.testing.assert_array_equal(value[0], getattr(logprobs, name)[index], err_msg=name)


def gather(values: np.ndarray, tokens: list[int], asked: list[list[int]], num_logprobs: int) -> Logprobs:
    """Return the log-probabilities of `values`."""
    program = jax.jit(partial(gather_logprobs, num_logprobs=num_logprobs, normalizes=True, is_used=jnp.array(True)))
    return program(jnp.asarray(values), jnp.asarray(tokens), jnp.asarray(asked))


def test_rank_counts_ties() -> None:
    values = np.array([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0]], np.float32)
    assert gather(values, [1, 0, 3], [[0], [0], [0]], 2).rank_s.tolist() == [3, 5, 4]


def test_many_logprobs_come_as_the_whole_vocabulary() -> None:
    values = np.stack([adversarial_logits(V)[name] for name in ("random", "forbidden", "one-hot")])
    logprobs = gather(values, [0, 1, 2], [[0], [0], [0]], MAX_TOP_IDS + 1)
    assert logprobs.top_sk is None
    assert logprobs.top_ids_sk is None
    assert logprobs.all_sv is not None
    for row, shown in zip(values, logprobs.all_sv, strict=True):
        np.testing.assert_allclose(shown, log_softmax(row.astype(np.float64)), atol=2e-5, rtol=2e-6)


def test_impossible_ids_stay_at_minus_infinity() -> None:
    """No value is NaN, even where no id is possible."""
    values = np.array([[-np.inf, 1.0, -np.inf], [-np.inf, -np.inf, -np.inf]], np.float32)
    logprobs = gather(values, [0, 0], [[1, 2], [0, 1]], 3)
    np.testing.assert_array_equal(logprobs.sampled_s, [-np.inf, -np.inf])
    np.testing.assert_array_equal(logprobs.asked_sn, [[0.0, -np.inf], [-np.inf, -np.inf]])
    np.testing.assert_array_equal(logprobs.top_sk, [[0.0, -np.inf, -np.inf], [-np.inf] * 3])


def test_nothing_is_computed_unless_used() -> None:
    values = jnp.ones((2, 9))
    logprobs = gather_logprobs(
        values,
        jnp.asarray([0, 1]),
        jnp.zeros((2, 1), jnp.int32),
        num_logprobs=2,
        normalizes=True,
        is_used=jnp.array(False),
    )
    assert not any(np.asarray(value).any() for value in jax.tree.leaves(logprobs))
