"""What the cache of a model with attention over latents holds: one copy of each, in 8 bits too."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
import pytest

from jaxllm import SamplingParams
from tests.e2e.inside import core_of
from tests.e2e.tiny_engine import Job, run_together, tiny_llm
from tests.models.tiny import BLOCK_SIZE, read_goldens

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quick_compile")]

CASE, NUM_LAYERS, NUM_BLOCKS = "deepseek_v3", 2, 17
KEY_DIM = 32 + 16


@cache
def run(kv_cache_dtype: str) -> tuple[list[np.ndarray], int]:
    """Return each golden prompt's log-probabilities of what follows it, and the bytes of the pool."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
    arguments = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "num_gpu_blocks_override": NUM_BLOCKS}
    with tiny_llm(CASE, kv_cache_dtype=kv_cache_dtype, max_logprobs=-1, **arguments) as (llm, _):
        outputs = run_together(llm, [Job(golden.prompt.tolist(), params) for golden in read_goldens(CASE)])
        runner = core_of(llm)._runner
        assert runner is not None
        num_bytes = sum(array.nbytes for array in jax.tree.leaves(runner.launcher.pools))
    rows = []
    for output in outputs:
        [logprobs] = output.outputs[0].logprobs or []
        rows.append(np.array([logprobs[token].logprob for token in range(len(logprobs))]))
    return rows, num_bytes


@pytest.mark.parametrize(
    ("kv_cache_dtype", "num_bytes_each", "least", "most"),
    [("float16", 2, 1e-5, 1e-2), ("bfloat16", 2, 1e-4, 0.1), ("fp8_e4m3", 1, 1e-3, 0.8), ("fp8_e5m2", 1, 1e-3, 1.6)],
)
def test_latents_of_fewer_bits(kv_cache_dtype: str, num_bytes_each: int, least: float, most: float) -> None:
    exact, num_bytes = run("auto")
    assert num_bytes == NUM_LAYERS * NUM_BLOCKS * BLOCK_SIZE * KEY_DIM * 4
    rounded, fewer_bytes = run(kv_cache_dtype)
    assert fewer_bytes == num_bytes // 4 * num_bytes_each
    for golden, want, got in zip(read_goldens(CASE), exact, rounded, strict=True):
        np.testing.assert_allclose(want, golden.logprobs[0], rtol=0, atol=1e-4)
        difference = np.abs(got - want).max()
        assert least < difference < most
