"""A row has the same token and log-probabilities, to the bit, alone and in company: a CPU samples few rows singly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.execution.options import compiler_options
from jaxllm.sampling.sampler import sample_full, sample_plain, sample_truncated
from tests.sampling.oracle import Row, adversarial_logits, make_batch, make_rules, make_sampler, traced_for

pytestmark = pytest.mark.sampling

V, NUM_ROWS = 50_000, 64
KINDS = (
    Row(),
    Row(temperature=0.7),
    Row(temperature=1.0, top_k=40),
    Row(temperature=1.2, top_p=0.9),
    Row(temperature=1.0, min_p=0.01, top_p=0.95),
    Row(temperature=0.9, presence=0.5, repetition=1.3, prompt=(1, 3, 8), output=(3, 3, 12), bias={3: 2.0}),
)
ROWS = [replace(KINDS[index % len(KINDS)], seed=index, position=index) for index in range(NUM_ROWS)]


def compiled(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Compile as an engine does whose answers do not depend on company."""
    options = compiler_options("cpu", jnp.float32, batch_invariant=True)
    return jax.jit(function).lower(*arguments).compile(compiler_options=options)


def make_logits(num_rows: int) -> jax.Array:
    """Return logits with a few likely ids and a long tail, as models have."""
    return jnp.asarray(np.random.default_rng(9).gumbel(size=(num_rows, V)) * 2.0, jnp.float32)


def test_full_rows_have_the_same_bits_one_by_one() -> None:
    full = partial(sample_full, num_logprobs=20, logprobs_mode="processed_logprobs", processors=())
    rules, rare, uses, counts_cv = make_rules(ROWS, V)
    of_rows = make_logits(NUM_ROWS), make_batch(ROWS), rules, rare

    def one(row: int) -> Any:
        return jax.tree.map(lambda x: x[row : row + 1], of_rows)

    expected = compiled(full, *of_rows, uses, counts_cv)(*of_rows, uses, counts_cv)
    alone = compiled(full, *one(0), uses, counts_cv)
    for row in range(NUM_ROWS):
        result = alone(*one(row), uses, counts_cv)
        jax.tree.map(lambda got, want, row=row: np.testing.assert_array_equal(got[0], want[row]), result, expected)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_plain_row_without_company_gets_its_token(temperature: float) -> None:
    """What padding holds does not matter."""
    logits = make_logits(8)
    batch = make_batch([Row(temperature=temperature, seed=seed) for seed in range(8)])
    expected = np.asarray(compiled(sample_plain, logits, batch)(logits, batch))
    assert len(set(expected)) > 1
    program = compiled(sample_plain, logits, batch, jnp.int32(1))
    for first in range(8):
        order = (np.arange(8) + first) % 8
        for num_rows in (1, 2, 8):
            permuted = logits[order].at[num_rows:].set(jnp.nan)
            tokens = program(permuted, jax.tree.map(lambda x, order=order: x[order], batch), jnp.int32(num_rows))
            np.testing.assert_array_equal(tokens[:num_rows], expected[order[:num_rows]])


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_a_row_gets_its_token_from_each_program_that_can_run_it(platform: str) -> None:
    """The plain program serves rows that do not truncate, the truncated one those without rules, the full one all."""
    kinds = (Row(), Row(temperature=0.7), Row(temperature=1.0, top_k=3), Row(temperature=1.2, top_p=0.9, min_p=0.01))
    of_kinds = [np.tile(logits_v, (len(kinds) * 2, 1)) for logits_v in adversarial_logits(300).values()]
    logits = np.concatenate(of_kinds)
    rows = [replace(kinds[index % len(kinds)], seed=index) for index in range(len(logits))]
    skips = platform != "gpu"
    full = make_sampler("raw_logprobs", 5, platform=platform)(logits, rows)[0]
    with traced_for(platform):
        truncated = np.asarray(jax.jit(partial(sample_truncated, skips_unused=skips))(logits, make_batch(rows)))
        plain = np.asarray(jax.jit(partial(sample_plain, skips_unused=skips))(logits, make_batch(rows)))
    np.testing.assert_array_equal(truncated, full)
    is_plain = np.array([not row.truncates for row in rows])
    np.testing.assert_array_equal(plain[is_plain], truncated[is_plain])
    assert (plain != truncated)[~is_plain].any()
