"""Engines align transcripts: in their own process and in another, with tiny Whispers and with a real one."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM
from jaxllm.core_messages import Alignment
from jaxllm.engine.offline.llm_engine import LLMEngine
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.speech.words import find_words, time_tokens
from tests.models.clips import RATE, unpack_speech
from tests.models.tiny import folder
from tests.models.whisper_cases import Golden, read_case, save_checkpoint
from tests.quick_engine import quick_compile

__all__ = ["quick_compile"]
pytestmark = pytest.mark.families

DATA = Path(__file__).parents[1] / "data" / "alignment"
LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "num_gpu_blocks_override": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny Whisper with the goldens' alignment heads."""
    path = tmp_path_factory.mktemp("whisper")
    with np.load(DATA / "tiny.npz") as goldens:
        heads = json.loads(str(goldens["heads"]))["base"]
    (path / "generation_config.json").write_text(json.dumps({"alignment_heads": heads}))
    return save_checkpoint("base", path)


@pytest.fixture(scope="module")
def engine(checkpoint: str, quick_compile: None) -> LLMEngine:
    return LLM(checkpoint, **LIMITS).llm_engine


def of(golden: Golden) -> dict[str, Any]:
    return {"prompt_token_ids": golden.prompt.tolist(), "multi_modal_data": {"audio": (golden.clip, RATE)}}


def check(alignment: Alignment, index: int) -> None:
    golden = read_case("base").goldens[index]
    with np.load(DATA / "tiny.npz") as goldens:
        heard, times = goldens[f"base_heard_{index}"], goldens[f"base_times_{index}"]
    ours = np.frombuffer(alignment.heard, np.float32).reshape(heard.shape)
    np.testing.assert_allclose(ours, heard, rtol=0, atol=TOLERANCE)
    expected = golden.logprobs[len(golden.prompt) - 1 :].max(axis=-1)
    np.testing.assert_allclose(alignment.logprobs, expected, rtol=0, atol=TOLERANCE)
    ends = [token.end for token in time_tokens(golden.tokens.tolist(), alignment)]
    np.testing.assert_allclose(ends, times, rtol=0, atol=1e-6)


def test_tokens_are_aligned_as_hf_aligns_them(engine: LLMEngine) -> None:
    for index, golden in enumerate(read_case("base").goldens):
        check(engine.align(of(golden), golden.tokens.tolist()), index)
        encoded = engine.front.inputs.encode(of(golden))
        check(engine.align(encoded, golden.tokens), index)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [([], "0 after it"), ([3] * 48, "at most 48"), ([96], "from 0 to 95"), ([-1], "token_ids"), (["w"], "token_ids")],
)
def test_other_tokens_are_refused(engine: LLMEngine, token_ids: Any, message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message) as error:
        engine.align(of(read_case("base").goldens[0]), token_ids)
    assert error.value.parameter == "token_ids"


def test_models_of_text_align_nothing(quick_compile: None) -> None:
    text = LLM(str(folder("qwen3")), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=8).llm_engine
    with pytest.raises(VLLMValidationError, match="takes no sound"):
        text.align([1, 2], [3])


def test_a_core_in_another_process_aligns_too(checkpoint: str) -> None:
    async def align_all() -> list[Alignment]:
        async with AsyncLLM.from_engine_args(AsyncEngineArgs(checkpoint, **LIMITS)) as llm:
            goldens = read_case("base").goldens
            with pytest.raises(VLLMValidationError, match="at most 48"):
                await llm.align(of(goldens[0]), [3] * 48)
            return await asyncio.gather(*(llm.align(of(golden), golden.tokens.tolist()) for golden in goldens))

    for index, alignment in enumerate(asyncio.run(align_all())):
        check(alignment, index)


@pytest.mark.parametrize("heads", [7, [[0]], [["a", "b"]], "all"])
def test_strange_alignment_heads_are_refused(heads: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"alignment_heads": heads}))
    with pytest.raises(VLLMValidationError, match="list of pairs of a layer and a head"):
        LLM(save_checkpoint("base", tmp_path), **LIMITS)


def test_spoken_words_have_the_times_of_hf(whisper_path: str) -> None:
    """Two sentences that espeak-ng speaks, with Whisper base."""
    llm = LLM(whisper_path, dtype="float32", max_num_seqs=1, max_model_len=128)
    tokenizer = llm.llm_engine.front.require_tokenizer()
    with np.load(DATA / "speech.npz") as goldens:
        for language in ("en", "de"):
            prompt, tokens, times = (goldens[f"{kind}_{language}"] for kind in ("prompt", "tokens", "times"))
            audio = {"audio": (unpack_speech(goldens[f"sound_{language}"]), RATE)}
            prompted = {"prompt_token_ids": prompt.tolist(), "multi_modal_data": audio}
            timed = time_tokens(tokens.tolist(), llm.llm_engine.align(prompted, tokens.tolist()))
            np.testing.assert_allclose([token.end for token in timed], times, rtol=0, atol=0.02 + 1e-6)
            text = [token for token in timed if token.token_id < 50_257]
            words = find_words(text, partial(tokenizer.decode, skip_special_tokens=False), language)
            assert [word.word.strip() for word in words] == tokenizer.decode(
                [token.token_id for token in text], skip_special_tokens=False
            ).split()
            assert all(word.start <= word.end and 0 < word.probability <= 1 for word in words)
