"""Every feature of a row equals the float64 oracle, alone and all at once, and touches nothing else."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.sampling import sampler
from tests.sampling.oracle import (
    Row,
    Sampler,
    adversarial_logits,
    edited,
    everything,
    kept_by_sort,
    make_sampler,
    processed,
    steer,
)

pytestmark = pytest.mark.sampling

V = 300
seen = partial(Row, prompt=(1, 2, 2, V - 1), output=(2, 4, 4, 4))
FEATURES: dict[str, Row] = {
    "nothing": Row(),
    "temperature": Row(temperature=0.7),
    "top_k": Row(temperature=1.0, top_k=9),
    "top_p": Row(temperature=1.0, top_p=0.8),
    "min_p": Row(temperature=1.3, min_p=0.05),
    "presence": seen(presence=1.5),
    "frequency": seen(frequency=0.7),
    "repetition": seen(repetition=1.8),
    "rewards": seen(presence=-1.5, frequency=-0.7, repetition=0.6),
    "logit_bias": Row(bias={0: 5.0, 4: -100.0, V - 1: 0.25}),
    "mask": Row(allowed=frozenset({0, 31, 32, 100, V - 1})),
    "processor": seen(boost=0.5),
    "scored": Row(scored=V - 1),
    "everything": everything(V),
    "everything, greedy": everything(V, temperature=0.0),
    "many truncations": Row(temperature=2.0, top_k=50, top_p=0.6, min_p=0.1, seed=4),
}
STAGES = {
    "mask": ("mask", "everything"),
    "add_biases": ("logit_bias", "everything"),
    "penalize": ("presence", "frequency", "repetition", "rewards", "everything"),
    "process": ("processor", "everything"),
}
TRUNCATING = ("top_k", "top_p", "min_p", "everything", "many truncations")


@pytest.fixture(scope="module", params=["cpu", "tpu", "gpu"])
def program(request: pytest.FixtureRequest) -> Sampler:
    """Return the sampler of each platform with a custom processor; it shows every processed logit."""
    return make_sampler("processed_logits", V, steer, platform=request.param, poisons_uses=request.param == "gpu")


def logits_rows(name: str, num_rows: int = len(FEATURES)) -> np.ndarray:
    """Return the logits of that name, turned by another step in each row."""
    base = adversarial_logits(V)[name]
    return np.stack([np.roll(base, 37 * row) for row in range(num_rows)])


def mismatches(program: Sampler, logits_sv: np.ndarray) -> dict[str, str]:
    """Return which rows differ from the oracle, and how."""
    rows = list(FEATURES.values())
    tokens, logprobs = program(logits_sv, rows)
    assert logprobs.all_sv is not None
    differences: dict[str, str] = {}
    for name, row, logits, token, shown in zip(FEATURES, rows, logits_sv, tokens, logprobs.all_sv, strict=True):
        problem = mismatch(logits, row, int(token), shown)
        if problem:
            differences[name] = problem
    return differences


def mismatch(logits: np.ndarray, row: Row, token: int, shown: Any) -> str | None:
    """Compare one row and say what differs; None means nothing."""
    if row.scored is not None:
        right = token == row.scored and np.array_equal(shown, logits)
        return None if right else "a prompt row is not raw"
    values = edited(logits, row, steers=True)
    everything_kept = np.ones(V, bool)
    must, may = (everything_kept, everything_kept) if row.temperature == 0 else kept_by_sort(values, row)
    kept = shown > -np.inf
    if (must & ~kept & (values > -np.inf)).any():
        return "too little is kept"
    if (kept & ~(may & (values > -np.inf))).any():
        return "too much is kept"
    exact = processed(values, row, everything_kept)
    if not np.allclose(shown[kept], exact[kept], rtol=2e-6, atol=2e-5):
        return f"values differ by up to {np.abs(shown[kept] - exact[kept]).max()}"
    if row.temperature == 0 and token != np.flatnonzero(shown == shown.max())[0]:
        return "not the first of the most likely ids"
    if not kept[token]:
        return "a token that was cut off"
    return None


@pytest.mark.parametrize("name", sorted(adversarial_logits(V)))
def test_every_row_equals_the_oracle(program: Sampler, name: str) -> None:
    assert mismatches(program, logits_rows(name)) == {}


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_a_stage_replaced_by_identity_is_noticed(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    monkeypatch.setattr(sampler, stage, lambda logits_sv, *args, **kwargs: logits_sv)
    differences = mismatches(make_sampler("processed_logits", V, steer), logits_rows("random"))
    assert set(STAGES[stage]) <= set(differences)
    assert {"nothing", "temperature", "scored"}.isdisjoint(differences)


def test_truncation_replaced_by_identity_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "truncate", lambda logits_sv, *args, **kwargs: jnp.full(len(logits_sv), -jnp.inf))
    differences = mismatches(make_sampler("processed_logits", V, steer), logits_rows("random"))
    assert set(differences) == set(TRUNCATING)


@pytest.mark.parametrize("name", [name for name in FEATURES if name != "nothing"])
def test_a_feature_changes_its_own_row_only(program: Sampler, name: str) -> None:
    logits = logits_rows("random")
    rows = list(FEATURES.values())
    index = list(FEATURES).index(name)
    without = [*rows[:index], Row(), *rows[index + 1 :]]
    with_it, plain = program(logits, rows), program(logits, without)
    others = np.arange(len(rows)) != index
    assert with_it[1].all_sv is not None
    assert plain[1].all_sv is not None
    np.testing.assert_array_equal(with_it[0][others], plain[0][others])
    np.testing.assert_array_equal(with_it[1].all_sv[others], plain[1].all_sv[others])
    assert name == "scored" or not np.array_equal(with_it[1].all_sv[index], plain[1].all_sv[index])


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_broken_row_touches_no_other(program: Sampler, poison: float) -> None:
    """NaN, infinite and impossible rows get some id of the vocabulary, and leave the others as they were."""
    logits = logits_rows("random")
    expected = program(logits, list(FEATURES.values()))
    for index in range(len(FEATURES)):
        broken = logits.copy()
        broken[index, :: 1 if poison == -np.inf else 3] = poison
        tokens, logprobs = program(broken, list(FEATURES.values()))
        assert ((tokens >= 0) & (tokens < V)).all()
        others = np.arange(len(FEATURES)) != index
        assert logprobs.all_sv is not None
        assert expected[1].all_sv is not None
        np.testing.assert_array_equal(tokens[others], expected[0][others])
        np.testing.assert_array_equal(logprobs.all_sv[others], expected[1].all_sv[others])
