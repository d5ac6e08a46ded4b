"""GGUF models with their vision towers answer as HF does with the checkpoints that they were made from.

scripts/make/gguf_vision.py writes the files with llama.cpp's own converter.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from jaxllm import RequestOutput, SamplingParams
from jaxllm.exceptions import VLLMValidationError
from tests.e2e.media_goldens import NAMES, logprobs_of, picture, prompt_of, read_golden
from tests.e2e.tiny_engine import tiny_llm

pytestmark = pytest.mark.families

GGUF = Path(__file__).parents[1] / "data" / "gguf" / "vision"
TOLERANCE = 1e-4
WHOLE = 320
QWENS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "max_model_len": WHOLE,
    "max_num_batched_tokens": WHOLE,
    "cudagraph_capture_sizes": [8],
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 200,
    "max_logprobs": -1,
}
SMALL_IMAGES = {"min_pixels": 256, "max_pixels": 4096}
"""The bounds of the tiny Qwens' images: a GGUF file has those of the real models."""
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
"""The layers of the tiny Gemma: a GGUF file has no pattern, which is that of the real models."""
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=-1, ignore_eos=True)


def arguments_of(family: str) -> dict[str, Any]:
    """Return the engine arguments for what a file does not say of a tiny model."""
    if family in QWENS:
        return ARGUMENTS | {"mm_processor_kwargs": SMALL_IMAGES}
    return ARGUMENTS | {"hf_overrides": {"text_config": {"layer_types": LAYER_TYPES}}}


@pytest.mark.parametrize("family", ["gemma3", *QWENS])
def test_answers_are_hf(family: str) -> None:
    """Prompts of token ids, one of text, whose placeholders are of the file's vocabulary, and one of its template."""
    goldens = [read_golden(family, name) for name in NAMES]
    prompts: list[Any] = [
        prompt_of(family, golden) if golden.pictures else {"prompt_token_ids": golden.ids.tolist()}
        for golden in goldens
    ]
    shown = [picture(family, number) for number in goldens[-1].pictures]
    prompts.append({"prompt": goldens[-1].text, "multi_modal_data": {"image": shown}})
    parts = [{"type": "image_pil", "image_pil": shown[0]}, {"type": "text", "text": "What?"}]
    with tiny_llm(GGUF / family, **arguments_of(family)) as (llm, _):
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        [answer] = llm.chat(cast("Any", [{"role": "user", "content": parts}]), PARAMS, use_tqdm=False)
    for golden, output in zip([*goldens, goldens[-1]], outputs, strict=True):
        assert output.prompt_token_ids == golden.expanded.tolist()
        assert list(output.outputs[0].token_ids) == golden.tokens.tolist()
        np.testing.assert_allclose(logprobs_of(output), golden.logprobs, rtol=0, atol=TOLERANCE)
    assert lengths(answer) == lengths(outputs[-1])[:1]


def lengths(output: RequestOutput) -> list[int]:
    """Return the number of prompt tokens that stand for each picture."""
    assert output.multi_modal_placeholders is not None
    return [span.length for span in output.multi_modal_placeholders["image"]]


def test_without_its_tower(tmp_path: Path) -> None:
    """A model reads text as before; the refusal of a picture says what is missing."""
    path = shutil.copy(GGUF / "qwen2_5_vl" / "qwen2_5_vl.gguf", tmp_path)
    golden = read_golden("qwen2_5_vl", "text")
    with tiny_llm(Path(path), **ARGUMENTS) as (llm, _):
        [output] = llm.generate([{"prompt_token_ids": golden.ids.tolist()}], PARAMS, use_tqdm=False)
        reason = r"the model takes text only: it sees with its mmproj\*.gguf beside it, and there is none"
        with pytest.raises(VLLMValidationError, match=reason):
            llm.generate([prompt_of("qwen2_5_vl", read_golden("qwen2_5_vl", "one"))], PARAMS, use_tqdm=False)
        parts: Any = [{"type": "image_pil", "image_pil": picture("qwen2_5_vl", 0)}]
        with pytest.raises(VLLMValidationError, match=reason):
            llm.chat([{"role": "user", "content": parts}], PARAMS, use_tqdm=False)
    np.testing.assert_allclose(logprobs_of(output), golden.logprobs, rtol=0, atol=TOLERANCE)
