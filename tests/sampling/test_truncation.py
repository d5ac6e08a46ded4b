"""The thresholds of top_k, top_p and min_p equal those of a sort in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.sampling.distribution import Distribution
from jaxllm.sampling.truncation import truncate
from tests.sampling.oracle import Row, adversarial_logits, kept_by_sort, make_batch, traced_for

pytestmark = pytest.mark.sampling

V = 300
SETTINGS = [(k, p, m) for k in (-1, 0, 1, 2, 5, 50, V - 1, V) for p in (1.0, 0.99, 0.5, 1e-9) for m in (0.0, 0.05, 1.0)]


@pytest.fixture(scope="module", params=["cpu", "gpu", "tpu"])
def program(request: pytest.FixtureRequest):
    def least(logits_sv, batch):
        distribution = Distribution(batch.temperature_s, logits_sv.max(axis=1), jnp.full(len(logits_sv), -jnp.inf))
        return truncate(logits_sv, distribution, batch.top_k_s, batch.top_p_s, batch.min_p_s, is_used=jnp.array(True))

    jitted = jax.jit(least)

    def run(*args):
        with traced_for(request.param):
            return jitted(*args)

    return run


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("name", sorted(adversarial_logits(V)))
def test_it_equals_a_sort(program, name: str, temperature: float) -> None:
    logits = adversarial_logits(V)[name]
    rows = [Row(temperature=temperature, top_k=k, top_p=p, min_p=m) for k, p, m in SETTINGS]
    least_s = np.asarray(program(jnp.asarray(np.tile(logits, (len(rows), 1))), make_batch(rows)))
    for row, least in zip(rows, least_s, strict=True):
        must, may = kept_by_sort(logits.astype(np.float64), row)
        kept = logits >= least
        assert kept.any(), f"nothing is left by {row}"
        assert (kept | ~must).all(), f"dropped too much at {row}"
        assert (may | ~kept).all(), f"kept too much at {row}"


def test_top_k_is_exact_where_probabilities_vanish(program) -> None:
    """Masses of e**-200 are 0 in float32, and yet the third of these ids is not the tenth."""
    logits = np.arange(V, dtype=np.float32)[::-1] * -200.0
    rows = [Row(temperature=1.0, top_k=k) for k in range(1, 6)]
    least_s = np.asarray(program(jnp.asarray(np.tile(logits, (len(rows), 1))), make_batch(rows)))
    assert [(logits >= least).sum() for least in least_s] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("top_p", [1e-39, 1e-60])
def test_a_share_that_underflows_keeps_the_most_likely(program, top_p: float) -> None:
    logits = np.random.default_rng(2).standard_normal(V).astype(np.float32)
    rows = [Row(temperature=1.0, top_p=top_p, top_k=k, min_p=m) for k in (0, 5) for m in (0.0, 0.05)]
    least_s = np.asarray(program(jnp.asarray(np.tile(logits, (len(rows), 1))), make_batch(rows)))
    assert (least_s == logits.max()).all()


def test_a_wide_vocabulary(program) -> None:
    """Sums of 50k masses round; what is kept stays within the tolerance."""
    logits = (np.random.default_rng(1).standard_normal(50_257) * 2).astype(np.float32)
    rows = [Row(temperature=1.0, top_p=p, top_k=k) for p, k in ((0.5, 0), (0.95, 0), (0.999, 0), (1.0, 1000))]
    least_s = np.asarray(program(jnp.asarray(np.tile(logits, (len(rows), 1))), make_batch(rows)))
    for row, least in zip(rows, least_s, strict=True):
        must, may = kept_by_sort(logits.astype(np.float64), row)
        kept = logits >= least
        assert (kept | ~must).all()
        assert (may | ~kept).all()
