"""SmolLM2 with quantization="int8" is nearly the same model in half the memory, and as independent of the batch.

So it is where its quantized weights multiply rounded inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxllm import LLM, RequestOutput, SamplingParams
from jaxllm.execution.launcher import Launcher
from pallas_kernels.linear import LinearShape, rounding_refusal
from pallas_kernels.weights import WeightFormat
from tests.e2e.goldens import load_rows
from tests.e2e.inside import core_of

pytestmark = pytest.mark.device

PROMPTS = [row["prompt_ids"] for row in load_rows("smollm2-135m-instruct-q4_1") if 100 < len(row["prompt_ids"]) < 500]

NUM_PARAMS = 134_515_008

# Few buckets: most of the time goes into programs.
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 16,
    "cudagraph_capture_sizes": [16],
}


@pytest.fixture(scope="module")
def rounding(smollm2_path: str) -> Iterator[LLM]:
    shape = LinearShape(64, 64, jnp.bfloat16, jnp.float32, WeightFormat(4, 32, has_mins=True))
    if reason := rounding_refusal(shape):
        pytest.skip(reason)
    settings: dict[str, Any] = SETTINGS | {"dtype": "float32", "kv_cache_dtype": "float16"}
    with LLM(smollm2_path, linear_backend="cpu_int8", **settings) as llm:
        yield llm


@pytest.fixture(scope="module")
def quantized(smollm2_path: str) -> Iterator[LLM]:
    with LLM(smollm2_path, quantization="int8", **SETTINGS) as llm:
        yield llm


def read(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    """Return outputs with the log-probability of each of the prompts' tokens."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def perplexity(outputs: list[RequestOutput]) -> float:
    logprobs = [
        position[token].logprob
        for output in outputs
        for token, position in zip(output.prompt_token_ids or (), output.prompt_logprobs or (), strict=True)
        if position is not None
    ]
    assert len(logprobs) > 1000
    return math.exp(-sum(logprobs) / len(logprobs))


def launcher_of(llm: LLM) -> Launcher:
    runner = core_of(llm)._runner
    assert runner is not None
    return runner.launcher


def num_bytes(llm: LLM) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(launcher_of(llm).params))


@pytest.fixture(scope="module")
def exact(smollm2_path: str) -> tuple[float, int]:
    """Return the perplexity of the file as it is, and its bytes in memory."""
    with LLM(smollm2_path, **SETTINGS) as llm:
        return perplexity(read(llm, PROMPTS)), num_bytes(llm)


def test_is_nearly_the_same_model_in_half_the_memory(
    smollm2_path: str, exact: tuple[float, int], quantized: LLM
) -> None:
    expected, kept = exact
    got = perplexity(read(quantized, PROMPTS))
    assert got != expected
    assert got == pytest.approx(expected, rel=0.03)
    assert num_bytes(quantized) < 0.51 * 2 * NUM_PARAMS
    # The file's weights stay as they are in memory.
    assert kept < Path(smollm2_path).stat().st_size


def test_rounded_inputs_keys_and_values_are_nearly_the_same_model(exact: tuple[float, int], rounding: LLM) -> None:
    expected, kept = exact
    got = perplexity(read(rounding, PROMPTS))
    assert got != expected
    assert got == pytest.approx(expected, rel=0.02), "0.3 % on the 8,000 tokens of scripts/benchmark.py --task gguf"
    assert num_bytes(rounding) == pytest.approx(kept, rel=1e-3), "norms are in float32"
    assert {array.dtype for array in jax.tree.leaves(launcher_of(rounding).pools)} == {jnp.dtype(jnp.float16)}


@pytest.mark.parametrize("name", ["quantized", "rounding"])
def test_company_changes_no_bit(name: str, request: pytest.FixtureRequest) -> None:
    llm = request.getfixturevalue(name)
    prompts = [[*ids[: 37 + 11 * i], 5 + i] for i, ids in enumerate(PROMPTS[:8])]
    together = read(llm, prompts)
    alone = [output for ids in prompts for output in read(llm, [ids])]
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.prompt_logprobs == other.prompt_logprobs
