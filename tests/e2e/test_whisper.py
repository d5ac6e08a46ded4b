"""`LLM` with tiny Whispers: HF's tokens, in every form of a prompt and beside other requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.exceptions import VLLMValidationError
from tests.models.clips import RATE
from tests.models.whisper_cases import Golden, read_case, save_checkpoint, text_of
from tests.quick_engine import quick_compile

__all__ = ["quick_compile"]
TOLERANCE = 1e-4
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, quick_compile: None) -> Iterator[LLM]:
    folder = save_checkpoint("base", tmp_path_factory.mktemp("whisper"))
    yield LLM(folder, dtype="float32", max_num_seqs=4, kv_cache_memory_bytes=2**22)


def of_ids(golden: Golden) -> dict[str, Any]:
    return {"prompt_token_ids": golden.prompt.tolist(), "multi_modal_data": {"audio": (golden.clip, RATE)}}


def check(output: Any, golden: Golden) -> None:
    completion = output.outputs[0]
    assert list(completion.token_ids) == golden.tokens.tolist()
    found = [step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    expected = golden.logprobs[len(golden.prompt) - 1 :].max(axis=-1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_tokens_match_hf(llm: LLM) -> None:
    goldens = read_case("base").goldens
    for golden in goldens:
        check(llm.generate(of_ids(golden), PARAMS)[0], golden)
    for output, golden in zip(llm.generate([of_ids(each) for each in goldens], PARAMS), goldens, strict=True):
        check(output, golden)
