"""A GPU's sampler has no branch and no loop: the host is never asked."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxllm.config.arguments import LOGPROBS_MODES
from jaxllm.execution.programs.compiler import PLATFORMS as JAX_NAMES
from jaxllm.sampling.sampler import sample_full, sample_plain, sample_truncated
from tests.sampling.oracle import Row, make_batch, make_rules, steer, traced_for

pytestmark = pytest.mark.sampling

V, NUM_ROWS = 1000, 3
BRANCH = re.compile(r"stablehlo\.(?:case|if)\b")
PROGRAMS = {"plain": sample_plain, "truncated": sample_truncated} | {
    mode: partial(sample_full, num_logprobs=20, logprobs_mode=mode, processors=(steer,)) for mode in LOGPROBS_MODES
}


def lowered(name: str, platform: str, *, skips_unused: bool) -> str:
    """Return one of the programs, as it is given to a platform's compiler."""
    rows = [Row()] * NUM_ROWS
    arguments = (jnp.zeros((NUM_ROWS, V)), make_batch(rows), *(make_rules(rows, V) if name in LOGPROBS_MODES else ()))
    program = jax.jit(partial(PROGRAMS[name], skips_unused=skips_unused))
    # The compiler folds the branch on the platform itself.
    with traced_for(platform):
        return program.trace(*arguments).lower(lowering_platforms=(JAX_NAMES[platform],)).as_text()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_gpu_asks_the_host_nothing(name: str) -> None:
    text = lowered(name, "gpu", skips_unused=False)
    assert BRANCH.findall(text) == []
    assert "stablehlo.while" not in text, "the host would drive a loop"


@pytest.mark.parametrize("name", PROGRAMS)
def test_other_platforms_skip_what_no_row_uses(name: str) -> None:
    assert BRANCH.search(lowered(name, "tpu", skips_unused=True))
