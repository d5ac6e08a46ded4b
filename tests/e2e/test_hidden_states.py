"""Hidden states of prompts through `LLM`: HF's, whoever else runs, in chunks, after preemption and with steering."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, AsyncLLM, RequestOutput, SamplingParams, TokensPrompt
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.sampling_params import RequestOutputKind
from tests.e2e.test_steering import CASE, CASES, DATA, SETTINGS, STEERED, TOLERANCE, prompt_of
from tests.models.tiny import folder

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quick_compile")]

VECTORS = str(DATA / CASE / "vectors.safetensors")
BOTH: dict[str, Any] = {"hidden_states_layers": [0, -1], "steering": VECTORS}


def hidden_of(case: str = CASE) -> np.ndarray:
    """Return what HF's layers put out for the prompt, [layers, t, d]."""
    with np.load(DATA / case / "golden.npz") as arrays:
        return arrays["hidden_ntd"]


def run(llm: LLM, prompts: Sequence[list[int]], asked: Sequence[Any], **fields: Any) -> list[RequestOutput]:
    """Continue prompts; `asked` has the extra_args of each."""
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "detokenize": False} | fields
    params = [SamplingParams(extra_args=each, **settings) for each in asked]
    return llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False)


def states_of(output: RequestOutput) -> np.ndarray:
    states = output.prompt_hidden_states
    assert states is not None
    assert states.dtype == np.float32
    return states


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(folder(CASE)), **SETTINGS, **BOTH) as llm:
        yield llm


@pytest.mark.parametrize("case", CASES)
def test_states_are_those_of_hf(case: str):
    expected_ntd = hidden_of(case)
    layers = list(range(len(expected_ntd)))[::-1]
    with LLM(str(folder(case)), **SETTINGS, hidden_states_layers=layers) as llm:
        outputs = run(llm, [prompt_of(case)] * 3, [{"hidden_states": "all"}, None, {"hidden_states": "last"}])
        scale = np.abs(expected_ntd).max()
        np.testing.assert_allclose(states_of(outputs[0]), expected_ntd[::-1], rtol=0, atol=TOLERANCE * max(1, scale))
        assert outputs[1].prompt_hidden_states is None
        np.testing.assert_array_equal(states_of(outputs[2]), states_of(outputs[0])[:, -1:])


def test_prefixes_chunks_outputs_and_batches_change_no_bit(llm: LLM):
    long = prompt_of() * 3  # in chunks of at most 16 tokens
    llm.reset_prefix_cache()
    [expected] = run(llm, [long], [{"hidden_states": "all"}])
    prompts = [long, long[:5], long, prompt_of()]
    asked = [{"hidden_states": "all"}, {"hidden_states": "all"}, {"hidden_states": "last"}, None]
    for num in (1, 3):
        outputs = run(llm, prompts, asked, n=num, temperature=num - 1, logprobs=1)
        np.testing.assert_array_equal(states_of(outputs[0]), states_of(expected))
        np.testing.assert_array_equal(states_of(outputs[1]), states_of(expected)[:, :5])
        np.testing.assert_array_equal(states_of(outputs[2]), states_of(expected)[:, -1:])
    assert states_of(expected).shape == (2, len(long), 48)
    assert outputs[2].num_cached_tokens, "the last position does without the prefix cache"
    assert not outputs[0].num_cached_tokens


def test_preempted_requests_report_all_positions():
    prompts = [[10 + index, *prompt_of(), *prompt_of()] for index in range(6)]
    asked = [{"hidden_states": "all"}] * 6
    settings: dict[str, Any] = SETTINGS | {"max_num_batched_tokens": 64, "enable_prefix_caching": False}
    with LLM(str(folder(CASE)), **settings, hidden_states_layers=[1]) as roomy:
        expected = run(roomy, prompts, asked, max_tokens=40)
    few: dict[str, Any] = settings | {"num_gpu_blocks_override": 12}
    with LLM(str(folder(CASE)), **few, hidden_states_layers=[1]) as tight:
        outputs = run(tight, prompts, asked, max_tokens=40)
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    for ours, theirs in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(states_of(ours), states_of(theirs))


def test_a_difference_of_states_steers_and_is_seen_in_the_states(llm: LLM):
    steered = {"hidden_states": "all", "steering": STEERED["one"]}
    plain, moved = (states_of(each) for each in run(llm, [prompt_of()] * 2, [{"hidden_states": "all"}, steered]))
    np.testing.assert_array_equal(moved[0], plain[0])  # the vector is of the second layer alone
    differences_td = (moved - plain)[1]
    np.testing.assert_allclose(differences_td, np.broadcast_to(differences_td[:1], differences_td.shape), atol=1e-4)
    assert np.abs(differences_td).max() > 0.1


def test_streams_have_them_in_the_last_output():
    args = AsyncEngineArgs(model=str(folder(CASE)), **SETTINGS, hidden_states_layers=[1])

    async def stream() -> list[RequestOutput]:
        async with AsyncLLM.from_engine_args(args) as engine:
            asked = {"hidden_states": "all"}
            params = SamplingParams(max_tokens=4, temperature=0, detokenize=False, extra_args=asked)
            params.output_kind = RequestOutputKind.DELTA
            return [each async for each in engine.generate({"prompt_token_ids": prompt_of()}, params, "a")]

    *before, last = asyncio.run(stream())
    assert all(output.prompt_hidden_states is None for output in before)
    np.testing.assert_allclose(states_of(last)[0], hidden_of()[1], rtol=0, atol=TOLERANCE)


def test_others_are_refused(llm: LLM):
    for value in (True, "first", ["last"], {"positions": "all"}, None, 3):
        with pytest.raises(VLLMValidationError, match="'last' or 'all'") as error:
            run(llm, [[1]], [{"hidden_states": value}])
        assert error.value.parameter == "extra_args"
    with LLM(str(folder(CASE)), **SETTINGS) as plain, pytest.raises(VLLMValidationError, match="hidden_states_layers"):
        run(plain, [[1]], [{"hidden_states": "last"}])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_states_layers": [2]}, "from -2 to 1"),
        ({"hidden_states_layers": [-3]}, "from -2 to 1"),
        ({"hidden_states_layers": [1, -1]}, "twice"),
        ({"hidden_states_layers": [1], "runner": "pooling"}, "decoders that generate"),
    ],
)
def test_layers_that_are_none_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(VLLMValidationError, match=message) as error:
        LLM(str(folder(CASE)), **SETTINGS, **settings)
    assert error.value.parameter == "hidden_states_layers"
